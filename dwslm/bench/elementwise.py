"""Passes over memory with hardly any arithmetic: the residual stream's norm, and rotary positions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dwslm.bench.case import Case, Cost, Engine, Shape, compiled
from dwslm.bench.work import Work
from dwslm.model.rotary import RopeSettings, Rotary, rotation_frequencies
from dwslm.ops.norm import rms_norm
from dwslm.ops.segments import Segments

EPS = 1e-6
BOUND = 0.005


def norm_cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    width = shape.width

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(tokens, width, device=generator.device, generator=generator).to(dtype)
        return [x, 1 + 0.1 * torch.randn(width, device=generator.device, generator=generator)]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        x, gain = inputs
        return (x / torch.sqrt((x * x).sum(-1, keepdim=True) / width + EPS) * gain,)

    def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        x, gain = inputs
        return (rms_norm(x, gain, EPS),)

    def cost(work: Work) -> Cost:
        """Forward: 4 operations an entry; x in, y out. Backward: twice that; x and dy in, dx out."""
        n = float(work.tokens * width)
        return Cost(4 * n, 12 * n, 2 * n * dtype.itemsize, 5 * n * dtype.itemsize)

    case = Case(
        op="norm",
        name=f"rms norm {width}",
        heads=None,
        inputs=("x", "gain"),
        tokenwise=(True, False),
        learnt=(True, True),
        outputs=("o",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="the formula, float32",
        bound=BOUND,
        packed=False,
        cost=cost,
        engines=(
            Engine("compiled", lambda: compiled(run, device)),
            Engine("eager", lambda: run),
        ),
    )
    return [case]


def rope_cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    rope = RopeSettings()
    frequencies = rotation_frequencies(dim, rope).to(device)

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        return [
            torch.randn(tokens, n, dim, device=generator.device, generator=generator).to(dtype)
            for n in (heads, kv_heads)
        ]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        # Pairs as complex numbers, turned by position * theta^(-2i / dim).
        positions = torch.cat(
            [torch.arange(int(b - a), device=device) for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
        )
        theta = rope.theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
        angle = positions[:, None, None].double() * theta
        turn = torch.polar(torch.ones_like(angle), angle)
        out = []
        for x in inputs:
            a, b = x.double().chunk(2, dim=-1)
            y = torch.complex(a, b) * turn
            out.append(torch.cat([y.real, y.imag], dim=-1).float())
        return tuple(out)

    def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        rotary = Rotary(segments.positions, frequencies, 1.0)
        return rotary.apply(inputs[0]), rotary.apply(inputs[1])

    def cost(work: Work) -> Cost:
        """Each way: 3 operations an entry (two products and a sum), q and k in, the turned ones out. The tables are left out."""
        n = float(work.tokens * (heads + kv_heads) * dim)
        return Cost(3 * n, 6 * n, 2 * n * dtype.itemsize, 4 * n * dtype.itemsize)

    case = Case(
        op="rope",
        name="tables, q and k",
        heads=heads,
        inputs=("q", "k"),
        tokenwise=(True, True),
        learnt=(True, True),
        outputs=("q turned", "k turned"),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="complex products, float64",
        bound=BOUND,
        gate_context=None,
        cost=cost,
        engines=(
            Engine("compiled", lambda: compiled(run, device)),
            Engine("eager", lambda: run),
        ),
    )
    return [case]
