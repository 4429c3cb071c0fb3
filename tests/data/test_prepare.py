import gzip
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from dwslm.data.out_folder import OutFolder
from dwslm.data.prepare import prepare
from dwslm.data.prepare_settings import PrepareSettings
from dwslm.data.readers import FieldSettings
from dwslm.data.shards import id_hash, open_dataset
from dwslm.data.tokenizer import load_tokenizer, tokenizer_hash
from tests.data.prepare_case import contents, neighbours, records, run, settings, write_jsonl


@pytest.fixture
def text(tmp_path):
    """Paths of a training and a held-out file."""
    train = write_jsonl(tmp_path / "train.jsonl.gz", records(300))
    return train, write_jsonl(tmp_path / "valid.jsonl", records(40, "v"))


# ------------------------------------------------------------------------------------------ the result


def test_every_document_is_there_and_decodes_to_its_text(tmp_path, text):
    seen = []
    summary = prepare(settings(tmp_path / "out", text), seen.append)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    for split, expected in (("train", records(300)), ("valid", records(40, "v"))):
        data = open_dataset(tmp_path / "out" / split, verify="sha256")
        assert data.tokenizer_hash == tokenizer_hash(tmp_path / "out" / "tokenizer.json")
        assert data.docs["id_hash"].tolist() == [id_hash(record["id"]) for record in expected]
        for index, record in enumerate(expected):
            assert tokenizer.decode(data.tokens(index).tolist()) == record["text"]
            row = data.docs[index]
            assert row["bytes"] == len(record["text"].encode())
            assert data.sources[row["source"]] == record["source"]
            assert data.languages[row["language"]] == record["language"]
        assert summary[split]["documents"] == len(expected)
        assert summary[split]["bytes"] == sum(len(record["text"].encode()) for record in expected)
        for count in ("documents", "tokens", "bytes"):
            assert sum(slice_[count] for slice_ in summary[split]["slices"]) == summary[split][count]
    assert len(open_dataset(tmp_path / "out" / "train").manifest["shards"]) > 2
    assert seen[-1] == ("tokenize", 340, summary["train"]["bytes"] + summary["valid"]["bytes"], 1.0)
    assert [done.stage for done in seen] == ["sample", "train tokenizer", "tokenize", "tokenize"]
    assert neighbours(tmp_path / "out") == ["out"]


def test_same_text_elsewhere_gives_the_same_bytes(tmp_path, text):
    prepare(settings(tmp_path / "one", text))
    (tmp_path / "moved").mkdir()
    moved = [str(Path(path).rename(tmp_path / "moved" / Path(path).name)) for path in text]
    prepare(settings(tmp_path / "two", moved, skip_bad=3))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_split_by_group_keeps_pages_together(tmp_path, text):
    fields = FieldSettings(group_field="page")
    prepare(settings(tmp_path / "out", text, valid=[], valid_fraction=0.3, fields=fields))
    page = {id_hash(record["id"]): record["page"] for record in records(300)}
    pages = {
        split: {page[key] for key in open_dataset(tmp_path / "out" / split).docs["id_hash"].tolist()}
        for split in ("train", "valid")
    }
    assert not pages["train"] & pages["valid"]
    assert len(pages["train"] | pages["valid"]) == 75
    assert 10 <= len(pages["valid"]) <= 35  # 22.5 expected, about 3 standard deviations


def test_the_split_does_not_depend_on_what_else_is_there(tmp_path, text):
    half = write_jsonl(tmp_path / "half.jsonl", records(300)[::2])
    held_out = {}
    for name, path in (("whole", text[0]), ("half", half)):
        prepare(settings(tmp_path / name, (path, ""), valid=[], valid_fraction=0.2))
        held_out[name] = set(open_dataset(tmp_path / name / "valid").docs["id_hash"].tolist())
    assert held_out["half"] == held_out["whole"] & {id_hash(r["id"]) for r in records(300)[::2]}


