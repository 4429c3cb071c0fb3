"""Whole training steps, as a run does them: how fast when the machine is warm, at what power, and where the time goes.

`measure` takes anything that does steps (ours, and a peer's for comparison); `profile_step` says what the GPU does in one.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from dwslm.bench.step_classes import UPDATE, ProductShapes, classify, classify_all
from dwslm.bench.step_floor import Floor
from dwslm.bench.step_trace import Kernel, Shares, carry_over, read_trace, share_out
from dwslm.bench.timing import stat
from dwslm.data.loader import GlobalBatch, Loader
from dwslm.data.packing import RowStream
from dwslm.machine.health import HZ, Gpu, Sampler, summarise
from dwslm.model.lm import LanguageModel
from dwslm.optim.optimizer import Optimizer
from dwslm.train.device import RunAhead, peak_flops
from dwslm.train.guard import Guard, GuardSettings
from dwslm.train.plan import Plan
from dwslm.train.report import MATRIX_FLOPS
from dwslm.train.settings import TrainSettings
from dwslm.train.step import TrainStep

RUNS = 3
"""Timed stretches; their median is the figure and their range its spread."""
PROFILED = 2
"""Steps of the profile that gives the times: what the GPU waits for at the first launch then counts half."""
TOP = 40
"""Kernels that are listed by name."""
POINTS = 60
"""Samples of power and clock that are kept of a stretch."""

Say = Callable[[str], None]
Mark = Callable[[str], AbstractContextManager[Any]]
"""Opened around "micro_batch" and "update"."""


def unmarked(part: str) -> AbstractContextManager[Any]:
    return nullcontext()


class Stepper(Protocol):
    """Does optimizer steps."""

    mark: Mark

    def step(self, batch: GlobalBatch, number: int) -> Tensor:
        """Step `number`, counted from 0. Returns its mean loss, 0-D, on the device; does not wait for it."""


@dataclass
class Parts:
    """What a run is built of, see `dwslm.train.loop.Trainer`."""

    plan: Plan
    train: TrainSettings
    guard: GuardSettings
    model: LanguageModel
    optimizer: Optimizer
    stream: RowStream

    def loader(self) -> Loader:
        """Of the run's first rung, from its first row."""
        return Loader(
            self.stream,
            first_row=0,
            micro_batch_tokens=self.plan.micro_batch_tokens,
            grad_accum=self.plan.grad_accum,
            depth=self.train.prefetch,
            pin=self.optimizer.device.type == "cuda",
        )


class MarkedStep(TrainStep):
    """A training step that says when its parts begin and end."""

    mark: Mark = staticmethod(unmarked)

    def micro_batch(self, *arguments: Any, **named: Any) -> None:
        with self.mark("micro_batch"):
            super().micro_batch(*arguments, **named)

    def update(self) -> Tensor:
        with self.mark("update"):
            return super().update()


class OwnStepper:
    """Steps of a run, as `Trainer` does them."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.guard = Guard(parts.guard, parts.optimizer.device)
        self._mark: Mark = unmarked
        self._step: MarkedStep | None = None

    @property
    def mark(self) -> Mark:
        return self._mark

    @mark.setter
    def mark(self, mark: Mark) -> None:
        self._mark = mark
        if self._step is not None:
            self._step.mark = mark

    def step(self, batch: GlobalBatch, number: int) -> Tensor:
        if self._step is None:
            self._step = self._make(batch)
        return self._step.run(batch, self.parts.plan.rate(min(number, self.parts.plan.steps - 1)))[0]

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed; known once there was one."""
        return self._step is not None and self._step.recorder is not None

    def launch(self) -> None:
        """From here on steps are launched kernel by kernel. Recordings go, since both would not fit into memory."""
        if self._step is not None:
            self._step.recorder = None
        free(self.parts.optimizer.device)

    def _make(self, batch: GlobalBatch) -> MarkedStep:
        shape, parts = batch.micro_batches[0], self.parts
        made = MarkedStep(
            parts.model,
            parts.optimizer,
            shape.rows,
            shape.context,
            shape.slots,
            compile=parts.train.compile,
            record=parts.train.record,
            guard=self.guard,
        )
        made.mark = self._mark
        return made


