"""What a GPU did in a profiled stretch, and which operators asked for it: read from PyTorch's own trace (Chrome's format)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}
"""Category of a device event in the trace to what it is here."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
SPANS = ("cpu_op", "user_annotation")


@dataclass(frozen=True)
class Op:
    """An operator, or a marked stretch of the host's work, with the shapes of its tensors where they were recorded."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One piece of work on the GPU.

    Attributes:
        kind: "kernel", "copy" or "memset".
        start, duration: microseconds.
        ops: operators that it was launched inside of, the innermost first. A kernel of a recorded graph has none of its own.
    """

    name: str
    kind: str
    start: float
    duration: float
    ops: tuple[Op, ...] = ()


def read_trace(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """The `traceEvents` of an exported trace as kernels, in the order in which they began.

    A kernel is tied to the call that launched it by their common correlation number, and that call to the operators that were
    open on its thread; where that finds none, to the operator that the trace names itself.
    """
    device: list[dict[str, Any]] = []
    launched: dict[int, tuple[Any, float]] = {}
    spans: dict[Any, list[tuple[float, float, Op]]] = {}
    by_number: dict[int, tuple[Any, float]] = {}
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X":
            continue
        if category in KINDS:
            device.append(event)
        elif category in LAUNCHES:
            launched[event["args"].get("correlation")] = event["tid"], float(event["ts"])
        elif category in SPANS:
            start = float(event["ts"])
            op = Op(str(event["name"]), _shapes(event.get("args", {}).get("Input Dims")))
            spans.setdefault(event["tid"], []).append((start, start + float(event["dur"]), op))
            if number := event.get("args", {}).get("External id"):
                by_number[number] = event["tid"], start
    chains: dict[int, tuple[Op, ...]] = {}
    for place in (
        launched,
        {e["args"].get("correlation"): by_number.get(e["args"].get("External id")) for e in device},
    ):
        wanted: dict[Any, list[tuple[float, int]]] = {}
        for correlation in {event["args"].get("correlation") for event in device}:
            at = place.get(correlation)
            if at is not None and not chains.get(correlation):
                wanted.setdefault(at[0], []).append((at[1], correlation))
        for thread, calls in wanted.items():
            chains |= _enclosing(sorted(calls), spans.get(thread, []))
    kernels = [
        Kernel(
            name=str(event["name"]),
            kind=KINDS[event["cat"]],
            start=float(event["ts"]),
            duration=float(event["dur"]),
            ops=chains.get(event["args"].get("correlation"), ()),
        )
        for event in device
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def _enclosing(calls: Sequence[tuple[float, int]], spans: list[tuple[float, float, Op]]) -> dict[int, tuple[Op, ...]]:
    """The spans of one thread that are open at each of its calls, the innermost first. Spans of a thread lie in one another."""
    found: dict[int, tuple[Op, ...]] = {}
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    stack: list[tuple[float, Op]] = []
    next_span = 0
    for at, correlation in calls:
        while next_span < len(spans) and spans[next_span][0] <= at:
            start, end, op = spans[next_span]
            while stack and stack[-1][0] <= start:
                stack.pop()
            stack.append((end, op))
            next_span += 1
        while stack and stack[-1][0] < at:
            stack.pop()
        found[correlation] = tuple(op for _, op in reversed(stack))
    return found


def _shapes(dims: Any) -> tuple[tuple[int, ...], ...]:
    """Of the tensors among an operator's arguments; numbers and lists of tensors are left out."""
    if not isinstance(dims, list):
        return ()
    flat = [one for one in dims if isinstance(one, list) and one and all(isinstance(size, int) for size in one)]
    return tuple(tuple(one) for one in flat)


@dataclass(frozen=True)
class Shares:
    """Where the time of a stretch went, milliseconds.

    Attributes:
        wall: from the first piece of work to the end of the last.
        classes: by class; what runs beside something that began earlier counts only where it goes on alone, so that the classes
            and `idle` add up to `wall`.
        kernels: by (class, name): the same milliseconds, and how many.
        overlapped: what was left out for running beside something else.
    """

    wall: float
    idle: float
    classes: dict[str, float]
    kernels: dict[tuple[str, str], tuple[float, int]]
    overlapped: float


def share_out(kernels: Sequence[Kernel], classes: Sequence[str]) -> Shares:
    """Sums up `kernels`, in the order in which they began, by the class of each."""
    by_class: dict[str, float] = {}
    by_name: dict[tuple[str, str], tuple[float, int]] = {}
    idle = overlapped = 0.0
    begun = until = kernels[0].start if kernels else 0.0
    for kernel, name in zip(kernels, classes, strict=True):
        end = kernel.start + kernel.duration
        idle += max(0.0, kernel.start - until)
        alone = max(0.0, end - max(kernel.start, until))
        overlapped += kernel.duration - alone
        until = max(until, end)
        by_class[name] = by_class.get(name, 0.0) + alone / 1e3
        ms, count = by_name.get((name, kernel.name), (0.0, 0))
        by_name[name, kernel.name] = ms + alone / 1e3, count + 1
    return Shares((until - begun) / 1e3, idle / 1e3, by_class, by_name, overlapped / 1e3)


def carry_over(
    kernels: Sequence[Kernel], known: Sequence[Kernel], classes: Sequence[str], alone: Callable[[Kernel], str]
) -> list[str]:
    """Classes of `kernels` from those of `known`, the same work launched operator by operator.

    The n-th kernel of a name is the n-th of that name there (counted round, where this stretch holds several steps). Where
    the counts do not fit, the class that took most of the name's time there; for a name that is not there, what `alone` says of
    the kernel by itself: a recording clears memory by kernels of its own.
    """
    there: dict[str, list[tuple[str, float]]] = {}
    for kernel, name in zip(known, classes, strict=True):
        there.setdefault(kernel.name, []).append((name, kernel.duration))
    counts: dict[str, int] = {}
    for kernel in kernels:
        counts[kernel.name] = counts.get(kernel.name, 0) + 1
    seen: dict[str, int] = {}
    found = []
    for kernel in kernels:
        list_there = there.get(kernel.name)
        at = seen.get(kernel.name, 0)
        seen[kernel.name] = at + 1
        if list_there is None:
            found.append(alone(kernel))
        elif counts[kernel.name] % len(list_there) == 0:
            found.append(list_there[at % len(list_there)][0])
        else:
            times: dict[str, float] = {}
            for name, duration in list_there:
                times[name] = times.get(name, 0.0) + duration
            found.append(max(times, key=lambda name: times[name]))
    return found
