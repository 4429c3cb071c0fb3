"""A branch goes on with all of a checkpoint, in a new run, with another mixture."""

import shutil
from dataclasses import replace

import pytest
import torch

from dwslm.cli.find import REPOSITORY
from dwslm.cli.launch import launch
from dwslm.config import RunConfig
from dwslm.data.mixture import Anneal, MixtureSettings, Phase
from dwslm.data.packing import PackingSettings, Rung
from dwslm.data.stochastok import StochasTokSettings
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import evals, events, metrics
from dwslm.train import checkpoint as checkpoints
from dwslm.train.checkpoint import CheckpointSettings
from tests.train.tiny_run import STEPS, in_child, tiny_config

AT = 18  # three quarters of the steps


@pytest.fixture(scope="module")
def parent(tiny_data, tmp_path_factory) -> RunFolder:
    runs = tmp_path_factory.mktemp("parent")
    launch(tiny_config(tiny_data, runs), [])
    return open_run("latest", runs)


def branched(parent: RunFolder, runs, which: str, **changes) -> RunConfig:
    """What the command line composes around `branch=`: defaults, which nobody named."""
    return replace(RunConfig(), branch=f"{parent.path}@{which}", runs_dir=str(runs), **changes)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    found, _ = checkpoints.newest_good(run.checkpoints)
    assert found is not None and found.step == STEPS
    return found.load_model() | found.load_optimizer()


def test_a_branch_that_changes_nothing_is_the_rest_of_the_run_bit_for_bit(parent, tmp_path):
    launch(branched(parent, tmp_path, "75%"), [f"branch={parent.path}@75%", f"runs_dir={tmp_path}"])
    run = open_run("latest", tmp_path)
    mine, truth = weights(run), weights(parent)
    assert mine.keys() == truth.keys() and all(torch.equal(mine[name], truth[name]) for name in mine)
    same = ("step", "tokens", "loss", "grad_norm", "lr")
    rows = [[row[name] for name in same] for row in metrics(run)]
    assert rows == [[row[name] for name in same] for row in metrics(parent) if row["step"] > AT]
    assert len(rows) == STEPS - AT


def test_a_dry_run_of_a_branch_leaves_nothing_behind(parent, tmp_path, capsys):
    launch(
        replace(branched(parent, tmp_path, "75%"), dry_run=True), [f"branch={parent.path}@75%", f"runs_dir={tmp_path}"]
    )
    assert not list(tmp_path.iterdir()) and "done:" not in capsys.readouterr().out


def test_another_mixture_is_served_from_there_on_and_the_origin_is_kept(parent, tmp_path):
    config = branched(parent, tmp_path, str(AT), name="other")
    config.data.mixture = MixtureSettings(anneal=Anneal(["notes"], 8.0))
    overrides = [f"branch={parent.path}@{AT}", f"runs_dir={tmp_path}", "name=other",
                 "data.mixture.anneal.sources=[notes]", "data.mixture.anneal.factor=8", "data.mixture.phases=[]"]  # fmt: skip
    launch(config, overrides)
    run = open_run("latest", tmp_path)
    assert "-other-" in run.path.name
    branch = run.record["branch"]
    assert (branch["run"], branch["step"], branch["row"]) == (parent.record["id"], AT, AT * 4)
    assert branch["changed"]["data.mixture.anneal.sources"] == ["notes"] and branch["changed"]["name"] == "other"
    (past,) = run.record["config"]["data"]["past"]
    assert past["until_row"] == AT * 4
    assert past["mixture"] == parent.record["config"]["data"]["mixture"]
    assert run.record["lr"] == parent.record["lr"] and run.record["config"]["train"] == parent.record["config"]["train"]
    start = events(run)[0]
    assert (start["event"], start["step"], start["branch"]) == ("start", AT, branch)
    losses = [{row["step"]: row["loss"] for row in metrics(r)} for r in (run, parent)]
    assert sorted(losses[0]) == list(range(AT + 1, STEPS + 1))
    assert losses[0][STEPS] != losses[1][STEPS]
    # A resume knows the past out of the run's own configuration.
    before = weights(run)
    for step in (24, 20):
        shutil.rmtree(run.checkpoints / f"step-{step:08d}", ignore_errors=True)
    launch(replace(RunConfig(), resume=str(run.path), runs_dir=str(tmp_path)), [f"resume={run.path}"])
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(run).values(), strict=True))


def test_a_branch_finds_the_same_text_elsewhere_and_no_other(parent, tiny_data, tmp_path):
    """What its errors tell a user to do is taken: data.path, train.device, data.allow_held_out_copies."""
    data, runs = tmp_path / "moved", tmp_path / "runs"
    shutil.copytree(tiny_data, data)
    config = branched(parent, runs, "75%")
    config.data.path, config.data.allow_held_out_copies, config.train.device = str(data), True, "auto"
    overrides = [f"data.path={data}", "data.allow_held_out_copies=true", "train.device=auto"]
    launch(config, [f"runs_dir={runs}", *overrides])
    run = open_run("latest", runs)
    assert run.record["dataset"]["path"].startswith(str(data)) and set(run.record["branch"]["changed"]) == {
        *(word.partition("=")[0] for word in overrides),
        "runs_dir",
    }
    assert all(torch.equal(a, b) for a, b in zip(weights(run).values(), weights(parent).values(), strict=True))
    for old, new in (("train", "was"), ("valid", "train"), ("was", "valid")):
        (data / old).rename(data / new)
    with pytest.raises(ValueError, match="point data.path at the run's own dataset"):
        launch(config, [f"runs_dir={runs}", *overrides])


