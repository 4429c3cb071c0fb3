"""Interrupting a run at any instant changes nothing: not a weight, not a logged loss, not a score."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dwslm.cli.launch import launch
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import evals, events, metrics
from dwslm.train import checkpoint as checkpoints
from tests.train.tiny_run import STEPS, in_child, tiny_config

SAME = ("step", "tokens", "loss", "grad_norm", "lr", "scored", "segments", "text_share", "skipped")


@pytest.fixture(scope="module")
def straight(tiny_data, tmp_path_factory) -> RunFolder:
    """The uninterrupted run that all others are held to."""
    runs = tmp_path_factory.mktemp("straight")
    launch(tiny_config(tiny_data, runs), [])
    return open_run("latest", runs)


def assert_same_run(run: RunFolder, straight: RunFolder) -> None:
    """Weights, optimizer state, every logged figure but speeds, and every score: equal bit for bit."""
    mine, truth = (checkpoints.newest_good(r.checkpoints)[0] for r in (run, straight))
    assert mine.step == truth.step == STEPS
    for a, b in ((mine.load_model(), truth.load_model()), (mine.load_optimizer(), truth.load_optimizer())):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name
    assert [{k: row[k] for k in SAME} for row in metrics(run)] == [
        {k: row[k] for k in SAME} for row in metrics(straight)
    ]

    def overall(r: RunFolder) -> dict[int, int]:
        return {row["step"]: row["nats_fixed"] for row in evals(r) if row["slice"] == "overall"}

    assert overall(run) == overall(straight)
    assert checkpoints.pins(run.checkpoints) == checkpoints.pins(straight.checkpoints)


def test_the_straight_run_is_whole(straight):
    rows = metrics(straight)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert [e["event"] for e in events(straight)][0] == "start"
    assert events(straight)[-1]["event"] == "done"
    assert sorted({row["step"] for row in evals(straight)}) == [8, 16, 24]
    pins = checkpoints.pins(straight.checkpoints)
    # 24 is the best so far and 18 the phase's start: both pinned, so the two that keep_last keeps are 20 and 16.
    assert pins == {18: ["at-75-percent"], 24: ["best"]}
    assert [found.step for found in checkpoints.find(straight.checkpoints)] == [24, 20, 18, 16]


@pytest.mark.slow
def test_kill_9_at_twenty_random_instants_changes_nothing(tiny_data, tmp_path, straight):
    draw, kills = random.Random(), 0
    while kills < 20:  # a run that reaches its end before the kills are used up is checked, and another one begun
        runs = tmp_path / f"after-{kills}-kills"
        runs.mkdir()
        config, code = tiny_config(tiny_data, runs), None
        while code is None:
            begun = any(path.name[0] != "." for path in runs.iterdir())
            given = replace(config, resume="latest") if begun else config
            limit = draw.uniform(0.05, 1.0) if kills < 20 else float("inf")
            code = in_child(given, ["resume=latest"] if begun else [], lambda seconds, limit=limit: seconds > limit)
            kills += code is None
        assert code == 0
        assert_same_run(open_run("latest", runs), straight)


def test_resume_goes_back_to_the_last_checkpoint_and_past_a_damaged_one(tiny_data, tmp_path, straight, capsys):
    config = tiny_config(tiny_data, tmp_path)
    in_child(config, [], lambda seconds: len(list(tmp_path.glob("*/checkpoints/step-*/manifest.json"))) >= 2)
    run = open_run("latest", tmp_path)
    found = checkpoints.find(run.checkpoints)
    weights = found[0].path / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    launch(replace(config, resume="auto"), ["resume=auto"])
    said = capsys.readouterr().out
    assert f"passed over {found[0].path.name}" in said and "damaged" in said
    [receipt] = [row["receipt"] for row in events(run) if row["event"] == "resume"]
    assert receipt["checkpoint"] == str(found[1].path) and "sizes and sha256" in said
    assert_same_run(run, straight)


def test_a_finished_run_resumes_to_nothing_and_changes_nothing(straight):
    before = {p: p.read_bytes() for p in straight.checkpoints.rglob("*") if p.is_file()}
    config = tiny_config(Path(straight.record["config"]["data"]["path"]), straight.path.parent)
    launch(replace(config, resume="latest"), ["resume=latest"])
    assert {p: p.read_bytes() for p in straight.checkpoints.rglob("*") if p.is_file()} == before
    assert len(metrics(straight)) == STEPS


def test_one_and_four_accumulations_give_the_same_curve(tiny_data, tmp_path):
    losses = {}
    for micro in (256, 64):
        runs = tmp_path / str(micro)
        launch(tiny_config(tiny_data, runs, micro_batch_tokens=micro), [])
        losses[micro] = torch.tensor([row["loss"] for row in metrics(open_run("latest", runs))])
    assert torch.allclose(losses[256], losses[64], rtol=2e-4)
    assert torch.allclose(losses[256][:3], losses[64][:3], rtol=1e-5)
