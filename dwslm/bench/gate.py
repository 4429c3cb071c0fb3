"""The gate: what an engine must get right before anybody times it. It takes any callable, so it can be shown broken ones."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dwslm.bench.case import (
    FLOAT32_BOUND,
    Case,
    Engine,
    Run,
    differentiate,
    draw_upstream,
    leaves,
    values_and_gradients,
)
from dwslm.ops.segments import Segments, segments

Exact = Callable[[], AbstractContextManager[Any]]
"""Gives a context in which an engine must give the same bits every time."""

LAST_BITS = 1e-4
"""Relative difference that a neighbour may make where an engine's sums run across segments (`Engine.same_bits` false)."""
SPARE = 3
"""Empty segments at the end of the gate's boundaries."""
CUTS = 12
"""Random cuts in a row."""
SMALL = 1e-9
"""A reference smaller than this is zero: its error is taken as it is."""


@dataclass(frozen=True)
class Truth:
    """A trial: inputs as the engine gets them, and what float32 makes of them."""

    inputs: list[Tensor]
    segments: Segments
    upstream: list[Tensor]
    want: dict[str, Tensor | None]


@dataclass
class Gate:
    """What was found.

    Attributes:
        errors: tensor -> "value" (relative error), "bound" and "trial" (kind of input): the worst by value / bound.
        checks: "twice", "neighbour", "prefix" -> passed; those that do not apply are left out.
        reasons: why it failed, empty where it passed.
        notes: what is worth saying though it is no failure.
        asked: whether the checks ran under torch.use_deterministic_algorithms.
    """

    bound: float
    tokens: int
    reference: str
    kinds: Sequence[str]
    asked: bool
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        return {
            "bound": self.bound,
            "passed": self.passed,
            "tokens": self.tokens,
            "reference": self.reference,
            "trials": list(self.kinds),
            "errors": self.errors,
            "checks": self.checks,
            "deterministic": self.asked,
            "notes": self.notes,
        }


def check(
    case: Case,
    engine: Engine,
    run: Run,
    *,
    tokens: int,
    context: int,
    generator: torch.Generator,
    truths: dict[Any, Truth] | None = None,
    exact: Exact = nullcontext,
) -> Gate:
    """Holds `run` to the case's reference on fresh random inputs, then to the rules of packing.

    Args:
        tokens, context: size of the trials.
        generator: draws everything, on the device of the inputs.
        truths: trials that other engines of this case were held to; new ones are added. The reference is slow.
        exact: used for the checks on bits.
    """
    found = Gate(case.bound, tokens, case.reference_name, case.kinds, engine.ask)
    truths = {} if truths is None else truths
    trials = []
    for kind in case.kinds:
        key = (case.op, case.name, case.heads, kind, tokens, context)
        if key not in truths:
            truths[key] = make_truth(case, kind, tokens, context, generator)
        trials.append(truths[key])
        got = values_and_gradients(case, run, truths[key].inputs, truths[key].segments, truths[key].upstream)
        _compare(case, engine, found, kind, got, truths[key])
    if not found.passed:
        return found
    other = case.draw(tokens, case.kinds[0], generator)
    with exact():
        before = values_and_gradients(case, run, trials[0].inputs, trials[0].segments, trials[0].upstream)
        _check_twice(case, engine, run, found, trials[0], before)
        if case.packed:
            _check_neighbour(case, engine, run, found, trials[0], before, other)
            _check_prefix(case, run, found, trials[0], other)
    return found


def check_plain(case: Case, truth: Truth) -> str | None:
    """Why the case's plain form is no truth for larger sizes, or None: it is held to the reference like any float32 engine."""
    assert case.plain is not None
    floats = [x.float() if x.is_floating_point() else x for x in truth.inputs]
    got = values_and_gradients(case, case.plain, floats, truth.segments, [u.float() for u in truth.upstream])
    for name, want in truth.want.items():
        value = got[name]
        if want is not None and (value is None or not relative_error(value, want) <= FLOAT32_BOUND):
            return f"the plain float32 form misses the reference in {name}"
    return None