def test_a_branch_killed_before_its_first_save_begins_again(parent, tmp_path):
    config = branched(parent, tmp_path, "75%")
    overrides = [f"branch={parent.path}@75%", f"runs_dir={tmp_path}"]
    in_child(config, overrides, lambda seconds: bool(list(tmp_path.glob("2*/run.json"))))
    run = open_run("latest", tmp_path)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    launch(replace(RunConfig(), resume=str(run.path), runs_dir=str(tmp_path)), [f"resume={run.path}"])
    assert all(torch.equal(a, b) for a, b in zip(weights(run).values(), weights(parent).values(), strict=True))


def test_what_a_branch_may_not_change_is_refused_with_both_values(parent, tmp_path):
    config = branched(parent, tmp_path, "75%")
    config.optim.lr = 0.01
    config.data.packing = PackingSettings(context=128)
    with pytest.raises(
        ValueError, match=r"data\.packing\.context \(64 there, 128 here\); optim\.lr \(0\.02 there, 0\.01"
    ):
        launch(config, ["optim.lr=0.01", "data.packing.context=128"])
    with pytest.raises(ValueError) as refused:
        launch(config, ["optim.lr=0.01"])
    document = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    assert str(refused.value).partition(" (0.02")[0] in " ".join(document.split())
    with pytest.raises(ValueError, match=r"train\.tokens \(6144 there"):
        launch(branched(parent, tmp_path, "75%"), ["train.tokens=23000000000"])
    with pytest.raises(ValueError, match="init_from="):
        launch(branched(parent, tmp_path, "75%", init_from=str(parent.path)), [])
    with pytest.raises(ValueError, match="resume= goes on with a run and branch="):
        launch(branched(parent, tmp_path, "75%", resume="latest"), [])
    with pytest.raises(ValueError, match="is the end of its run"):
        launch(branched(parent, tmp_path, str(STEPS)), [])
    with pytest.raises(ValueError, match="percentage of a pin; run .* has checkpoints of steps"):
        launch(branched(parent, tmp_path, "50%"), [])
    assert not list(tmp_path.iterdir())


def test_a_run_over_a_ladder_resumes_exactly_and_scores_at_its_last_context(tiny_data, tmp_path):
    def laddered(runs) -> RunConfig:
        config = tiny_config(tiny_data, runs, tokens=12 * 256)
        config.data.packing = PackingSettings(16, 8, window_tokens=512, ladder=[Rung(0.25, 32, 8), Rung(0.75, 128, 8)])
        config.data.mixture = MixtureSettings(phases=[Phase(0.5, {"books": 2.0})])
        config.checkpoint = CheckpointSettings(every_tokens=256, keep_last=20)
        return config

    launch(laddered(tmp_path / "straight"), [])
    straight = open_run("latest", tmp_path / "straight")
    rungs = [(event["step"], event["context"], event["rows"]) for event in events(straight) if event["event"] == "rung"]
    assert rungs == [(0, 16, 8), (3, 32, 4), (9, 128, 1)]
    truth = checkpoints.newest_good(straight.checkpoints)[0].load_model()
    for saved in (2, 3, 5, 9, 10):  # inside of rungs, and where they begin
        runs = tmp_path / str(saved)
        shutil.copytree(straight.path, runs / straight.path.name)
        run = open_run("latest", runs)
        for step in range(saved + 1, 13):
            shutil.rmtree(run.checkpoints / f"step-{step:08d}")
        launch(replace(RunConfig(), resume=str(run.path), runs_dir=str(runs)), [f"resume={run.path}"])
        found = checkpoints.newest_good(run.checkpoints)[0]
        assert found.step == 12
        assert all(torch.equal(tensor, truth[name]) for name, tensor in found.load_model().items()), saved


def test_a_run_on_split_tokens_resumes_exactly_and_is_scored_on_whole_ones(tiny_data, tmp_path):
    def splitting(runs) -> RunConfig:
        config = tiny_config(tiny_data, runs, tokens=8 * 256)
        config.data.stochastok = StochasTokSettings(enabled=True, proportion=0.3)
        config.checkpoint = CheckpointSettings(every_tokens=4 * 256, keep_last=20)
        return config

    launch(splitting(tmp_path / "straight"), [])
    straight = open_run("latest", tmp_path / "straight")
    truth = checkpoints.newest_good(straight.checkpoints)[0].load_model()
    shutil.copytree(straight.path, tmp_path / "again" / straight.path.name)
    run = open_run("latest", tmp_path / "again")
    shutil.rmtree(run.checkpoints / "step-00000008")
    launch(replace(RunConfig(), resume=str(run.path), runs_dir=str(run.path.parent)), [f"resume={run.path}"])
    again = checkpoints.newest_good(run.checkpoints)[0].load_model()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in again.items())

    launch(tiny_config(tiny_data, tmp_path / "whole", tokens=8 * 256), [])
    whole = open_run("latest", tmp_path / "whole")
    assert metrics(whole)[-1]["loss"] != metrics(straight)[-1]["loss"]
    scored = [
        {row["slice"]: (row["bytes"], row["text_tokens"]) for row in evals(r)}["overall"] for r in (straight, whole)
    ]
    assert scored[0] == scored[1]  # the held-out text, and its tokens, are what they were