def test_a_given_tokenizer_is_copied(tmp_path, text):
    prepare(settings(tmp_path / "first", text))
    given = str(tmp_path / "first" / "tokenizer.json")
    summary = prepare(settings(tmp_path / "second", text, tokenizer=given, vocab_size=None))
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == Path(given).read_bytes()
    assert summary["vocab_size"] == 300
    assert np.array_equal(
        open_dataset(tmp_path / "first" / "train").docs, open_dataset(tmp_path / "second" / "train").docs
    )
    with pytest.raises(ValueError, match="vocab_size=512, but .* has 300 entries"):
        prepare(settings(tmp_path / "third", text, tokenizer=given, vocab_size=512))


def test_licences_go_into_the_manifest(tmp_path, text):
    (tmp_path / "MIT.txt").write_text("Permission is hereby granted")
    fields = FieldSettings(licence_field="license")
    files = {"MIT": str(tmp_path / "MIT.txt")}
    prepare(settings(tmp_path / "out", text, fields=fields, licence_files=files))
    licences = open_dataset(tmp_path / "out" / "train").manifest["licences"]
    assert licences["MIT"]["text"] == "Permission is hereby granted" and licences["public-domain"]["text"] is None
    assert licences["MIT"]["documents"] == sum(record["license"] == "MIT" for record in records(300))


# ------------------------------------------------------------------------------------- what is refused


def test_a_bad_line_stops_or_is_listed(tmp_path, text):
    rows = records(50)
    raw = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    first, second = raw.split(b"\n", 1)
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(first + b"\n{broken\n" + second))
    with pytest.raises(ValueError, match=r"bad\.jsonl\.gz:2: malformed JSON.*--skip-bad N"):
        prepare(settings(tmp_path / "out", (path, text[1])))
    assert not (tmp_path / "out").exists()
    summary = prepare(settings(tmp_path / "out", (path, text[1]), skip_bad=1))
    assert [bad["place"] for bad in summary["bad"]] == [f"{path}:2"]
    assert summary["train"]["documents"] == 50
    assert prepare(settings(tmp_path / "out", (path, text[1]), skip_bad=1))["bad"] == summary["bad"]


def test_an_id_used_twice_names_both_places(tmp_path, text):
    double = write_jsonl(tmp_path / "double.jsonl", [*records(30, "v")[:3], records(300)[17]])
    with pytest.raises(ValueError, match=r"double\.jsonl:4: id 't17' is already taken by .*train\.jsonl\.gz:18"):
        prepare(settings(tmp_path / "out", (text[0], double)))
    summary = prepare(settings(tmp_path / "out", (text[0], double), skip_bad=1))
    assert summary["valid"]["documents"] == 3 and len(summary["bad"]) == 1


def test_too_little_text(tmp_path, text):
    with pytest.raises(ValueError, match="vocab_size=9000: the training text only gives"):
        prepare(settings(tmp_path / "out", text, vocab_size=9000))


def test_a_split_without_documents(tmp_path, text):
    with pytest.raises(ValueError, match="no document for the valid split; change valid_fraction"):
        prepare(settings(tmp_path / "out", text, valid=[], valid_fraction=1e-9))


def test_complete_other_settings_overwrite(tmp_path, text):
    out = tmp_path / "out"
    assert not prepare(settings(out, text))["already_complete"]
    before = contents(out)
    assert prepare(settings(out, text))["already_complete"]
    with pytest.raises(
        ValueError, match=r"made otherwise \(settings\.vocab_size: 300 there, 310 now\); give --overwrite"
    ):
        prepare(settings(out, text, vocab_size=310))
    with pytest.raises(ValueError, match="only gives"):  # the old one stays until the new one is whole
        prepare(settings(out, text, vocab_size=9000, overwrite=True))
    assert contents(out) == before
    assert prepare(settings(out, text, vocab_size=310, overwrite=True))["vocab_size"] == 310
    assert neighbours(out) == ["out"]


def test_changed_input_is_not_taken_for_complete(tmp_path, text):
    prepare(settings(tmp_path / "out", text))
    write_jsonl(Path(text[1]), records(41, "v"))
    with pytest.raises(ValueError, match="made otherwise"):
        prepare(settings(tmp_path / "out", text))


