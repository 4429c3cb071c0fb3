"""Saving while training goes on: what is copied when, what is waited for, and what a disk that fails leads to."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.runs.folder import create_run
from dwslm.runs.reader import events
from dwslm.runs.writer import RunWriter
from dwslm.train import checkpoint, saver
from dwslm.train.checkpoint import CheckpointSettings, find
from dwslm.train.saver import Saver
from tests.model.small import small_model


def make_optimizer(device: str = "cpu") -> Optimizer:
    model = small_model(layers=2, pattern=["local", "global"], depth_block=2, dtype="bfloat16").to(device)
    return Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Saver]:
    run = create_run(tmp_path, "run", {})
    with RunWriter(run, 1) as writer:
        settings = CheckpointSettings(keep_last=2, max_failures=2)
        with Saver(run, writer, Console(quiet=True), make_optimizer(), settings) as made:
            yield made


def save(one: Saver, step: int, pin: str | None = None) -> None:
    one.save(step, 10 * step, {"step": step}, pin)


class Gate:
    """Holds `checkpoint.save` until it is opened; notes the steps that came to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.reached, self.steps = threading.Event(), threading.Event(), []
        real = checkpoint.save

        def held(root: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            self.steps.append(step)
            self.reached.set()
            assert self.open.wait(30)
            return real(root, step, *args, **kwargs)

        monkeypatch.setattr(checkpoint, "save", held)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_written_is_the_state_at_the_call_whatever_comes_after(one, monkeypatch, device):
    if device != "cpu":
        one = Saver(one.run, one.writer, one.console, make_optimizer(device), one.settings)
        assert all(tensor.is_pinned() for tensor in one._model.values())
    gate = Gate(monkeypatch)
    optimizer = one.optimizer
    optimizer.gradient.normal_()
    optimizer.step(0.1)
    weights, state = optimizer.weights(), optimizer.state()
    save(one, 1)
    assert one.saved_step is None and gate.reached.wait(30)  # it has returned, and nothing is written yet
    optimizer.gradient.normal_()
    optimizer.step(0.1)
    gate.open.set()
    one.wait()
    assert one.saved_step == 1
    [found] = find(one.run.checkpoints)
    loaded, loaded_state = found.load_model(), found.load_optimizer()
    assert loaded.keys() == weights.keys() and loaded_state.keys() == state.keys()
    assert all(
        torch.equal(loaded[name], w.cpu()) and loaded[name].dtype == torch.float32 for name, w in weights.items()
    )
    assert all(torch.equal(loaded_state[name], tensor.cpu()) for name, tensor in state.items())
    assert not all(torch.equal(loaded[name], now.cpu()) for name, now in optimizer.weights().items())


def test_a_save_waits_for_the_one_before_and_leaving_for_the_last(one, monkeypatch):
    gate = Gate(monkeypatch)
    save(one, 1)
    second = threading.Thread(target=save, args=(one, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive() and gate.steps == [1]
    gate.open.set()
    second.join()
    one.__exit__(None, None, None)
    assert gate.steps == [1, 2] and [found.step for found in find(one.run.checkpoints)] == [2, 1]


def test_the_event_comes_after_the_commit_and_before_retention(one, monkeypatch):
    order = []
    for owner, name in ((checkpoint, "save"), (checkpoint, "retain"), (RunWriter, "event")):
        real = getattr(owner, name)

        def noted(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            order.append(name)
            return result

        monkeypatch.setattr(owner, name, noted)
    for step in (1, 2, 3):
        save(one, step)
    one.wait()
    assert order == ["save", "event", "retain"] * 3 + ["event"]  # the last is of the deletion
    saved = [event for event in events(one.run) if event["event"] == "checkpoint"]
    assert [(e["step"], e["tokens"], e["path"]) for e in saved][-1] == (3, 30, "step-00000003")
    for event in saved:
        assert 0 <= event["blocked_seconds"] < event["seconds"] and event["write_seconds"] > 0
        assert event["seconds"] == pytest.approx(event["blocked_seconds"] + event["write_seconds"])
    assert events(one.run)[-1]["event"] == "checkpoint_deleted"


def failing(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Saves of these steps fail, one for each time a step is named."""
    real, left = checkpoint.save, list(steps)

    def maybe(root: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if step in left:
            left.remove(step)
            error = OSError(f"cannot save checkpoint {step}: No space left on device")
            error.errno = errno.ENOSPC
            raise error
        return real(root, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", maybe)


def test_saves_may_fail_but_not_too_often_in_a_row(one, monkeypatch):
    failing(monkeypatch, [2, 4, 5])
    for step in (1, 2, 3, 4, 5):
        save(one, step)
    with pytest.raises(OSError, match=r"cannot save checkpoint 5: No space .*; 2 saves failed in a row") as caught:
        save(one, 6)
    assert caught.value.errno == errno.ENOSPC
    assert [found.step for found in find(one.run.checkpoints)] == [3, 1]
    failed = [(e["step"], e["in_a_row"], e["allowed"]) for e in events(one.run) if e["event"] == "checkpoint_failed"]
    assert failed == [(2, 1, 2), (4, 1, 2), (5, 2, 2)]


@pytest.mark.parametrize("what", ["deletion", "row", "every row of it"])
def test_a_saved_checkpoint_counts_whatever_becomes_of_the_old_ones(one, monkeypatch, what):
    """An old checkpoint cannot be deleted, or the row of its deletion not be written: more often than saves may fail."""
    stale = OSError(errno.ESTALE, "Stale file handle")

    def refused(*_: Any, **__: Any) -> None:
        raise stale

    real = RunWriter.event

    def event(self: RunWriter, kind: str, /, **fields: Any) -> None:
        if kind == "checkpoint_deleted" or (kind == "retention_failed" and what != "row"):
            raise stale
        real(self, kind, **fields)

    save(one, 1)
    save(one, 2)
    one.wait()
    if what == "deletion":
        monkeypatch.setattr(checkpoint, "retain", refused)
    else:
        monkeypatch.setattr(RunWriter, "event", event)
    for step in (3, 4, 5):
        save(one, step, pin="phase" if step == 3 else None)
        one.wait()
        assert one.saved_step == step and one.failure is None
    told = [event for event in events(one.run) if event["event"] not in ("checkpoint", "start")]
    if what != "every row of it":
        assert {event["event"] for event in told} == {"retention_failed"}
        assert "Stale file handle" in told[0]["reason"]
    monkeypatch.undo()
    save(one, 6)
    one.wait()
    assert [found.step for found in find(one.run.checkpoints)] == [6, 5, 3]
    assert one._owed is None


def test_the_last_failure_is_known(one, monkeypatch):
    failing(monkeypatch, [1])
    save(one, 1)
    one.wait()
    assert "No space left" in str(one.failure) and one.saved_step is None
    save(one, 2)
    one.wait()
    assert one.failure is None and one.saved_step == 2


def test_a_pinned_checkpoint_that_failed_is_written_before_its_copy_is_gone(one, monkeypatch):
    failing(monkeypatch, [1])
    weights = one.optimizer.weights()
    save(one, 1, pin="phase")
    one.wait()
    one.optimizer.gradient.normal_()
    one.optimizer.step(0.1)
    save(one, 2)
    one.wait()
    assert checkpoint.pins(one.run.checkpoints) == {1: ["phase"]}
    pinned = find(one.run.checkpoints)[1]
    assert pinned.step == 1 and all(torch.equal(pinned.load_model()[name], weights[name]) for name in weights)


def test_a_pinned_checkpoint_that_cannot_be_written_ends_the_run_where_a_resume_makes_it(one, monkeypatch):
    failing(monkeypatch, [1, 1])
    save(one, 1, pin="phase")
    with pytest.raises(OSError, match="cannot save checkpoint 1"):
        save(one, 2)
    assert find(one.run.checkpoints) == []


def test_any_other_error_of_the_thread_is_raised_in_the_loop(one, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", lambda *_, **__: {}["a fault of ours"])
    save(one, 1)
    with pytest.raises(KeyError, match="a fault of ours"):
        one.wait()


def test_a_save_too_slow_for_the_grace_period_is_told_once_and_at_the_next_start(one, capsys):
    one.settings.grace_seconds = 1e-6
    one.console = Console()
    for step in (1, 2):
        save(one, step)
    one.wait()
    assert capsys.readouterr().out.count("give the launcher more time") == 1
    [event] = [event for event in events(one.run) if event["event"] == "slow_save"]
    assert event["grace_seconds"] == 1e-6 and event["save_seconds"] > 0
    with Saver(one.run, one.writer, one.console, one.optimizer, one.settings):
        assert capsys.readouterr().out.count("give the launcher more time") == 1
    one.settings.grace_seconds = 1e6
    with Saver(one.run, one.writer, one.console, one.optimizer, one.settings):
        assert capsys.readouterr().out == ""
    assert saver.SAVES_TO_LEAVE == 2