def check_size(case: Case, engine: Engine, run: Run, truth: Truth, found: dict[str, Any]) -> list[str]:
    """Holds `run` to the plain form at the size that is timed, in a real batch.

    Args:
        found: the gate's JSON; what was found goes in as "size".

    Returns:
        Why it failed, empty where it passed.
    """
    tokens, kind = truth.segments.ids.shape[0], case.kinds[0]
    gate = Gate(case.bound, tokens, "plain form, float32", (kind,), engine.ask)
    got = values_and_gradients(case, run, truth.inputs, truth.segments, truth.upstream)
    _compare(case, engine, gate, kind, got, truth)
    found["size"] = {"tokens": tokens, "context": truth.segments.context, "errors": gate.errors, "passed": gate.passed}
    return [f"at {tokens:,} tokens {reason}" for reason in gate.reasons]


def make_truth(
    case: Case,
    kind: str,
    tokens: int,
    context: int,
    generator: torch.Generator,
    plain_over: Segments | None = None,
) -> Truth:
    """Draws a trial and computes it in float32: by the reference over awkward boundaries, or by the plain form over those
    given."""
    inputs = case.draw(tokens, kind, generator)
    if plain_over is None:
        offsets = awkward(tokens, context, generator) if case.packed else [0, tokens]
        seg = segments(torch.tensor(offsets, dtype=torch.int32, device=generator.device), tokens, context)
    else:
        seg = plain_over
    own = leaves(case, [x.float() if x.is_floating_point() else x for x in inputs])
    if plain_over is None:
        outputs = case.reference(own, seg.cu_seqlens)
    else:
        assert case.plain is not None
        outputs = case.plain(own, seg)
    upstream = draw_upstream(outputs, case.dtype, generator)
    want = differentiate(case, own, outputs, [u.float() for u in upstream])
    return Truth(inputs, seg, upstream, want)