def test_a_damaged_dataset_is_made_again_only_when_told(tmp_path, text):
    out = tmp_path / "out"
    prepare(settings(out, text))
    before = contents(out)
    (out / "train" / "00001.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"00001\.bin is cut short.*give --overwrite"):
        prepare(settings(out, text))
    prepare(settings(out, text, overwrite=True))
    assert contents(out) == before


def test_a_folder_with_other_things_is_never_touched(tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="out is there and was not made by prepare"):
        prepare(settings(tmp_path / "out", text, overwrite=True))
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"new\.partial is there and was not made by prepare"):
        prepare(settings(tmp_path / "new", text, overwrite=True))
    assert contents(tmp_path / "out") == contents(tmp_path / "new.partial") == {"thesis.tex": b"mine"}


def test_two_at_once(tmp_path, text):
    with (
        OutFolder(str(tmp_path / "out")).locked(),
        pytest.raises(ValueError, match="being written by another process"),
    ):
        prepare(settings(tmp_path / "out", text))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": ""}, "out is empty"),
        ({"train": []}, "no training text: give --train or --dataset"),
        ({"valid": []}, "held-out text: give either --valid .* or --valid-fraction"),
        ({"valid_fraction": 0.1}, "held-out text: give either"),
        ({"valid": [], "valid_fraction": 1.0}, r"valid_fraction=1\.0"),
        ({"format": "csv"}, "format='csv'"),
        ({"shard_tokens": 0}, "shard_tokens=0"),
        ({"skip_bad": -1}, "skip_bad=-1"),
        ({"eod_token": "</s>"}, "eod_token='</s>'"),
        ({"dataset_valid_split": "test"}, "without --dataset"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    given = {"out": "x", "train": ["a.jsonl"], "valid": ["b.jsonl"]}
    with pytest.raises(ValueError, match=message):
        PrepareSettings(**{**given, **changes})


# ----------------------------------------------------------------------------------- kills and full disks


@pytest.mark.slow
def test_killed_while_replacing_an_older_dataset(tmp_path, text):
    old, new = tmp_path / "old", tmp_path / "new"
    assert run(old, text).returncode == 0 and run(new, text, vocab_size=310).returncode == 0
    out = tmp_path / "out"
    run(out, text)
    instants, away, into_place = map(int, run(out, text, vocab_size=310).stdout.split())
    states = []
    for kill_at in (instants // 2, away, into_place, into_place + 1):
        assert run(out, text).returncode == 0
        killed = run(out, text, vocab_size=310, kill_at=kill_at)
        assert killed.returncode == -signal.SIGKILL
        there = out if out.exists() else tmp_path / ".out.replaced"
        assert contents(there) in (contents(old), contents(new))
        states.append((out.exists(), contents(there) == contents(new)))
        assert run(out, text, vocab_size=310).returncode == 0
        assert contents(out) == contents(new)
        assert neighbours(out) == ["out"]
    # Killed before, between and after the two renames.
    assert states == [(True, False), (True, False), (False, False), (True, True)]


def test_no_room_on_the_disk(tmp_path, text):
    """A limit on the size of a file stands in for a full disk: the write fails in the same place."""
    big = write_jsonl(tmp_path / "big.jsonl", records(3000, "b")), text[1]
    assert run(tmp_path / "whole", big, shard_tokens=20_000).returncode == 0
    limit = (tmp_path / "whole" / "train" / "00000.bin").stat().st_size - 1000
    assert limit > (tmp_path / "whole" / "tokenizer.json").stat().st_size
    out = tmp_path / "out"
    failed = run(out, big, shard_tokens=20_000, before=f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))")
    assert failed.returncode == 1
    message = failed.stderr.strip().splitlines()[-1]
    assert message.startswith(f"OSError: {out}: File too large; make room and run the same command again")
    assert not out.exists()
    assert run(out, big, shard_tokens=20_000).returncode == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_unfinished_work_with_other_settings(tmp_path, text, monkeypatch):
    out = tmp_path / "out"
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"id": "x"}])
    with pytest.raises(ValueError, match="only gives"):
        prepare(settings(out, text, vocab_size=9000))
    with pytest.raises(ValueError, match="no field 'text'"):  # nothing was done yet: no reason to refuse
        prepare(settings(out, (text[0], bad)))
    with pytest.raises(
        ValueError, match=r"out\.partial holds unfinished work with other settings \(other inputs\.valid"
    ):
        prepare(settings(out, text))
    prepare(settings(out, text, overwrite=True))
    prepare(settings(tmp_path / "straight", text))
    assert contents(out) == contents(tmp_path / "straight")
