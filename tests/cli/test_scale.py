"""`dwslm scale`: its tables, the document that holds them, and the exchange that it measures."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dwslm.cli import scale
from dwslm.cli.find import REPOSITORY
from dwslm.cli.scale_tables import OWED, document
from tests.train.test_scale import FILE

TINY = ["model.layers=4", "model.width=64", "model.heads=2", "model.kv_heads=1", "model.head_dim=32", "model.delta_heads=2",
        "model.delta_head_dim=32", "model.delta_gate_rank=8", "model.mlp_hidden=128"]  # fmt: skip
PAGE = REPOSITORY / "docs" / "scale.md"
MEASURED = REPOSITORY / "docs" / "results" / "ranks-h200.json"


def run(capsys, *settings: str, **changed) -> str:
    arguments = {"ranks": [1, 2], "vocab": 64, "measured": None, "write": None, "exchange": False} | changed
    scale.run(argparse.Namespace(overrides=list(settings), **arguments))
    return capsys.readouterr().out


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the table under a title, without its head."""
    lines = text.partition(f"### {title}")[2].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def measured(tmp_path) -> Path:
    """Of a tiny model: 8 micro-batches of 0.25 s on one GPU, 4 on each of two."""
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(FILE | {"settings": ["experiment=main", *TINY]}))
    return file


def test_without_measurements_only_what_can_be_counted_is_said(capsys):
    text = run(capsys, *TINY)
    assert OWED in text and "tokens/s" not in text and "Check" not in text
    one, two = rows(text, "What a step moves")
    assert one[1:4] == ["1", "1.00", "0"] and one[-2:] == ["0.00", "0.00"]
    assert two[1] == "2"


def test_measured_pieces_give_times_and_a_check(capsys, measured):
    text = run(capsys, *TINY, measured=str(measured), ranks=[1, 2, 16, 512])
    one, two, many, too_many = rows(text, "Expected")
    # 8 x 0.25 s, 10 + 10 ms of update, and nothing to exchange.
    assert one[2:] == ["524.3K", "8 of 65,536", "2,000.0", "0.0", "20.0", "0.0", "2,020.0", "0.0%", "259.5K"]
    assert two[3] == "4 of 65,536" and two[4] == "1,000.0"
    assert many[2:4] == ["524.3K", "1 of 32,768"]  # a sixteenth of the batch
    assert too_many[1:4] == ["512", "does not divide", ""]  # a quarter of a row for each
    within, _ = rows(text, "If it were dealt to the 8")
    assert within[1] == "16"
    check = {(row[0], row[1]): row[2:] for row in rows(text, "Check")}
    assert check["1", "tokens/s"] == ["259,549", "200,000", "+29.8%"]
    assert check["2", "of 2 times one GPU"][1] == "100.0%"
    assert check["2", "copies, ms"][1:] == ["owed", ""]
    assert ("1", "copies, ms") not in check


def test_a_run_that_no_plan_allows_is_refused(capsys, measured):
    found = json.loads(measured.read_text())
    found["runs"] = [{"ranks": 3, "tokens_per_second": 1}]
    measured.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="a measured run by 3 ranks can't have had"):
        run(capsys, *TINY, measured=str(measured))


def room(text: str) -> list[list[str]]:
    """Micro-batches on the two GPUs, for each number of ranks."""
    return [row[-2:] for row in rows(text, "What a GPU holds")]


def test_only_micro_batches_that_a_plan_takes_are_offered(capsys):
    """Of a tiny model all that divide fit."""
    ladder = "data.packing.ladder=[{start: 0.5, context: 16384}]"
    assert room(run(capsys, *TINY, ranks=[1, 3, 16])) == [["131,072"] * 2, ["does not divide"] * 2, ["32,768"] * 2]
    assert room(run(capsys, *TINY, "train.batch_tokens=393216", ranks=[3])) == [["131,072"] * 2]
    assert room(run(capsys, *TINY, ladder, ranks=[16, 64])) == [["32,768"] * 2, ["does not divide"] * 2]


