"""What the tests of checkpoints share; as a program, it saves in processes of its own and kills them.

    checkpoint_child.py phases FOLDER             one child killed before, and one after, each disk operation
    checkpoint_child.py random FOLDER TRIES SEED  children killed after a random time

Each child works in FOLDER/<n>/checkpoints and notes in FOLDER/<n>/said what it was told is safe. torch is
imported once and the children are forked, or the imports would be most of the test.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dwslm.train import checkpoint

KEEP_LAST = 1
OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "chmod")
# The last two go over checkpoints that are there, as a run does that went back; 20 falls to retention.
STEPS = (10, 20, 30, 30, 10)
PINNED = {10: ("phase-0.75",)}


def content(step: int, turn: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Weights, optimizer state and JSON that are those of this step, and of this time of coming to it."""
    value = step + turn / 100
    model = {"head": torch.full((64, 32), value), "gain": torch.full((32,), value, dtype=torch.bfloat16)}
    return model, {"head.momentum": torch.full((64, 32), -value)}, {"step": step, "turn": turn}


def put(root: Path, step: int, turn: int = 0, pins: tuple[str, ...] = ()) -> Path:
    return checkpoint.save(root, step, *content(step, turn), pins=pins).path


def steps(root: Path) -> list[int]:
    return [one.step for one in checkpoint.find(root)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def work(folder: Path) -> None:
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    root = folder / "checkpoints"
    for turn, step in enumerate(STEPS):
        put(root, step, turn, PINNED.get(step, ()))
        os.write(said, json.dumps([step, turn]).encode() + b"\n")
        checkpoint.retain(root, KEEP_LAST)


def kill_at(instant: int) -> Callable[[], int]:
    """Kills this process at the given instant: two to each disk operation, before it and after it."""
    passed = 0

    def hook(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            passed += 1
            if passed == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in OPERATIONS:
        setattr(os, name, hook(getattr(os, name)))
    checkpoint.write_tensors = hook(checkpoint.write_tensors)  # type: ignore[attr-defined]
    return lambda: passed


def fork(folder: Path, task: Callable[[], None]) -> int:
    folder.mkdir()
    if child := os.fork():
        return child
    try:
        task()
        os._exit(0)
    except BaseException as error:  # a child must never go on as the parent
        print(f"child failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def main() -> None:
    how, where = sys.argv[1], Path(sys.argv[2])
    if how == "phases":
        instant, status = 0, signal.SIGKILL
        while status == signal.SIGKILL:  # until one comes to its end
            instant += 1

            def task(instant: int = instant) -> None:
                kill_at(instant)
                work(where / str(instant))

            status = os.waitpid(fork(where / str(instant), task), 0)[1]
        if status:
            sys.exit("a child failed")
        shutil.rmtree(where / str(instant))  # the one that was not killed
        print(instant - 1)
    else:
        tries, rng = int(sys.argv[3]), random.Random(int(sys.argv[4]))
        started = time.monotonic()
        os.waitpid(fork(where / "whole", lambda: work(where / "whole")), 0)
        whole = time.monotonic() - started
        shutil.rmtree(where / "whole")
        for n in range(tries):
            child = fork(where / str(n), lambda n=n: work(where / str(n)))  # type: ignore[misc]
            time.sleep(rng.random() * whole)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(tries)


if __name__ == "__main__":
    main()
