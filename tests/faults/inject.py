"""Faults at named instants of a run, in a child process. Only tests import this: the library has no hooks.

An instant is passed once for each call of what it stands for. Those of a save are its disk operations, before and
after each, in the thread that saves.
"""

import errno
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step imports it: once in the server process, not in every child
from torch import Tensor

from dwslm.cli.errors import one_line_errors
from dwslm.cli.launch import launch
from dwslm.config import RunConfig
from dwslm.data.loader import GlobalBatch
from dwslm.runs import writer
from dwslm.train import checkpoint, loop, saver
from dwslm.train.signals import RELAYED_SECONDS
from dwslm.train.step import TrainStep

OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "chmod")
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
HANGS_SECONDS = 600.0  # seconds of work on a machine of its own, minutes on one that many share
POISONS = ("loss nan", "loss spike", "gradient nan", "gradient spike")


@dataclass(frozen=True)
class Fault:
    """What happens at an instant.

    what: "kill"; a signal's name, twice of it with " x2"; "ENOSPC" or "EIO", raised; "slow", 0.3 s; "hang", for ever;
        one of `POISONS`; "unseen", a step that never sees its batch; "clock", an hour back.
    first, last: passings that it happens at, counted from 1.
    """

    at: str
    what: str
    first: int = 1
    last: int | None = None

    @property
    def name(self) -> str:
        return f"{self.what} at {self.at} {self.first}" + (
            f" to {self.last}" if self.last not in (None, self.first) else ""
        )


