"""A checkpoint that several ranks write: whole with all their files, or not there; the ranks are threads here."""

import threading
import time
from collections.abc import Callable
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
from dwslm.train.checkpoint import CheckpointSettings, find, save, save_share
from dwslm.train.distributed import Ranks
from dwslm.train.saver import Saver
from dwslm.train.shared_save import SharedSave
from tests.model.small import small_model
from tests.optim.rank_threads import Table, ThreadRanks, on_ranks


class Words:
    """A key-value store for all ranks."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}


class WordRanks(ThreadRanks):
    """Threads that also have words for each other."""

    def __init__(self, rank: int, table: Table, words: Words):
        super().__init__(rank, table)
        self.words = words

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def say(self, key: str, text: str) -> None:
        self.words.held[key] = text

    def hear(self, key: str) -> str:
        until = time.monotonic() + 120
        while key not in self.words.held:
            assert time.monotonic() < until, f"nobody said {key}"
            time.sleep(0.001)
        return self.words.held[key]


def with_words(world: int, work: Callable[[Any], Any]) -> list[Any]:
    words = Words()
    return on_ranks(world, lambda ranks: work(WordRanks(ranks.rank, ranks.table, words)))


MODEL = {"head": torch.randn(6, 4)}
SHARES = [
    {"step": torch.tensor(7), "head@0.exp_avg": torch.full((2, 4), 1.0)},
    {"head@2.exp_avg": torch.full((3, 4), 2.0), "m.momentum": torch.ones(2, 2)},
    {"head@5.exp_avg": torch.full((1, 4), 3.0)},
]


def put(root: Path, step: int, ranks: Any, number: int = 1) -> None:
    """What a rank's saver does."""
    shared = SharedSave(ranks, number)
    try:
        if ranks.leads:
            save(root, step, MODEL, SHARES[0], {"step": step}, shared=shared)
            shared.committed()
        else:
            save_share(root, step, SHARES[ranks.rank], shared)
    except OSError as error:
        shared.failed(error)
        raise


def test_every_rank_writes_its_file_and_the_manifest_vouches_for_all(tmp_path):
    with_words(3, lambda ranks: put(tmp_path, 7, ranks))
    [found] = find(tmp_path)
    found.verify()
    assert found.world == 3
    files = [f"optimizer-0000{rank}-of-00003.safetensors" for rank in range(3)]
    assert sorted(found.manifest["files"]) == ["model.safetensors", *files, "state.json"]
    state = found.load_optimizer()
    assert state.keys() == {"step", "head.exp_avg", "m.momentum"} and int(state["step"]) == 7
    assert state["head.exp_avg"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
    damaged = found.path / files[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"optimizer-00001-of-00003.safetensors has \d+ bytes"):
        found.verify("size")


@pytest.mark.parametrize(("failing", "folder_gone"), [(0, False), (0, True), (1, False), (2, False)])
def test_where_one_rank_cannot_write_nothing_is_left_and_all_hear_why(tmp_path, monkeypatch, failing, folder_gone):
    """folder_gone: the others come to write only when rank 0 has given up and taken the folder away."""
    with_words(3, lambda ranks: put(tmp_path, 5, ranks))
    real = checkpoint.write_tensors
    name = f"optimizer-0000{failing}-of-00003.safetensors"

    def full(path: Path, tensors: Any) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        if folder_gone and path.name.startswith("optimizer-"):
            until = time.monotonic() + 120
            while path.parent.exists():
                assert time.monotonic() < until
                time.sleep(0.001)
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)

    def told(ranks: Any) -> str:
        with pytest.raises(OSError) as caught:
            put(tmp_path, 7, ranks)
        return str(caught.value)

    assert all("No space left on device" in text for text in with_words(3, told))
    assert [one.step for one in find(tmp_path)] == [5]
    monkeypatch.undo()
    with_words(3, lambda ranks: put(tmp_path, 9, ranks, number=2))
    assert [one.step for one in find(tmp_path)] == [9, 5]
    assert not list(tmp_path.glob("tmp-*"))


