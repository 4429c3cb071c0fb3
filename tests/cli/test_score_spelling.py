"""The spelling tests from the entry point's side: a checkpoint, a table, and rows in its run."""

import pytest

from dwslm.cli.launch import launch
from dwslm.cli.score import score_checkpoint
from dwslm.config import ScoreConfig
from dwslm.evaluate.spelling import TESTS, SpellingSettings
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import evals
from tests.train.tiny_run import STEPS, tiny_config


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory) -> RunFolder:
    runs = tmp_path_factory.mktemp("runs")
    launch(tiny_config(tiny_data, runs), [])
    return open_run("latest", runs)


def scoring(run: RunFolder, **changes) -> ScoreConfig:
    config = ScoreConfig(checkpoint=run.path.name, runs_dir=str(run.path.parent), device="cpu", **changes)
    config.evaluate.bootstrap_samples = 10
    return config


def test_a_checkpoint_is_asked_and_its_answers_land_in_the_run(run, capsys):
    score_checkpoint(scoring(run), [])
    config = scoring(run, spelling=True, spelling_tests=SpellingSettings(items=2, shots=0))
    config.evaluate.context = 256
    score_checkpoint(config, ["evaluate.context=256"])
    said = capsys.readouterr().out
    assert "Spelling and counting, context 256" in said and "Held-out bits per byte" in said
    assert all(name in said for name in TESTS)
    rows = [row for row in evals(run) if row["slice"] == "spelling"]
    assert [row["test"] for row in rows if not row["test"].endswith("/all")] == list(TESTS)
    assert len(rows) == len(TESTS) + 4 and {row["writer"] for row in rows} == {"score"}
    for row in rows:
        assert row["step"] == STEPS and row["tokens"] == STEPS * 256 and row["context"] == 256
        assert 0 <= row["interval"][0] <= row["accuracy"] <= row["interval"][1] <= 1
        assert row["settings"] == {"items": 2, "shots": 0, "seed": 0, "words": None}


def test_bits_per_byte_are_the_same_with_and_without(run):
    """The tests leave the model as it was: one that read the held-out text before scores it alike after."""
    config = scoring(run, bands=True, spelling=True, spelling_tests=SpellingSettings(items=1, shots=0))
    config.evaluate.context, config.evaluate.bands = 256, [64, 128]
    given = ["evaluate.context=256", "evaluate.bands=[64,128]"]
    score_checkpoint(config, given)
    config.spelling, config.spelling_tests = False, SpellingSettings()
    score_checkpoint(config, given)
    by_attempt: dict[int, list[int]] = {}
    for row in evals(run):
        if row["writer"] == "score" and row["slice"] in ("overall", "band"):
            by_attempt.setdefault(row["attempt"], []).append(row["nats_fixed"])
    *_, with_tests, without = by_attempt.values()
    assert len(without) > 1 and with_tests == without


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "a.txt", "spelling": True}, "text= scores one file: leave out .*spelling and spelling_tests"),
        ({"spelling_tests": SpellingSettings(items=3)}, "give spelling=true too"),
        (
            {"spelling": True, "spelling_tests": SpellingSettings(items=2)},
            r"a row of context 64 holds 63: give evaluate\.context=\d+ or more",
        ),
        ({"spelling": True, "spelling_tests": SpellingSettings(words="none.txt")}, r"none\.txt: no such word list"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_scored(run, change, message, capsys):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        score_checkpoint(scoring(run, **change), [])
    assert "Held-out" not in capsys.readouterr().out