class Injector:
    """Puts hooks into this process and does what the faults say."""

    def __init__(self, faults: Sequence[Fault]):
        self.faults = faults
        self.passed: dict[str, int] = {}
        self.clock = 0.0

    def arm(self) -> None:
        """Wraps everything that has a name. Once a process."""
        self._wrap(TrainStep, "run", "step", around=self._unseen)
        self._wrap(TrainStep, "micro_batch", "micro-batch")
        self._wrap(TrainStep, "update", "update", around=self._poison)
        self._wrap(saver.Saver, "_copy", "copy")
        self._wrap(checkpoint, "write_tensors", "save", "after")
        self._wrap(checkpoint, "retain", "retain")
        self._wrap(loop, "score", "score")
        self._wrap(loop, "make_report", "score", "report")
        self._wrap(writer.RunWriter, "metrics", "metrics")
        self._wrap_write()
        if any(fault.at == "lowering" for fault in self.faults):
            self._wrap_compiler()
        for name in OPERATIONS:
            self._wrap(os, name, "save", "after", only_in="saver")
        real = time.time
        time.time = lambda: real() + self.clock  # type: ignore[assignment]
        writer.Clock.__init__.__defaults__ = (time.time, time.monotonic)  # its default was bound when it was made

    def _wrap(
        self,
        owner: Any,
        attribute: str,
        instant: str,
        after: str | None = None,
        *,
        only_in: str | None = None,
        around: Callable[..., Any] | None = None,
    ) -> None:
        real = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            if only_in is not None and threading.current_thread().name != only_in:
                return real(*args, **kwargs)
            fault = self._pass(instant)
            result = around(fault, real, *args, **kwargs) if around and fault else real(*args, **kwargs)
            if after is not None:
                self._pass(instant if after == "after" else after)
            return result

        setattr(owner, attribute, call)

    def _wrap_compiler(self) -> None:
        """A graph on its way through the compiler. Importing that takes seconds, and few faults are of it."""
        from torch._inductor import config, graph

        config.force_disable_caches = True  # what another run has left there would be no compilation
        self._wrap(graph.GraphLowering, "run", "lowering", "after")

    def _wrap_write(self) -> None:
        """Rows of metrics and of events reach the disk as one write each."""
        real = os.write

        def write(fd: int, data: Any) -> int:
            name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
            if name.endswith(".jsonl"):
                self._pass(f"{name.split('-')[0]} row")
            return real(fd, data)

        os.write = write

    def _pass(self, instant: str) -> Fault | None:
        """Counts, and does what is due; the fault, where that is for the caller to do."""
        count = self.passed[instant] = self.passed.get(instant, 0) + 1
        due = None
        for fault in self.faults:
            last = fault.first if fault.last is None else fault.last
            if fault.at == instant and fault.first <= count <= last:
                due = fault
                self._do(fault.what)
        return due

    def _do(self, what: str) -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what.startswith("SIG"):
            name, _, twice = what.partition(" ")
            os.kill(os.getpid(), getattr(signal, name))
            if twice:
                time.sleep(RELAYED_SECONDS + 0.1)
                os.kill(os.getpid(), getattr(signal, name))
        elif what in ("ENOSPC", "EIO"):
            number = getattr(errno, what)
            raise OSError(number, os.strerror(number))
        elif what == "slow":
            time.sleep(0.3)
        elif what == "clock":
            self.clock -= 3600.0

    def _poison(self, fault: Fault, real: Callable[..., Any], step: TrainStep) -> Tensor:
        kind, _, how = fault.what.partition(" ")
        with torch.no_grad():
            if kind == "loss":
                step.loss += math.nan if how == "nan" else 1e4
            elif kind == "gradient" and how == "nan":
                step.optimizer.gradient[step.optimizer.gradient.numel() // 2] = math.nan
            elif kind == "gradient":
                step.optimizer.gradient.mul_(1e6)
        return real(step)

    def _unseen(self, fault: Fault, real: Callable[..., Any], step: TrainStep, batch: GlobalBatch, rate: float) -> Any:
        """A step that does not take place; the guard only counts it, since the loop reads a verdict for each."""
        if fault.what != "unseen":
            return real(step, batch, rate)
        nothing = torch.tensor(math.nan)
        step.guard.limits()
        step.guard.record(nothing, nothing, torch.tensor(False))
        return nothing, nothing


# ---- children -------------------------------------------------------------------------------------------

# Forked from a clean server process: this one may have threads by now, with which a fork can hang.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


@dataclass
class Ended:
    """How a child ended."""

    code: int
    """As the system gives it: -9 where it was killed."""
    said: str
    passed: dict[str, int]
    """How often each instant was passed; only of a child that was not killed."""


def run_child(
    config: RunConfig,
    overrides: list[str],
    faults: Sequence[Fault],
    said: Path,
    *,
    after: Callable[[float, int], None] | None = None,
) -> Ended:
    """Runs `launch` in a child; `after(seconds, pid)` is called over and over until it has ended."""
    process = _CONTEXT.Process(target=_child, args=(config, overrides, tuple(faults), said))
    process.start()
    started = time.monotonic()
    while process.exitcode is None:
        if after is not None and process.pid is not None:
            after(time.monotonic() - started, process.pid)
        process.join(0.005 if after is not None else 0.1)
        assert time.monotonic() - started < HANGS_SECONDS, f"a child hangs: {said}"
    counts = said.with_suffix(".passed")
    passed = dict(line.rsplit(" ", 1) for line in counts.read_text().splitlines()) if counts.exists() else {}
    told = said.read_text() if said.exists() else ""  # killed before its first word
    return Ended(process.exitcode, told, {name: int(count) for name, count in passed.items()})


def _child(config: RunConfig, overrides: list[str], faults: tuple[Fault, ...], said: Path) -> None:
    sys.stdout = sys.stderr = open(said, "w", buffering=1)  # noqa: SIM115 (the process ends with it)
    os.dup2(sys.stdout.fileno(), 2)
    torch.set_num_threads(1)
    for name in SIGNALS:  # a background job of a shell ignores INT, and what is ignored stays so
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    injector = Injector(faults)
    injector.arm()
    try:
        with one_line_errors():
            launch(config, overrides)
    finally:
        said.with_suffix(".passed").write_text("".join(f"{name} {n}\n" for name, n in injector.passed.items()))
