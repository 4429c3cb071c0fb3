"""Any life of a run: saving, crashing, resuming, longer and shorter plans, pins by hand. Real plans and checkpoints, no
training, so that thousands of saves cost seconds.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dwslm.config import RunConfig, resume_config, to_plain
from dwslm.optim.settings import OptimSettings
from dwslm.train import checkpoint
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.plan import Plan, make_plan
from dwslm.train.settings import TrainSettings
from tests.faults.inject import OPERATIONS

Action = tuple[str, int]
FIRST_PLAN = 8  # steps
BATCH = 2  # tokens of a step: the least that a row may hold
KEEP_LAST = 2
BY_HAND = "by-hand"


HOOKS = threading.Lock()  # the functions are the process's: one life at a time may have hooks in them


class Crash(BaseException):
    """Stands for kill -9: from its instant on nothing more is done, cleaning up included."""


@contextmanager
def crash_at(instant: int) -> Iterator[None]:
    """Crashes at the given disk operation of this thread, before it or after it by turns."""
    passed, owner = 0, threading.get_ident()
    HOOKS.acquire()
    real = {name: getattr(os, name) for name in OPERATIONS}

    def hook(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            if threading.get_ident() != owner:
                return operation(*args, **kwargs)
            passed += 1
            if passed >= instant:
                raise Crash
            result = operation(*args, **kwargs)
            passed += 1
            if passed >= instant:
                raise Crash
            return result

        return call

    try:
        for name, operation in real.items():
            setattr(os, name, hook(operation))
        yield
    finally:
        for name, operation in real.items():
            setattr(os, name, operation)
        HOOKS.release()


class Life:
    """A run that is only its checkpoints, and what must be true of them."""

    def __init__(self, root: Path):
        self.root = root
        self.config = RunConfig(
            train=TrainSettings(
                tokens=FIRST_PLAN * BATCH, batch_tokens=BATCH, micro_batch_tokens=BATCH, eval_every_tokens=0
            ),
            optim=OptimSettings(lr=0.1),
            checkpoint=CheckpointSettings(every_tokens=3 * BATCH, keep_last=KEEP_LAST, pin_fractions=[0.5, 0.75]),
        )
        self.config.data.packing.context = BATCH
        self.step = self.turn = self.crashes = 0
        self.newest: tuple[int, int] | None = None
        """Step and turn of the last checkpoint that was told safe."""
        self.under_way: tuple[int, int] | None = None
        """Of the one that a crash fell into."""
        self.pinned: dict[int, set[str]] = {}
        self.alive = True

    @property
    def plan(self) -> Plan:
        return make_plan(self.config.train, self.config.optim, self.config.checkpoint, BATCH)

    def save(self) -> None:
        self.turn += 1
        reason = self.plan.pins.get(self.step)
        self.under_way = self.step, self.turn
        weights = {"w": torch.tensor([float(self.step), float(self.turn)])}
        state = {"step": self.step, "turn": self.turn, "config": to_plain(self.config)}
        checkpoint.save(self.root, self.step, weights, {}, state, pins=[reason] if reason else [])
        self.newest, self.under_way = self.under_way, None
        if reason:
            self.pinned.setdefault(self.step, set()).add(reason)
        checkpoint.retain(self.root, KEEP_LAST)

    def train(self, steps: int) -> None:
        plan = self.plan
        for _ in range(min(steps, plan.steps - self.step)):
            self.step += 1
            if plan.saves(self.step):
                self.save()

    def crash(self, instant: int) -> None:
        """Trains on until disk operation number `instant` of the saves, or to the end of the plan."""
        try:
            with crash_at(instant):
                self.train(10**6)
        except Crash:
            self.crashes += 1
            self.alive = False

    def resume(self, tokens: int | None = None) -> None:
        """As `cli.launch.resume`: the newest good one, the stored configuration, and a longer plan if it may be."""
        checkpoint.clean(self.root)
        found, rejected = checkpoint.newest_good(self.root)
        half_deleted = [path for path, reason in rejected if "it has no manifest" not in reason]
        assert not half_deleted, rejected
        if found is None:
            assert self.newest is None, "it would start from nothing"
            self.step, self.alive = 0, True
            return
        state = found.state
        assert (state["step"], state["turn"]) in (self.newest, self.under_way), "not the newest valid checkpoint"
        self.newest, self.under_way = (state["step"], state["turn"]), None
        self.step, self.alive = state["step"], True
        stored, given = state["config"], to_plain(self.config)
        given["train"]["tokens"] = stored["train"]["tokens"] if tokens is None else tokens
        try:
            self.config, changed = resume_config(stored, given, ["train.tokens="])
        except ValueError as refused:
            assert tokens is not None and tokens < stored["train"]["tokens"], refused
            assert "not shorten it" in str(refused), refused
            self.config, changed = resume_config(stored, stored, [])
        if changed:
            self.save()

    def pin(self) -> None:
        if self.newest is not None:
            checkpoint.pin(self.root, self.newest[0], BY_HAND)
            self.pinned.setdefault(self.newest[0], set()).add(BY_HAND)

    def check(self) -> None:
        """Every pin, the newest one, and nothing half: whatever has happened."""
        found = {one.step: one for one in checkpoint.find(self.root)}
        for one in found.values():
            one.verify()
        for step, reasons in self.pinned.items():
            assert step in found, f"the pinned checkpoint of step {step} is gone"
            assert reasons <= set(checkpoint.pins(self.root).get(step, ())), f"step {step} has lost a pin"
        newest, _ = checkpoint.newest_good(self.root) if found else (None, [])
        told = (newest.state["step"], newest.state["turn"]) if newest else None
        assert told in (self.newest, self.under_way), f"the newest checkpoint is {told}, not {self.newest}"

    def live(self, actions: Sequence[Action]) -> None:
        """Does one after the other; raises AssertionError at the first thing lost."""
        for what, number in actions:
            tokens = self.config.train.tokens
            if what == "crash" and self.alive:
                self.crash(number)
            elif what == "resume":
                self.resume()
            elif what == "longer":
                self.resume(tokens + number * BATCH)
            elif what == "shorter":
                self.resume(max(BATCH, tokens - number * BATCH))
            elif what == "train" and self.alive:
                self.train(number)
            elif what == "pin" and self.alive:
                self.pin()
            self.check()
        if not self.alive:
            self.resume()
            self.check()
