"""Timing: medians of single calls, by device events on a GPU and by the host's clock on a CPU, and the machine's two ceilings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

REPEATS = 20
WARM_UP_S = 0.15
"""A GPU raises and lowers its clock within some 100 ms of load: calls before that are not counted."""
WARM_UP_CALLS = 3
CACHES = 4
"""Inputs rotate over at least so many times the last-level cache, so that none is found there."""
MOST_SETS = 16
IDLE_SHARE, MOST_IDLE_S, CLOCK_HZ = 2.0, 0.05, 2e9
"""An idling kernel takes twice the longest launch seen, 50 ms at most: a call that waits for the host cannot be hidden."""

PRODUCTS = ((1024, 4096), (4096, 1024), (1024, 1024), (1024, 32768))
"""(K, N) of the main model's matrix products."""


@dataclass(frozen=True)
class Stat:
    """Milliseconds, or another unit where it says so: median, interquartile range and number of calls."""

    median: float
    spread: float
    n: int

    def as_json(self) -> dict[str, float | int]:
        return {"median": self.median, "spread": self.spread, "n": self.n}


def stat(values: Sequence[float]) -> Stat:
    """Median and interquartile range (inclusive quartiles) of one or more values."""
    if len(values) == 1:
        return Stat(values[0], 0.0, 1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Stat(median(values), high - low, len(values))


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, repeats: int = REPEATS, warm_up_s: float = WARM_UP_S):
        self.device, self.repeats, self.warm_up_s = device, repeats, warm_up_s

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Wall time of one call, with the device idle before and after."""
        self.synchronize()
        started = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - started

    def measure(
        self, calls: Sequence[Callable[[], Any]], before: Callable[[], Any] | None = None, launching: bool = False
    ) -> Stat:
        """Milliseconds of a call, in turn over `calls`, which do the same on other data.

        Args:
            before: called ahead of every call and not counted.
            launching: count the time that a GPU waits for the host too. Else every call is queued behind one that idles until
                the host is through, so that only what the GPU does counts, as in a step that is recorded or long enough.
        """
        self._warm_up(calls, before)
        if self.device.type == "cuda":
            return stat(self._events(calls, before, 0 if launching else self._idle_cycles(calls, before)))
        return stat([1e3 * self._once(calls[i % len(calls)], before) for i in range(self.repeats)])

    def _once(self, call: Callable[[], Any], before: Callable[[], Any] | None) -> float:
        if before is not None:
            before()
        return self.seconds(call)

    def _warm_up(self, calls: Sequence[Callable[[], Any]], before: Callable[[], Any] | None) -> None:
        started, done = time.perf_counter(), 0
        while done < max(WARM_UP_CALLS, len(calls)) or time.perf_counter() - started < self.warm_up_s:
            self._once(calls[done % len(calls)], before)
            done += 1

    def _idle_cycles(self, calls: Sequence[Callable[[], Any]], before: Callable[[], Any] | None) -> int:
        """GPU cycles that cover the launching of any of `calls`, with room to spare."""
        longest = 0.0
        for call in calls:
            if before is not None:
                before()
            self.synchronize()
            started = time.perf_counter()
            call()
            longest = max(longest, time.perf_counter() - started)
        self.synchronize()
        return int(min(MOST_IDLE_S, IDLE_SHARE * longest) * CLOCK_HZ)

    def _events(
        self, calls: Sequence[Callable[[], Any]], before: Callable[[], Any] | None, idle_cycles: int
    ) -> list[float]:
        # The host does not wait between calls: it launches ahead, as it does in training.
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats)]
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if before is not None:
                before()
            if idle_cycles:
                torch.cuda._sleep(idle_cycles)
            start.record()
            calls[i % len(calls)]()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def sets_needed(bytes_of_one: int, device: torch.device) -> int:
    """How many sets of inputs to rotate among."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_SETS, -(-CACHES * cache // max(1, bytes_of_one))))


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Most memory that a call held beside what was there before; None where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# ---- ceilings -------------------------------------------------------------------------------------------


def measure_ceilings(timer: Timer, tokens: int, quick: bool = False) -> dict[str, Any]:
    """Copy bandwidth in GB/s (bytes read plus written) and matrix rates in TFLOP/s, on random data.

    `bf16_tflops` and `fp8_tflops` are the best of the model's own products and one of 8,192 cubed: no kernel is to look better
    than the machine because the ceiling was measured on a poor shape. On a CPU the rate is that of float32.
    """
    gpu = timer.device.type == "cuda"
    copy = _copy(timer, 2**30 if gpu else 2**26)
    found: dict[str, Any] = {
        "copy_gb_s": copy.as_json(),
        "bf16_tflops": None,
        "fp8_tflops": None,
        "float32_tflops": None,
        "products": [],
    }
    if not gpu:
        found["float32_tflops"] = _product(timer, 512, 512, 512, torch.float32).as_json()
        return found
    shapes = [(tokens, k, n) for k, n in PRODUCTS[: 1 if quick else None]] + [(8192, 8192, 8192)]
    fp8 = torch.cuda.get_device_capability(timer.device) >= (8, 9)
    best: dict[str, Stat] = {}
    for m, k, n in shapes:
        row: dict[str, Any] = {"tokens": m, "k": k, "n": n, "bf16_tflops": None, "fp8_tflops": None}
        for name, dtype in (("bf16_tflops", torch.bfloat16), ("fp8_tflops", torch.float8_e4m3fn)):
            if dtype == torch.float8_e4m3fn and not fp8:
                continue
            rate = _product(timer, m, k, n, dtype)
            row[name] = rate.as_json()
            if name not in best or rate.median > best[name].median:
                best[name] = rate
        found["products"].append(row)
    return found | {name: rate.as_json() for name, rate in best.items()}


def _copy(timer: Timer, size: int) -> Stat:
    """GB/s of copying `size` random bytes."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return _rate(timer.measure([lambda: target.copy_(source)]), 2 * size / 1e9)


def _product(timer: Timer, m: int, k: int, n: int, dtype: torch.dtype) -> Stat:
    """TFLOP/s of [m, k] times [k, n]; FP8 with one scale per row and float32 sums."""
    device = timer.device
    a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    call: Callable[[], Tensor]
    if dtype == torch.float8_e4m3fn:
        scale_a, scale_b = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)

        def call() -> Tensor:
            return F.scaled_mm(
                a, b.t(), scale_a, ScalingType.RowWise, scale_b, ScalingType.RowWise, output_dtype=torch.bfloat16
            )
    else:

        def call() -> Tensor:
            return a @ b.t()

    return _rate(timer.measure([call]), 2e-12 * m * k * n)


def _rate(milliseconds: Stat, amount: float) -> Stat:
    """`amount` a second; the spread in proportion."""
    rate = 1e3 * amount / milliseconds.median
    return Stat(rate, rate * milliseconds.spread / milliseconds.median, milliseconds.n)