def test_a_model_that_fits_in_no_batch_is_not_said_to_lack_a_better_one(capsys):
    """7B on two GPUs: 115 GB without a single token; and 4,096 tokens are half a row for each."""
    small = ["train.batch_tokens=4096", "train.micro_batch_tokens=auto"]
    tokens = room(run(capsys, *[s for s in scale.MODELS["7B"] if "batch" not in s], *small, ranks=[2]))
    assert tokens == [["does not fit", "does not divide"]]


def test_times_keep_to_the_models_own_micro_batch(capsys, measured):
    text = run(capsys, *TINY, "train.micro_batch_tokens=49152", "train.batch_tokens=393216", measured=str(measured))
    assert [row[3] for row in rows(text, "Expected")] == ["8 of 49,152", "4 of 49,152"]
    assert room(text) == [["131,072"] * 2, ["98,304"] * 2]


def test_a_measured_model_without_newton_schulz_is_refused(capsys, measured):
    found = json.loads(measured.read_text())
    found["settings"] += ["optim.matrices=adamw", "optim.head=adam", "optim.lr=0.01"]
    measured.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="measured model: without Newton-Schulz its rate cannot be told"):
        run(capsys, *TINY, measured=str(measured))


def test_a_file_without_runs_owes_the_check(capsys, measured):
    measured.write_text(json.dumps(json.loads(measured.read_text()) | {"runs": []}))
    text = run(capsys, *TINY, measured=str(measured))
    assert text.endswith("### Check\n\nOwed: the file of measurements holds no runs.\n")


@pytest.mark.parametrize(("changed", "said"), [({"ranks": [8, 0]}, "--ranks 0: must be"), ({"vocab": 0}, "--vocab 0")])
def test_numbers_below_one_are_refused(capsys, changed, said):
    with pytest.raises(ValueError, match=said):
        run(capsys, *TINY, **changed)


def test_a_page_is_written_between_its_marks(capsys, tmp_path):
    page = tmp_path / "scale.md"
    page.write_text(f"before\n{scale.BEGIN}\nold\n{scale.END}\nafter\n")
    assert "written" in run(capsys, *TINY, write=str(page))
    text = page.read_text()
    assert text.startswith(f"before\n{scale.BEGIN}\n\n### The models") and text.endswith(
        f"{OWED}\n\n{scale.END}\nafter\n"
    )
    run(capsys, *TINY, write=str(page))
    assert page.read_text() == text
    for wrong in ("no marks", f"{scale.END}{scale.BEGIN}", f"{scale.BEGIN}{scale.BEGIN}{scale.END}",
                  f"{scale.END}{scale.BEGIN}{scale.END}"):  # fmt: skip
        page.write_text(wrong)
        with pytest.raises(ValueError, match=r"scale\.md: must hold"):
            run(capsys, *TINY, write=str(page))
        assert page.read_text() == wrong


def test_the_documented_tables_are_current():
    text = document(scale.MODELS, scale.RANKS, scale.VOCAB, MEASURED if MEASURED.exists() else None)
    page = PAGE.read_text(encoding="utf-8")
    said = "run: dwslm scale --write docs/scale.md, with --measured docs/results/ranks-h200.json once that is there"
    assert scale.between_marks(PAGE, page, text) == page, said


def test_one_process_has_nobody_to_exchange_with(capsys):
    with pytest.raises(ValueError, match="--exchange needs ranks"):
        run(capsys, *TINY, exchange=True)


def test_two_processes_measure_their_exchange():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python",
               sys.executable, "-c", "from dwslm.cli import main; main()", "scale", "--exchange",
               "--vocab=64", *TINY]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["scatter_rate"] * found["scatter_seconds"] == pytest.approx(found["share_bytes"])
    assert found["gather_rate"] > 0