# ---- times ------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Milliseconds of the marked parts: by events on a GPU, which do not wait, else by the host's clock."""

    device: torch.device
    _pairs: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextmanager
    def mark(self, part: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._pairs.append((part, begin, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, list[float]]:
        """By part; call when the device is idle."""
        found: dict[str, list[float]] = {}
        for part, begin, end in self._pairs:
            ms = begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin)
            found.setdefault(part, []).append(ms)
        return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, range, number and the values themselves."""
    return {"median": median(values), "spread": max(values) - min(values), "n": len(values), "values": list(values)}


class Drive:
    """A stepper with its data: does steps one after the other, no further ahead of the device than a run would be."""

    def __init__(self, stepper: Stepper, batches: Iterator[GlobalBatch], device: torch.device):
        self.stepper, self.batches, self.device = stepper, batches, device
        self.run_ahead = RunAhead(device)
        self.done = 0
        self.loss: Tensor | None = None

    def steps(self, count: int) -> None:
        """Queues `count` steps."""
        for _ in range(count):
            self.loss = self.stepper.step(next(self.batches), self.done)
            self.done += 1
            self.run_ahead.wait()

    def timed(self, count: int) -> float:
        """Seconds of `count` steps, from an idle device to an idle one, the loader among them."""
        synchronize(self.device)
        started = time.perf_counter()
        self.steps(count)
        synchronize(self.device)
        return time.perf_counter() - started


def measure(drive: Drive, *, steps: int, warm_s: float, batch_tokens: int, gpu: Gpu | None, say: Say) -> dict[str, Any]:
    """First step, warm-up, and `RUNS` stretches of `steps` steps.

    Args:
        warm_s: seconds of sustained work before anything is timed.
        gpu: where power, clock and energy come from; None where nothing counts them.

    Raises:
        ValueError: where the loss is not finite: such a step is not what a run does.
    """
    device = drive.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first = drive.timed(1)
    say(f"first step {first:.1f} s")
    warmed, begun = 0, time.perf_counter()
    while warmed == 0 or time.perf_counter() - begun < warm_s:
        drive.timed(1)
        warmed += 1
    warm_seconds = time.perf_counter() - begun
    say(f"warm after {warmed} steps, {warm_seconds:.1f} s")
    clock = Clock(device)
    runs = []
    with ExitStack() as stack:
        sampler = stack.enter_context(Sampler(gpu.sample, HZ)) if gpu is not None else None
        for number in range(RUNS):
            drive.stepper.mark = clock.mark
            joules, start = gpu.energy_j() if gpu is not None else None, time.monotonic()
            seconds = drive.timed(steps)
            end = time.monotonic()
            drive.stepper.mark = unmarked
            tokens = steps * batch_tokens
            run: dict[str, Any] = {"seconds": seconds, "tokens_per_second": tokens / seconds}
            if gpu is not None and sampler is not None:
                after = gpu.energy_j()
                run["energy_j_per_token"] = None if joules is None or after is None else (after - joules) / tokens
                run["health"] = summarise(sampler.between(start, end), HZ, POINTS)
            runs.append(run)
            say(
                f"run {number + 1} of {RUNS}: {steps} steps in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s{_felt(run)}"
            )
    assert drive.loss is not None
    loss = float(drive.loss)
    if not loss < float("inf"):
        raise ValueError(f"the loss is {loss} after {drive.done} steps: nothing that was timed means anything")
    parts = {name: stat(values).as_json() for name, values in clock.read().items()}
    return {
        "first_step_s": first,
        "warm_up": {"seconds": warm_seconds, "steps": warmed},
        "timed_steps": steps,
        "tokens_per_second": spread([run["tokens_per_second"] for run in runs]),
        "step_ms": spread([1e3 * run["seconds"] / steps for run in runs]),
        "micro_batch_ms": parts.get("micro_batch"),
        "update_ms": parts.get("update"),
        "energy_j_per_token": _over(runs, "energy_j_per_token"),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "loss": loss,
        "runs": runs,
    }


def _felt(run: dict[str, Any]) -> str:
    health = run.get("health")
    if not health or not health["power_w"] or not health["sm_mhz"]:
        return ""
    return f", {health['power_w']['mean']:.0f} W, {health['sm_mhz']['median']:.0f} MHz"


def _over(runs: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    values = [run.get(name) for run in runs]
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None


def mfu(matrix_parameters: int, tokens_per_second: float, device: torch.device) -> float | None:
    """Share of the device's dense bf16 peak that the matrices take, the head among them; None on a device that is not listed."""
    peak = peak_flops(device)
    return None if peak is None else MATRIX_FLOPS * matrix_parameters * tokens_per_second / peak


# ---- where the time goes ----------------------------------------------------------------------------------


def kernels_of(drive: Drive, steps: int, shapes: bool) -> list[Kernel]:
    """What the GPU does in `steps` steps. `shapes` records the operators and their shapes too, which slows the host down."""

    def named(part: str) -> AbstractContextManager[Any]:
        return record_function(UPDATE if part == "update" else f"dwslm::{part}")

    activities = [ProfilerActivity.CUDA] + ([ProfilerActivity.CPU] if shapes else [])
    drive.stepper.mark = named if shapes else unmarked
    try:
        synchronize(drive.device)
        with profile(activities=activities, record_shapes=shapes) as profiler:
            drive.steps(steps)
            synchronize(drive.device)
    finally:
        drive.stepper.mark = unmarked
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return read_trace(json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"])


def profile_step(
    drive: Drive,
    launch: Callable[[], None],
    shapes: ProductShapes,
    micro_batches: int,
    floors: dict[str, Floor],
    ceilings: Any,
) -> dict[str, Any]:
    """Milliseconds of one step by class.

    Times are of steps as they are measured. Operators are seen where they are launched one by one, so then the same is done once
    more after a call of `launch`.
    """
    timed = kernels_of(drive, PROFILED, shapes=False)
    launch()
    drive.timed(1)
    known = kernels_of(drive, 1, shapes=True)
    classes = carry_over(timed, known, classify_all(known, shapes), partial(classify, shapes=shapes))
    return breakdown(share_out(timed, classes), PROFILED, micro_batches, floors, ceilings)


def breakdown(
    shares: Shares, steps: int, micro_batches: int, floors: dict[str, Floor], ceilings: Any
) -> dict[str, Any]:
    """The part of the document that says where the time goes; milliseconds of one step."""
    rows = []
    for name, ms in sorted(shares.classes.items(), key=lambda item: -item[1]):
        floor = floors.get(name)
        least = floor.ms(ceilings) if floor is not None else None
        ms /= steps
        rows.append(
            {
                "class": name,
                "ms": ms,
                "ms_micro_batch": None if name in ("optimizer", "newton-schulz") else ms / micro_batches,
                "share": ms * steps / shares.wall,
                "flop": floor.flop + floor.fp8_flop if floor else None,
                "bytes": floor.bytes if floor else None,
                "floor_ms": least,
                "floor_share": least / ms if least and ms else None,
            }
        )
    top = sorted(shares.kernels.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "steps": steps,
        "wall_ms": shares.wall / steps,
        "busy_ms": (shares.wall - shares.idle) / steps,
        "idle_ms": shares.idle / steps,
        "overlapped_ms": shares.overlapped / steps,
        "classes": rows,
        "kernels": [
            {"class": name, "kernel": kernel, "ms": ms / steps, "count": count / steps}
            for (name, kernel), (ms, count) in top
        ],
    }


def free(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