def awkward(tokens: int, context: int, generator: torch.Generator) -> list[int]:
    """Boundaries of every kind: single-token, empty and uneven segments in each row, but the last row (if it is not the only
    one) is one segment; spare slots at the end. int offsets from 0 to `tokens`."""
    offsets = [0]
    for start in range(0, tokens, context):
        end = start + context
        if end < tokens or context == tokens:
            inside = torch.randint(2, context, (CUTS,), generator=generator, device=generator.device)
            cuts = sorted({start + int(cut) for cut in inside})
            # A single token, an empty segment after it, and another before the row's last segment.
            offsets += [start + 1, start + 1, *cuts, cuts[-1]]
        offsets.append(end)
    return offsets + [tokens] * SPARE


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in float64; infinite for what is not finite."""
    size = truth.double().norm().item()
    error = (value.double() - truth.double()).norm().item()
    return error / (size if size > SMALL else 1.0) if math.isfinite(error) else math.inf


def same(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> bool:
    """Bit for bit, all of it."""
    return got.keys() == want.keys() and all(equal(got[name], want[name]) for name in got)


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def _compare(case: Case, engine: Engine, found: Gate, kind: str, got: dict[str, Tensor | None], trial: Truth) -> None:
    for name, want in trial.want.items():
        value, bound = got[name], case.bound_of(name, kind, engine)
        if want is None:
            continue
        error = math.inf
        if value is None:
            found.reasons.append(f"{name}: there is no such gradient (trial {kind})")
        elif value.shape != want.shape:
            found.reasons.append(f"{name} has shape {list(value.shape)}, not {list(want.shape)} (trial {kind})")
        else:
            error = relative_error(value, want)
            if not error <= bound:
                found.reasons.append(
                    f"{name} misses float32: relative error {error:.3g}, bound {bound:g} (trial {kind})"
                )
        worst = found.errors.get(name)
        if worst is None or worst["value"] is None or error / bound > worst["value"] / worst["bound"]:
            # JSON knows no infinity.
            found.errors[name] = {"value": error if math.isfinite(error) else None, "bound": bound, "trial": kind}


def _check_twice(
    case: Case, engine: Engine, run: Run, found: Gate, trial: Truth, before: dict[str, Tensor | None]
) -> None:
    again = values_and_gradients(case, run, trial.inputs, trial.segments, trial.upstream)
    found.checks["twice"] = same(before, again)
    if found.checks["twice"]:
        return
    names = ", ".join(name for name in before if not equal(before[name], again[name]))
    if engine.repeatable:
        found.reasons.append(f"the same call gave other bits the second time: {names}")
    else:
        found.notes.append(f"two calls differ in the last bits of {names}; the library has no other mode")


def _check_neighbour(
    case: Case,
    engine: Engine,
    run: Run,
    found: Gate,
    trial: Truth,
    before: dict[str, Tensor | None],
    other: Sequence[Tensor],
) -> None:
    """Another text in one segment must change nothing outside it."""
    start, end = _inner_segment(trial.segments.cu_seqlens)
    changed = [
        torch.cat([x[:start], y[start:end], x[end:]]) if tokenwise and x.is_floating_point() else x
        for x, y, tokenwise in zip(trial.inputs, other, case.tokenwise, strict=True)
    ]
    after = values_and_gradients(case, run, changed, trial.segments, trial.upstream)
    apart = {name for name, yes in zip(case.inputs, case.tokenwise, strict=True) if not yes}
    names = [name for name in before if name.removeprefix("d") not in apart]
    worst, moved = 0.0, []
    for name in names:
        old, new = before[name], after[name]
        if old is None or new is None:
            continue
        old, new = (torch.cat([x[:start], x[end:]]) for x in (old, new))
        if not torch.equal(old, new):
            moved.append(name)
            worst = max(worst, relative_error(new, old))
    found.checks["neighbour"] = not moved or (not engine.same_bits and worst <= LAST_BITS)
    if not found.checks["neighbour"]:
        found.reasons.append(f"a changed neighbour changed {', '.join(moved)} by {worst:.3g}")
    elif moved:
        found.notes.append(f"a changed neighbour shows in the last bits of {', '.join(moved)}: {worst:.1g}")


def _inner_segment(cu_seqlens: Tensor) -> tuple[int, int]:
    """The longest segment of two tokens or more with others before and after it; else the first one."""
    bounds = cu_seqlens.tolist()
    spans = [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b - a > 1]
    inner = [span for span in spans if span[0] > 0 and span[1] < bounds[-1]]
    return max(inner or spans, key=lambda span: span[1] - span[0])


def _check_prefix(case: Case, run: Run, found: Gate, trial: Truth, other: Sequence[Tensor]) -> None:
    """Later tokens of a segment must change nothing before them."""
    context, device = trial.segments.context, trial.segments.cu_seqlens.device
    tokens, slots = trial.segments.ids.shape[0], trial.segments.cu_seqlens.shape[0] - 1
    rows = list(range(0, tokens + 1, context))
    offsets = rows + [tokens] * (slots + 1 - len(rows))
    seg = segments(torch.tensor(offsets, dtype=torch.int32, device=device), tokens, context)
    cut = context // 3  # inside the first row, not at a multiple of any tile
    changed = [
        torch.cat([x[:cut], y[cut:]]) if tokenwise and x.is_floating_point() else x
        for x, y, tokenwise in zip(trial.inputs, other, case.tokenwise, strict=True)
    ]
    # As leaves, though no gradient is asked for: a compiler would else compile once more for this.
    before, after = run(leaves(case, trial.inputs), seg), run(leaves(case, changed), seg)
    moved = [name for name, a, b in zip(case.outputs, before, after, strict=True) if not torch.equal(a[:cut], b[:cut])]
    found.checks["prefix"] = not moved
    if moved:
        found.reasons.append(f"later tokens changed earlier ones in {', '.join(moved)}")
