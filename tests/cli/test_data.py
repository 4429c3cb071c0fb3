"""`dwslm prepare` and `dwslm data` as a user types them."""

import argparse
import gzip
import json
import re
import subprocess
import sys

import pytest

from dwslm.cli import main
from dwslm.cli import prepare as prepare_command
from dwslm.cli.prepare import Clock
from dwslm.cli.prepare import add_parser as prepare_parser
from dwslm.data.sample import Done
from tests.data.prepare_case import contents, records, write_jsonl


@pytest.fixture
def dwslm(monkeypatch, capsys):
    """Runs a command; returns its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dwslm", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            return end.code, capsys.readouterr()
        return 0, capsys.readouterr()

    return run


@pytest.fixture
def inputs(tmp_path):
    train = [write_jsonl(tmp_path / f"t{i}.jsonl", records(100, f"t{i}-")) for i in range(2)]
    return ["--train", *train, "--valid", write_jsonl(tmp_path / "v.jsonl", records(30, "v")), "--shard-tokens", "1500"]


def test_pieces_from_the_command_line(tmp_path, inputs, dwslm):
    tokenizer = ["--tokenizer", tmp_path / "tokenizer.json", "--dedup", "--decontaminate", "remove"]
    learn = ["--vocab-size", "300", "--tokenizer-only"]
    assert dwslm("prepare", *inputs, *learn, "--out", tmp_path / "tokenizer.json")[0] == 0
    assert dwslm("prepare", *inputs, *tokenizer, "--out", tmp_path / "straight", "--workers", 2)[0] == 0
    pieces = [tmp_path / "one", tmp_path / "two"]
    for number, piece in enumerate(pieces, start=1):
        code, said = dwslm("prepare", *inputs, *tokenizer, "--out", piece, "--piece", f"{number}/2")
        assert code == 0, said.err
    code, said = dwslm("prepare", "merge", tmp_path / "merged", *pieces)
    assert code == 0 and "runs of 13 words that are held out" in said.out
    assert contents(tmp_path / "merged") == contents(tmp_path / "straight")
    code, said = dwslm("prepare", "merge", tmp_path / "half", pieces[0])
    assert (code, said.err) == (1, "error: piece 2/2 is missing (1 of 2 are)\n")


def test_the_way_out_of_another_dataset_under_the_samples_name_is_one(tmp_path, dwslm, monkeypatch):
    for split, count in (("train", 100), ("valid", 30)):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            for row in records(count, split):
                file.write(json.dumps({**row, "license": "CC0"}) + "\n")
    monkeypatch.setattr(prepare_command, "SAMPLE", tmp_path)
    sample = ["prepare", "--sample", "--out", tmp_path / "out", "--vocab-size"]
    assert dwslm(*sample, 300)[0] == 0
    code, said = dwslm(*sample, 280)
    assert code == 1 and "give --overwrite to replace it" in said.err
    assert dwslm(*sample, 280, "--overwrite")[0] == 0
    assert json.loads((tmp_path / "out" / "train" / "manifest.json").read_bytes())["vocab_size"] == 280


def test_prepare_tells_of_held_out_texts_in_training(tmp_path, inputs, dwslm):
    copied = [{**row, "id": f"again-{row['id']}"} for row in records(30, "v")[:3]]
    more = ["--train", *inputs[1:3], write_jsonl(tmp_path / "copied.jsonl", copied), *inputs[3:], "--vocab-size", "300"]
    code, said = dwslm("prepare", *more, "--out", tmp_path / "out")
    assert code == 0 and "note: 3 of the 30 held-out documents" in said.out
    code, said = dwslm("prepare", *more, "--dedup", "--out", tmp_path / "clean")
    assert code == 0 and "3 train documents" in said.out and "note:" not in said.out


def test_inspect_and_verify(tmp_path, inputs, dwslm):
    dwslm("prepare", *inputs, "--vocab-size", "300", "--out", tmp_path / "out")
    code, said = dwslm("data", "inspect", tmp_path / "out", "--samples", 1)
    assert code == 0
    assert "train: totals by source" in said.out and "valid: totals by language" in said.out
    assert "of 4,096 tokens or more: 0 documents (0.00%) with 0.00% of the tokens" in said.out
    code, said = dwslm("data", "inspect", tmp_path / "out" / "train", "--json", "--samples", 2)
    figures = json.loads(said.out)["train"]
    assert figures["totals"]["documents"] == 200 and len(figures["samples"]) == 2
    assert sum(row["documents"] for row in figures["lengths"]["classes"]) == 200
    code, said = dwslm("data", "verify", tmp_path / "out")
    assert code == 0 and said.out.count("checksums, offsets, byte sums, totals and ids are right") == 2
    (tmp_path / "out" / "train" / "00001.bin").unlink()
    code, said = dwslm("data", "verify", tmp_path / "out")
    assert code == 1 and "00001.bin is missing" in said.out and "1 faults; prepare it again" in said.err


@pytest.mark.parametrize("flag", ["--samples", "--characters", "--seed"])
def test_inspect_refuses_numbers_below_0(tmp_path, inputs, dwslm, flag):
    dwslm("prepare", *inputs, "--vocab-size", "300", "--out", tmp_path / "out")
    code, said = dwslm("data", "inspect", tmp_path / "out", flag, -1)
    assert code == 1 and said.err.strip() == f"error: {flag} -1: must be 0 or more" and not said.out


@pytest.mark.parametrize(
    ("flag", "value"), [("--megabytes", "nan"), ("--megabytes", "inf"), ("--megabytes", "0"), ("--rounds", "0")]
)
def test_rate_refuses_what_is_no_amount(dwslm, flag, value):
    code, said = dwslm("data", "rate", "--text", "nowhere", "--tokenizer", "nowhere", flag, value)
    assert code == 1 and said.err.startswith(f"error: {flag} {value}: must be")


def test_progress_lines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dwslm.cli.prepare.time.monotonic", lambda: now[0])
    clock = Clock()
    assert clock.figures(Done("tokenize", 1000, 5_000_000, 0.1)) == "1,000 documents, 5.0 MB"
    now[0] += 10
    line = clock.figures(Done("tokenize", 3000, 25_000_000, 0.3))
    assert line == "3,000 documents, 25.0 MB, 2.0 MB/s, 0:00:35 left"  # 0.02 a second, 0.7 to go
    now[0] += 30
    line = clock.figures(Done("tokenize", 4000, 55_000_000, 0.6))
    assert line == "4,000 documents, 55.0 MB, 1.0 MB/s, 0:00:40 left"  # the last 30 seconds alone
    assert clock.figures(Done("merge", 1, 0, None)) == "1 documents, 0.0 MB"


def test_the_help_of_prepare_speaks_of_flags():
    """Its texts are those of the settings, in which flags have other names and nothing may be null."""
    commands = argparse.ArgumentParser().add_subparsers()
    prepare_parser(commands)
    actions = [action for action in commands.choices["prepare"]._actions if action.option_strings]
    assert len(actions) > 30
    for action in actions:
        flag, told = action.option_strings[-1], action.help % {"default": ""}
        assert action.metavar != "X" and (action.metavar or action.nargs == 0), flag
        assert not re.search(r"`(?!datasets` library)\w+(=\w+)?`|\w_\w|\b(null|None|Empty)\b|''", told), (flag, told)
    told = {action.option_strings[-1]: (action.metavar, action.help) for action in actions}
    assert told["--tokenizer"][0] == "FILE" and told["--out"][0] == "DIR" and told["--workers"][0] == "N"
    assert told["--dataset-split"] == ("NAME", "Split of --dataset to train on. (default train)")
    assert told["--overlap-share"][1].startswith("Where --decontaminate remove: ")


def test_preparing_does_without_pytorch():
    """Its libraries would take 0.2 GB beside a tokenizer's training."""
    code = "import sys\nfrom dwslm.cli import main\ntry: main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "prepare", "--help"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
