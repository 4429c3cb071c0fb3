"""What stands beside the recurrence of KDA: its decay gate before, its output's gated norm after."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dwslm.bench.case import Case, Cost, Engine, Run, Shape, compiled
from dwslm.bench.work import Work
from dwslm.ops.delta_gate import delta_gate, resolve
from dwslm.ops.delta_gate.reference import delta_gate_reference
from dwslm.ops.delta_rule import decay_dtype
from dwslm.ops.gated_norm import gated_norm
from dwslm.ops.gated_norm.reference import gated_norm_reference
from dwslm.ops.segments import Segments

DECAY_BOUND = -5.0
EPS = 1e-6
BOUND = 0.005
O_SIZE = 2.5e-3
"""Of the recurrence's output at the half init scale: its mean square is near the norm's eps, so eps shows."""


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [gate_case(shape, dtype, device), norm_case(shape, dtype, device)]


def gate_case(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    heads, inner = shape.delta_heads[0], shape.delta_heads[0] * shape.head_dim
    decays = decay_dtype("auto", device=device, dtype=dtype, head_dim=shape.head_dim, bounded=True)

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        f, logits = (_normal(generator, tokens, n).to(dtype) for n in (inner, heads))
        # As initialised: dt_bias is the inverse softplus of 0.001 to 0.1, so nearly all gates are nearly shut.
        return [f, 0.1 * _normal(generator, heads), torch.linspace(-6.9, -2.25, inner, device=generator.device), logits]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        f, a_log, dt_bias, logits = inputs
        return delta_gate_reference(f, a_log, dt_bias, logits, DECAY_BOUND)

    def run(name: str) -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            f, a_log, dt_bias, logits = inputs
            return delta_gate(f, a_log, dt_bias, logits, DECAY_BOUND, name, decays)

        return own

    def cost(work: Work) -> Cost:
        """Some 6 operations an entry forward, 16 in all. Forward: f in, g out. Backward: dg and f in, df out."""
        n = float(work.tokens * inner)
        forward = n * (dtype.itemsize + decays.itemsize)
        return Cost(6 * n, 16 * n, forward, forward + n * (decays.itemsize + 2 * dtype.itemsize))

    return Case(
        op="delta_gate",
        name="decay and beta",
        heads=heads,
        inputs=("f", "a_log", "dt_bias", "logits"),
        tokenwise=(True, False, False, True),
        learnt=(True, True, True, True),
        outputs=("g", "beta"),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="the formula, float64",
        bound=BOUND,
        packed=False,
        cost=cost,
        engines=_engines(run, shape, device),
    )


def norm_case(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    heads, head_dim = shape.delta_heads[0], shape.head_dim

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        o = (O_SIZE * _normal(generator, tokens, heads, head_dim)).to(dtype)
        gate = _normal(generator, tokens, heads * head_dim).to(dtype)
        return [o, gate, 1 + 0.1 * _normal(generator, head_dim), 0.1 * _normal(generator, heads * head_dim)]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        o, gate, gain, bias = inputs
        return (gated_norm_reference(o, gate, gain, bias, EPS),)

    def run(name: str) -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            o, gate, gain, bias = inputs
            return (gated_norm(o, gate, gain, bias, EPS, name),)

        return own

    def cost(work: Work) -> Cost:
        """Some 8 operations an entry forward, 26 in all. Forward: o, gate in, y out. Backward: dy, o, gate in, do, dgate out."""
        n = float(work.tokens * heads * head_dim)
        return Cost(8 * n, 26 * n, 3 * n * dtype.itemsize, 8 * n * dtype.itemsize)

    return Case(
        op="gated_norm",
        name="head norm x output gate",
        heads=heads,
        inputs=("o", "gate", "gain", "bias"),
        tokenwise=(True, True, False, False),
        learnt=(True, True, True, True),
        outputs=("y",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="the formula, float64",
        bound=BOUND,
        packed=False,
        cost=cost,
        engines=_engines(run, shape, device),
    )


def _engines(run: Callable[[str], Run], shape: Shape, device: torch.device) -> tuple[Engine, ...]:
    def fused() -> Run:
        resolve("fused", device, shape.head_dim)
        return run("fused")

    return (
        Engine("fused", fused),
        Engine("compiled", lambda: compiled(run("torch"), device), patience=60),
        Engine("torch", lambda: run("torch")),
    )


def _normal(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, device=generator.device, generator=generator)