def test_savers_of_all_ranks_count_the_same_failures_and_try_a_pin_again(tmp_path, monkeypatch):
    """Rank 1's disk is full for two saves: both are failures of all, and the pinned one is made up for by all."""
    run = create_run(tmp_path, "run", {})
    writer = RunWriter(run, 1)
    real, left = checkpoint.write_tensors, [2, 3]

    def sometimes(path: Path, tensors: Any) -> None:
        step = int(path.parent.name.rpartition("-")[2])
        if path.name == "optimizer-00001-of-00002.safetensors" and step in left:
            left.remove(step)
            raise OSError(28, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", sometimes)
    monkeypatch.setattr(saver, "_host", lambda shape, dtype, pin: torch.empty(shape, dtype=dtype))

    def work(ranks: Any) -> list[tuple[int | None, int]]:
        mine = writer if ranks.leads else Silent()
        one = Saver(run, mine, Console(quiet=True), made(ranks), CheckpointSettings(keep_last=9), ranks)
        seen = []
        for step in (1, 2, 3, 4):
            one.save(step, 10 * step, {"step": step}, "phase" if step == 3 else None)
            one.wait()
            seen.append((one.saved_step, len(one._failed)))
        return seen

    first, second = with_words(2, work)
    assert first == second == [(1, 0), (None, 1), (None, 2), (4, 0)]
    assert sorted(one.step for one in find(run.checkpoints)) == [1, 3, 4]
    assert checkpoint.pins(run.checkpoints) == {3: ["phase"]}
    told = [event["step"] for event in events(run) if event["event"] == "checkpoint_failed"]
    assert told == [2, 3]
    by_step = {one.step: one for one in find(run.checkpoints)}
    whole = made(None)
    for one in by_step.values():  # each is of its own step, and of the whole model
        whole.load(one.load_model(), one.load_optimizer())
    writer.close()


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), KeyError("a fault of ours")])
def test_a_committed_checkpoint_is_saved_for_all_even_where_retention_fails(tmp_path, monkeypatch, error):
    """Rank 1 listens only once rank 0 is through with everything: what it then finds is that the checkpoint is there."""
    run = create_run(tmp_path, "run", {})
    through = threading.Event()

    def refused(*_: Any, **__: Any) -> list[Path]:
        raise error

    monkeypatch.setattr(checkpoint, "retain", refused)
    real = SharedSave.wait_committed

    def late(self: SharedSave) -> None:
        assert through.wait(60)
        real(self)

    monkeypatch.setattr(SharedSave, "wait_committed", late)

    def work(ranks: Any) -> tuple[int | None, OSError | None]:
        mine = writer if ranks.leads else Silent()
        one = Saver(run, mine, Console(quiet=True), made(ranks), CheckpointSettings(), ranks)
        one.save(1, 10, {"step": 1}, None)
        if ranks.leads:
            assert one._thread is not None
            one._thread.join()
            through.set()
            if isinstance(error, KeyError):  # a fault of ours ends the run, and is rank 0's own
                with pytest.raises(KeyError):
                    one.wait()
        else:
            one.wait()
        return one.saved_step, one.failure

    with RunWriter(run, 1) as writer:
        assert with_words(2, work) == [(1, None), (1, None)]
    assert [found.step for found in find(run.checkpoints)] == [1]


def test_after_committed_nothing_else_is_said():
    words = Words()
    shared = SharedSave(WordRanks(0, Table(2), words), 1)
    shared.begun()
    shared.committed()
    before = dict(words.held)
    shared.failed(OSError("too late"))
    assert words.held == before and "too late" not in str(before)


class Silent:
    """A writer that writes nothing."""

    def event(self, *_: Any, **__: Any) -> None: ...
    def flush(self) -> None: ...


def made(ranks: Any) -> Optimizer:
    model = small_model(layers=2, pattern=["local", "global"], depth_block=2)
    return Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1, ranks=ranks)


def test_alone_nothing_is_waited_for_and_nothing_left_anywhere():
    shared = SharedSave(Ranks(), 1)
    shared.begun()
    shared.wait_written()
    shared.committed()
    shared.failed(OSError("x"))
    shared.wait_committed()
