"""Several processes that train one run: the same run as one process, on any number of them, and through every loss of one."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dwslm.cli.launch import launch
from dwslm.config import RunConfig, ScoreConfig
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import evals, events, metrics
from dwslm.train import checkpoint as checkpoints
from dwslm.train import distributed, loop
from dwslm.train.distributed import RankSettings
from dwslm.train.guard import GuardSettings
from dwslm.train.saver import Saver
from tests.train.rank_processes import Ranks, kill_all, wait_for
from tests.train.tiny_run import tiny_config

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 8, 512
LOSS, WEIGHTS = 2e-6, 2e-4  # relative: another order of float32 sums, after 8 steps


def config_of(data: Path, runs: Path, world: int, grad_accum: int, **train) -> RunConfig:
    """8 steps of 512 tokens, saved after 4 and 8, scored after 4 and 8."""
    sizes = {"batch_tokens": BATCH, "micro_batch_tokens": BATCH // (world * grad_accum), "tokens": STEPS * BATCH}
    config = tiny_config(data, runs, **{**sizes, "eval_every_tokens": 4 * BATCH, **train})
    config.checkpoint = replace(config.checkpoint, every_tokens=4 * BATCH)
    config.ranks = RankSettings(silence_seconds=120)  # on a busy machine nobody is lost who is only slow
    return config


def train(runs: Path, world: int, grad_accum: int, data: Path, overrides: list[str] | None = None) -> RunFolder:
    runs.mkdir(exist_ok=True)
    config = config_of(data, runs, world, grad_accum)
    resume = {"resume": "latest"} if overrides else {}
    if world == 1:
        launch(replace(config, **resume), overrides or [])
    else:
        ranks = Ranks(world, replace(config, **resume), overrides or [], runs / "said")
        codes = ranks.wait()
        assert codes == [0] * world, [ranks.said(rank) for rank in range(world)]
    return open_run("latest", runs)


def state(run: RunFolder, step: int | None = None) -> dict[str, torch.Tensor]:
    found = next(one for one in checkpoints.find(run.checkpoints) if step in (None, one.step))
    found.verify()
    return found.load_model() | found.load_optimizer()


def figures(run: RunFolder, name: str) -> torch.Tensor:
    return torch.tensor([row[name] for row in metrics(run)], dtype=torch.float64)


def totals(run: RunFolder) -> dict[int, int]:
    return {row["step"]: row["nats_fixed"] for row in evals(run) if row["slice"] == "overall"}


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(scope="module")
def alone(tiny_data, tmp_path_factory) -> RunFolder:
    """One process, two micro-batches a step: what all others are held to."""
    return train(tmp_path_factory.mktemp("alone"), 1, 2, tiny_data)


def assert_alike(run: RunFolder, alone: RunFolder, exact: bool = False) -> None:
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(figures(run, name), figures(alone, name), rtol=LOSS, atol=0, msg=name)
    for name in ("step", "tokens", "lr", "scored", "segments", "text_share", "skipped"):
        assert [row[name] for row in metrics(run)] == [row[name] for row in metrics(alone)], name
    mine, truth = state(run), state(alone)
    assert mine.keys() == truth.keys()
    for name, tensor in truth.items():
        if exact:
            assert torch.equal(mine[name], tensor), name
        else:
            torch.testing.assert_close(mine[name], tensor, rtol=WEIGHTS, atol=WEIGHTS * float(tensor.abs().max()))
    assert checkpoints.pins(run.checkpoints) == checkpoints.pins(alone.checkpoints)


def test_two_ranks_are_one_that_accumulates_twice(tiny_data, tmp_path, alone):
    """Two micro-batches have one order of summation: every loss, weight, moment and score is equal bit for bit."""
    run = train(tmp_path / "two", 2, 1, tiny_data)
    assert_alike(run, alone, exact=True)
    assert torch.equal(figures(run, "loss"), figures(alone, "loss"))
    assert totals(run) == totals(alone) and len(totals(run)) == 2
    kept = [[one.step for one in checkpoints.find(each.checkpoints)] for each in (run, alone)]
    assert kept[0] == kept[1] and len(kept[0]) == 3
    saved = checkpoints.find(run.checkpoints)[0]
    names = [f"optimizer-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    assert saved.world == 2 and [name for name in sorted(saved.manifest["files"]) if name in names] == names
    for row in metrics(run):
        seconds = row["rank_seconds"]
        assert len(seconds) == 2 and row["slowest_rank"] == seconds.index(max(seconds)) and min(seconds) > 0
    assert "rank_seconds" not in metrics(alone)[0]
    assert run.record["hardware"]["ranks"] == 2
    # The first rank alone writes and speaks.
    said = [(tmp_path / "two" / "said" / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert "done: 4,096 tokens" in said[0] and said[1] == ""
    assert sorted(p.name for p in run.path.iterdir()) == sorted(p.name for p in alone.path.iterdir())


@pytest.mark.parametrize(
    ("world", "grad_accum"), [(1, 1), (1, 4), (2, 2), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_any_number_of_ranks_and_micro_batches_is_the_same_run(tiny_data, tmp_path, alone, world, grad_accum):
    run = train(tmp_path / "runs", world, grad_accum, tiny_data)
    assert_alike(run, alone)
    for step, nats in totals(alone).items():
        assert totals(run)[step] == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(tiny_data, tmp_path, alone, before, after):
    """Killed after its first save, and resumed: as if it had never stopped, and it says what is other than before."""
    runs = tmp_path / "runs"
    runs.mkdir()
    # Rank 0 holds all of them up, so that none is through before it is killed.
    config = config_of(tiny_data, runs, before, 2 // before)
    first = Ranks(before, config, [], runs / "before", fault=(0, 6, "sleep"))
    wait_for(lambda: bool(list(runs.glob("*/checkpoints/step-00000004/manifest.json"))))
    for rank in range(before):
        first.kill(rank)
    first.wait()
    at_save = state(open_run("latest", runs), 4)
    torch.testing.assert_close(at_save["head.weight"], state(alone, 4)["head.weight"])
    overrides = ["resume=latest", f"train.micro_batch_tokens={BATCH // max(after, 2)}"]
    run = train(runs, after, max(1, 2 // after), tiny_data, overrides)
    assert_alike(run, alone, exact=after < 4 and before < 4)
    [resumed] = [event for event in events(run) if event["event"] == "resume"]
    told = resumed["receipt"]["ranks"]
    assert told.startswith(f"{before} before, {after} now") and "dealt anew" in told


def test_a_checkpoint_scored_by_two_processes_has_the_same_totals(alone, tmp_path):
    """eval.py under a launcher; the document totals are integers, so equal means equal."""
    config = ScoreConfig(checkpoint=str(alone.path), runs_dir=str(alone.path.parent), device="cpu")
    ranks = Ranks(2, config, [], tmp_path / "said")
    assert ranks.wait() == [0, 0], ranks.said(0)
    assert "written to" in ranks.said(0) and ranks.said(1) == ""

    def rows(writer: str) -> list[dict]:
        of_writer = [row for row in evals(alone) if row["writer"] == writer and row["step"] == STEPS]
        own = ("attempt", "time", "mono", "writer")
        return [{name: value for name, value in row.items() if name not in own} for row in of_writer]

    assert rows("score") == rows("trainer") != []


def test_all_ranks_leave_out_the_same_steps_and_go_back_together(tiny_data, tmp_path):
    """A guard that takes nearly every step for a spike: what it decides, and the way back, are those of one process."""
    told = []
    for world in (1, 2):
        runs = tmp_path / str(world)
        runs.mkdir()
        config = config_of(tiny_data, runs, world, 2 // world, log_every=3)
        config.guard = GuardSettings(sigma=0.5, window=2, off_for=3, max_skips=1, max_rollbacks=1)
        config.checkpoint = replace(config.checkpoint, every_tokens=2 * BATCH)
        if world == 1:
            with pytest.raises(FloatingPointError, match="after going back 1 times"):
                launch(config, [])
        else:
            ranks = Ranks(world, config, [], runs / "said")
            assert ranks.wait() == [1, 1] and "error: " in ranks.said(0) and ranks.said(1) == ""
        names = ("event", "step", "tokens", "reason", "rows", "documents", "loss")
        own = [{name: event[name] for name in names if name in event} for event in events(open_run("latest", runs))]
        # Saves are written meanwhile, so their events may come a little earlier or later.
        told.append([event for event in own if event["event"] not in ("checkpoint", "checkpoint_deleted")])
    assert told[0] == told[1]
    assert [event["event"] for event in told[0]].count("rollback") == 1
    assert [event["event"] for event in told[0]].count("skip") >= 4


def test_all_of_a_way_back_is_under_patience(tiny_data, tmp_path, monkeypatch):
    """A save may have to be waited for, and every rank reads a whole checkpoint: longer than a step may take."""
    depth, going_back, seen = 0, False, []
    patience, back = distributed.Ranks.patience, loop.Trainer._go_back

    @contextmanager
    def counted(self: distributed.Ranks) -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            with patience(self):
                yield
        finally:
            depth -= 1

    def noted(trainer: loop.Trainer) -> None:
        nonlocal going_back
        going_back = True
        try:
            back(trainer)
        finally:
            going_back = False

    def watched(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if going_back:
                seen.append((name, depth > 0))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(distributed.Ranks, "patience", counted)
    monkeypatch.setattr(loop.Trainer, "_go_back", noted)
    for owner, name in ((Saver, "wait"), (loop, "load_checkpoint"), (checkpoints, "newest_before")):
        watched(owner, name)
    config = config_of(tiny_data, tmp_path, 1, 2, log_every=3)
    config.guard = GuardSettings(sigma=0.5, window=2, off_for=3, max_skips=1, max_rollbacks=1)
    config.checkpoint = replace(config.checkpoint, every_tokens=2 * BATCH)
    with pytest.raises(FloatingPointError, match="after going back 1 times"):
        launch(config, [])
    assert {name for name, _ in seen} == {"wait", "load_checkpoint", "newest_before"}
    assert all(patient for _, patient in seen), seen


# ---- what ends a run ----------------------------------------------------------------------------------------


HANG_SECONDS = 10


def begin(tiny_data: Path, runs: Path, fault: tuple[int, int, str], silence: float = 120) -> Ranks:
    """Two ranks, one of which does something to itself at an instant that no other program's load can shift."""
    runs.mkdir()
    config = config_of(tiny_data, runs, 2, 1)
    config.ranks = RankSettings(silence_seconds=silence)
    return Ranks(2, config, [], runs / "said", fault)


