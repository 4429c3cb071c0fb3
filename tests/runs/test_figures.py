"""Figures of runs by name, and printed ones."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwslm.runs import reader
from dwslm.runs.figures import agrees, hours, like, parse_printed, value
from dwslm.runs.folder import RunFolder
from dwslm.runs.writer import RunWriter
from tests.runs.made import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    losses = [4.0 - step / 10 for step in range(1, 31)]
    return make_run(tmp_path, losses=losses, scores={10: 1.5, 30: 1.25}, settings={"model": {"layers": 8}})


def test_figures_by_name(run: RunFolder) -> None:
    assert value(run, "bits_per_byte") == 1.25
    assert value(run, "bits_per_byte", step=10) == 1.5
    assert value(run, "bits_per_byte[language=de]") == 2.5
    assert value(run, "bits_per_byte[source=wiki,language=de]", step=10) == 4.5
    assert value(run, "loss") == pytest.approx(sum(4.0 - step / 10 for step in range(11, 31)) / 20)
    assert value(run, "loss", step=7) == pytest.approx(3.3)
    assert (value(run, "tokens"), value(run, "step")) == (3000, 30)
    assert value(run, "hours") == pytest.approx(3000 / 1000 / 3600)
    assert value(run, "hours", step=10) == pytest.approx(1 / 3600)
    assert (value(run, "record.lr"), value(run, "record.config.model.layers")) == (0.01, 8.0)


@pytest.mark.parametrize(("metric", "step", "expected"), [
    ("lose", None, "no 'lose' in its metrics"), ("loss", 99, "no report at step 99"),
    ("bits_per_byte", 7, "no score 'bits_per_byte' at step 7"), ("bits_per_byte[source=news]", None, "no score"),
    ("bits_per_byte[slice=source]", None, "2 scores fit .*say which by more of"), ("bits_per_byte[wiki]", None, "FIELD"),
    ("bits_per_byte[source=wiki", None, "FIELD"), ("record.config", None, "no number in run.json"), ("record.lr", 3, "no step"),
])  # fmt: skip
def test_figures_that_are_not_there_are_named(run: RunFolder, metric: str, step: int | None, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"{run.path.name}: .*{expected}"):
        value(run, metric, step)


def test_scores_by_hand_count_where_training_has_none(run: RunFolder) -> None:
    for attempt, score in ((1, 0.9), (2, 0.8)):
        with RunWriter(run, attempt, writer="score") as writer:
            writer.evals({"step": 30, "tokens": 1, "slice": "overall", "bits_per_byte": 9.9})
            writer.evals(
                {"step": 30, "tokens": 1, "slice": "band", "first": 16384, "rope": "as trained", "bits_per_byte": score}
            )
            writer.evals(
                {
                    "step": 30,
                    "tokens": 1,
                    "slice": "band",
                    "first": 16384,
                    "rope": "YaRN x4",
                    "bits_per_byte": score / 2,
                }
            )
    assert value(run, "bits_per_byte") == 1.25
    assert value(run, "bits_per_byte[slice=band,rope=YaRN x4,first=16384]") == 0.4  # of the last scoring


def test_hours_leave_out_what_is_no_training(tmp_path: Path) -> None:
    run = make_run(tmp_path, losses=[1.0] * 4, step_tokens=3600)
    with RunWriter(run, 2) as writer:  # resumed from step 2, days later, at half the speed
        writer.event("resume", step=2, tokens=7200)
        writer.metrics({"step": 3, "tokens": 10800, "loss": 1.0, "tokens_per_second": 500.0})
        writer.metrics({"step": 4, "tokens": 14400, "loss": 1.0, "tokens_per_second": math.nan})
    assert hours(run, reader.metrics(run)) == pytest.approx([0.001, 0.002, 0.004, 0.004])


def test_hours_of_a_branch_are_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, losses=[1.0] * 3, step_tokens=3600)
    for name, old, new in (("events-trainer-1.jsonl", '"tokens": 0', '"tokens": 3600'), ("metrics-1.jsonl", "", "")):
        path = run.path / name
        path.write_text(path.read_text().replace(old, new) if old else "".join(path.read_text().splitlines(True)[1:]))
    assert hours(run, reader.metrics(run)) == pytest.approx([0.001, 0.002])


@pytest.mark.parametrize(("printed", "number", "half"), [
    ("1.342", 1.342, 0.0005), ("-0.013", -0.013, 0.0005), ("−0.013", -0.013, 0.0005), ("44,000", 44000, 0.5),
    ("3.7e-3", 0.0037, 5e-5), ("11.7%", 11.7, 0.05), ("8 %", 8, 0.5), ("182K", 182000, 500), ("0.5B", 5e8, 5e7),
    (".5", 0.5, 0.05),
])  # fmt: skip
def test_printed_numbers(printed: str, number: float, half: float) -> None:
    found = parse_printed(printed)
    assert (float(found[0]), float(found[1])) == (pytest.approx(number), pytest.approx(half))


@pytest.mark.parametrize("printed", ["", "x", "1.2.3", "1.2kg", "nan", "1e", "1 2"])
def test_what_is_no_number(printed: str) -> None:
    with pytest.raises(ValueError, match="is no number"):
        parse_printed(printed)


@pytest.mark.parametrize(("printed", "found", "expected"), [
    ("1.342", 1.3415, True), ("1.342", 1.34249, True), ("1.342", 1.3414, False), ("1.342", 1.3426, False),
    ("1.30", 1.304, True), ("1.30", 1.306, False), ("1.3", 1.306, True), ("182K", 182_400, True), ("182K", 182_600, False),
    ("-0.013", -0.0126, True), ("-0.013", 0.0126, False), ("1.3", math.nan, False), ("1.3", math.inf, False),
])  # fmt: skip
def test_a_figure_agrees_at_its_own_precision(printed: str, found: float, expected: bool) -> None:
    assert agrees(printed, found) is expected


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
@settings(max_examples=300)
def test_what_python_prints_agrees(found: float, places: int) -> None:
    printed = f"{found:.{places}f}"
    assert agrees(printed, found)
    assert not agrees(printed, found + 1.01 * 10**-places)
    assert not agrees(printed, found - 1.01 * 10**-places)


@pytest.mark.parametrize(("printed", "found", "expected"), [
    ("1.342", 1.35, "1.350"), ("1.342", 1.34261, "1.343"), ("182K", 190_000.0, "190K"), ("11.7%", 12.06, "12.1%"),
    ("3.7e-3", 0.00381, "0.0038"), ("1.3", math.nan, "nan"), ("5", 4.4, "4"),
])  # fmt: skip
def test_found_figures_are_told_like_the_printed(printed: str, found: float, expected: str) -> None:
    assert like(printed, found) == expected
