"""Decisions: the file that people write, held to its runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from dwslm.runs.decisions import Decision, Figure, check, load
from dwslm.runs.folder import RunFolder
from tests.runs.made import make_run

FILE = """
[[decision]]
test = "learning-rate"
title = "learning rate"
question = "Which rate?"
result = "1e-2 best at 8 layers, 1.342 against 1.351 at half; 0.7% apart"
decision = "3.7e-3 for the main run"
number = "K11, K15"
date = 2026-11-29
runs = ["{a}", "{b}"]
figures = [
    {{ printed = "1.342", run = "{a}", metric = "bits_per_byte" }},
    {{ printed = "1.351", run = "{b}", metric = "bits_per_byte", step = 2 }},
    {{ printed = "0.7%", run = "{b}", minus = "{a}", metric = "bits_per_byte", relative = true }},
]

[[decision]]
test = "soft-mtp"
title = "Soft-MTP"
result = "not run; the paper loses to plain training below 0.689B"
decision = "dropped for 256M"
number = "K9"
figures = [{{ printed = "0.689B", source = "its paper, table 3" }}]
"""


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    a = make_run(tmp_path / "runs", "best", losses=[3.0, 2.0], scores={2: 1.3421})
    b = make_run(tmp_path / "runs", "half", losses=[3.0, 2.0], scores={2: 1.3512})
    return a, b


def written(tmp_path: Path, runs: tuple[RunFolder, RunFolder], change: tuple[str, str] = ("", "")) -> Path:
    path = tmp_path / "decisions.toml"
    text = FILE.format(a=runs[0].id, b=runs[1].path.name)
    assert change[0] in text
    path.write_text(text.replace(*change), encoding="utf-8")
    return path


def test_a_file_that_holds(tmp_path: Path, runs: tuple[RunFolder, RunFolder]) -> None:
    path = written(tmp_path, runs)
    first, second = load(path)
    assert (first.test, first.title, first.question, first.number) == (
        "learning-rate",
        "learning rate",
        "Which rate?",
        "K11, K15",
    )
    assert (first.date, first.runs, first.file) == ("2026-11-29", [runs[0].id, runs[1].path.name], str(path))
    assert first.figures[1] == Figure(runs[1].path.name, "bits_per_byte", "1.351", 2)
    assert (second.runs, second.date, second.question) == ([], "", "")
    assert check(first, tmp_path / "runs") == [] and check(second, tmp_path / "runs") == []


def test_a_figure_that_differs_is_named_with_both_values(tmp_path: Path, runs: tuple[RunFolder, RunFolder]) -> None:
    scores = runs[0].path / "evals-trainer.jsonl"
    scores.write_text(scores.read_text().replace("1.3421", "1.3496"))
    path = written(tmp_path, runs)
    assert check(load(path)[0], tmp_path / "runs") == [
        f"{path}, learning-rate, figure 1: bits_per_byte of {runs[0].id} is printed as 1.342, found 1.350",
        f"{path}, learning-rate, figure 3: bits_per_byte of {runs[1].path.name} minus {runs[0].id} in percent "
        "is printed as 0.7%, found 0.1%",
    ]


@pytest.mark.parametrize(("change", "expected"), [
    (("1.351 at half", "1.35 at half"), "1.351 does not stand in the result"),
    (("1.351 at half", "11.351 at half"), "1.351 does not stand in the result"),
    (("; 0.7% apart", "; 0.7% apart, 12.5 hours"), "12.5 in the result is no figure"),
    (('{ printed = "0.7%"', '{ printed = "0.7 %"'), "0.7 % does not stand"),
    (('metric = "bits_per_byte", step', 'metric = "bits", step'), "no report at step 2|no 'bits'"),
    (("step = 2", "step = 3"), "no score 'bits_per_byte' at step 3"),
])  # fmt: skip
def test_what_does_not_hold(
    tmp_path: Path, runs: tuple[RunFolder, RunFolder], change: tuple[str, str], expected: str
) -> None:
    wrong = check(load(written(tmp_path, runs, change))[0], tmp_path / "runs")
    assert wrong and all("decisions.toml, learning-rate" in told for told in wrong)
    assert any(part in told for told in wrong for part in expected.split("|"))


def test_runs_that_are_gone_or_not_named(tmp_path: Path, runs: tuple[RunFolder, RunFolder]) -> None:
    path = written(tmp_path, runs, (f'runs = ["{runs[0].id}", ', "runs = ["))
    assert "is not among the runs that the decision rests on" in check(load(path)[0], tmp_path / "runs")[0]
    wrong = check(load(written(tmp_path, runs))[0], tmp_path / "elsewhere")
    assert len(wrong) == 5 and "no run" in wrong[0]  # two runs, three figures


def test_a_mean_over_seeds(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path, f"seed {seed}", losses=[2.0], scores={1: 1.0 + seed / 10}, seed=seed) for seed in (1, 2))
    figure = Figure(f"{a.id}, {b.id}", "bits_per_byte", "1.15")
    decision = Decision("t", "t", "", "1.15 on average", "", "K1", [a.id, b.id], [figure], "")
    assert check(decision, tmp_path) == []


@pytest.mark.parametrize(("change", "expected"), [
    (('title = "learning rate"\n', ""), r"decision 1 \(learning-rate\): title is missing"),
    (('title = "Soft-MTP"', "title = 5"), r"decision 2 \(soft-mtp\): title should be a text in quotes, not 5"),
    (('number = "K9"', 'k = "K9"'), "unknown key 'k'; known are test, title"),
    (('step = 2', 'step = "2"'), r"decision 1 \(learning-rate\), figure 2: step should be a whole number"),
    (('relative = true', 'relative = 1'), "figure 3: relative should be a true or false"),
    (("2026-11-29", '"soon"'), "date 'soon' is not YYYY-MM-DD"),
    (('test = "soft-mtp"', 'test = "learning-rate"'), "two decisions of the test 'learning-rate'"),
    (('test = "soft-mtp"', 'test = " "'), "test is empty"),
    (('source = "its paper, table 3"', 'source = "a", run = "b"'), "has a source, and a run"),
    (('minus = ', 'step = 2, printe = '), "unknown key 'printe'"),
    (("[[decision]]\ntest = \"soft", "[decision]\ntest = \"soft"), "decisions.toml: "),
    (('{ printed = "0.689B", source = "its paper, table 3" }', '"0.689B"'), "figure 1: should be a table"),
    (('number = "K9"', 'number = "K9'), r"decisions.toml: .*line"),
    (('number = "K9"', "number = K9"), r"decisions.toml: .*line"),
    (('[[decision]]', '[[decisions]]'), "unknown key 'decisions'"),
])  # fmt: skip
def test_a_file_that_makes_no_sense(
    tmp_path: Path, runs: tuple[RunFolder, RunFolder], change: tuple[str, str], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        load(written(tmp_path, runs, change))


def test_a_percentage_needs_what_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(
        '[[decision]]\ntest="t"\ntitle="t"\nresult="5%"\ndecision=""\nnumber=""\n'
        'figures=[{printed="5%", run="a", metric="loss", relative=true}]'
    )
    with pytest.raises(ValueError, match="figure 1: relative needs minus"):
        load(tmp_path / "d.toml")
    with pytest.raises(OSError, match=r"cannot read .*absent.toml: No such file"):
        load(tmp_path / "absent.toml")


def test_a_winner_is_held_to_the_noise(tmp_path: Path) -> None:
    def arms(second: list[float]) -> list[RunFolder]:
        found = []
        for arm, scores in (("kda", [1.313, 1.315]), ("gdn", second)):
            for seed, score in enumerate(scores):
                run = make_run(
                    tmp_path, arm, losses=[3.0, 2.0], scores={2: score}, seed=seed, settings={"model": {"local": arm}}
                )
                found.append(run)
        return found

    def checked(runs: list[RunFolder], **change: Any) -> list[str]:
        about = {"test": "t", "title": "t", "question": "", "result": "kda", "decision": "", "number": "", "date": ""}
        decision = Decision(**about | {"runs": [run.id for run in runs], "figures": [], "winner": runs[0].id} | change)
        return check(decision, tmp_path)

    clear = arms([1.342, 1.344])
    assert checked(clear) == []
    assert "gdn is 0.0290 worse than model.local=kda" in checked(clear, winner=clear[2].id)[0]
    assert "0.0010 better than" in checked(arms([1.314, 1.316]))[0]
    assert "no arm has two seeds" in checked([clear[0], clear[2]])[0]
    assert "only one arm" in checked(clear[:2])[0]
    assert "is not among its runs" in checked(clear[1:], winner=clear[0].id)[0]
    assert json.loads((clear[0].path / "run.json").read_text())["seed"] == 0