def resume_alone(runs: Path, data: Path, alone: RunFolder) -> None:
    launch(replace(config_of(data, runs, 1, 2), resume="latest"), ["resume=latest", "train.micro_batch_tokens=256"])
    assert_alike(open_run("latest", runs), alone, exact=True)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_and_nothing_is_lost(tiny_data, tmp_path, alone, victim):
    ranks = begin(tiny_data, tmp_path / "runs", (victim, 5, "kill"))
    codes = ranks.wait()
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    said = ranks.said(1 - victim)
    assert f"error: rank {victim} (pid {ranks.processes[victim].pid} on" in said and "has died; last seen in" in said
    if victim == 1:  # rank 0 writes the events
        last = events(open_run("latest", tmp_path / "runs"))[-1]
        assert last["event"] == "failed" and last["error"] == "RankLost" and ".py:" in last["reason"]
    resume_alone(tmp_path / "runs", tiny_data, alone)


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param(1, "sleep", marks=pytest.mark.slow),
        (0, "hold the interpreter"),
        pytest.param(1, "stop", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_ends_all_with_its_stack(tiny_data, tmp_path, alone, victim, how):
    """Asleep in its main thread; with the interpreter's lock held; or stopped altogether."""
    runs = tmp_path / "runs"
    ranks = begin(tiny_data, runs, (victim, 5, how), silence=HANG_SECONDS)
    if how == "stop":
        wait_for(lambda: ranks.processes[1 - victim].exitcode is not None)
        ranks.kill(victim)
    codes = ranks.wait()
    assert codes[1 - victim] == 1 and codes[victim] not in (0, None)
    assert f"rank {victim} (pid {ranks.processes[victim].pid} on" in ranks.said(1 - victim)
    run = open_run("latest", runs)
    if how != "stop":  # a process that is stopped writes nothing
        stacks = (run.path / f"stacks-rank{victim}-1.txt").read_text()
        assert "rank_processes.py" in stacks and "broken" in stacks
    resume_alone(runs, tiny_data, alone)


def test_a_rank_that_fails_ends_all_with_its_reason(tiny_data, tmp_path):
    ranks = begin(tiny_data, tmp_path / "runs", (1, 3, "raise"))
    codes = ranks.wait()
    assert codes[0] == 1 and codes[1] == 1
    assert "error: rank 1 failed: ValueError: this rank has had enough" in ranks.said(0)
    last = events(open_run("latest", tmp_path / "runs"))[-1]
    assert last["event"] == "failed" and "this rank has had enough" in last["reason"]


def test_what_is_wrong_for_all_is_said_once(tiny_data, tmp_path):
    (tmp_path / "runs").mkdir()
    config = config_of(tiny_data, tmp_path / "runs", 1, 1)  # one micro-batch makes a step: nothing for a second rank
    ranks = Ranks(2, config, [], tmp_path / "said")
    assert ranks.wait() == [1, 1]
    assert "error: train.batch_tokens=512 can't be dealt to 2 ranks" in ranks.said(0)
    assert ranks.said(1) == ""
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_signal_to_one_rank_lets_all_leave_after_the_same_step(tiny_data, tmp_path, alone):
    ranks = begin(tiny_data, tmp_path / "runs", (1, 3, "leave"))
    assert ranks.wait() == [75, 75]
    run = open_run("latest", tmp_path / "runs")
    last = events(run)[-1]
    assert last["event"] == "preempted" and last["signal"] == "SIGTERM"
    newest = checkpoints.newest_good(run.checkpoints)[0]
    assert newest is not None and newest.step == last["step"] and newest.world == 2
    resume_alone(tmp_path / "runs", tiny_data, alone)


@pytest.mark.slow
def test_ranks_killed_at_random_instants_lose_nothing(tiny_data, tmp_path, alone):
    """Any rank of two, at any time from its start on, resumed on two: in the end the run that was never disturbed."""
    draw, kills, begun_runs = random.Random(7), 0, itertools.count()
    while kills < 12:  # a run that reaches its end before the kills are used up is checked, and another one begun
        runs = tmp_path / f"run-{next(begun_runs)}"
        runs.mkdir()
        codes: list[int | None] = []
        while codes != [0, 0]:
            begun = any((path / "run.json").is_file() for path in runs.iterdir() if path.name[0] != ".")
            given = {"resume": "latest"} if begun else {}
            config = replace(config_of(tiny_data, runs, 2, 1), **given)
            config.ranks = RankSettings(silence_seconds=HANG_SECONDS)
            ranks = Ranks(2, config, ["resume=latest"] if begun else [], tmp_path / "said")
            if kills < 12:
                time.sleep(draw.uniform(0.05, 1.2))
                victim = draw.randrange(2)
                ranks.kill(victim)
                time.sleep(draw.uniform(0.0, 0.5))
                ranks.kill(1 - victim, signal.SIGTERM)  # as launchers do when a process has died
            codes = ranks.wait()
            assert None not in codes, "a rank stayed behind"
            kills += -signal.SIGKILL in codes
        run = open_run("latest", runs)
        assert_alike(run, alone, exact=True)
        assert totals(run) == totals(alone)


@pytest.mark.slow
def test_torchrun_starts_resumes_and_scores(tiny_data, tmp_path):
    """The commands of the documentation, as they are given."""
    model = ["model.layers=2", "model.pattern=[local,global]", "model.width=32", "model.heads=4", "model.kv_heads=2",
             "model.head_dim=8", "model.delta_heads=2", "model.delta_head_dim=16", "model.delta_gate_rank=8",
             "model.mlp_hidden=64", "model.depth_block=2"]  # fmt: skip
    start = ["experiment=demo", f"data.path={tiny_data}", *model, "train.tokens=2048", "train.batch_tokens=512",
             "data.packing.context=64", "train.micro_batch_tokens=256", "checkpoint.every_tokens=1024",
             "data.mixture.phases=[]"]  # fmt: skip
    where = f"runs_dir={tmp_path}"

    def torchrun(script: str, *words: str) -> str:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launcher, script, *words, where], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "1 accumulated on each of 2 ranks" in torchrun("train.py", *start)
    assert len(list(tmp_path.glob("*/run.json"))) == 1
    said = torchrun("train.py", "resume=latest", "train.tokens=4096")
    assert "done: 4,096 tokens" in said
    run = open_run("latest", tmp_path)
    assert metrics(run)[-1]["step"] == 8 and checkpoints.find(run.checkpoints)[0].world == 2
    assert "written to" in torchrun("eval.py", f"checkpoint={run.path.name}", "evaluate.bands=[]")
