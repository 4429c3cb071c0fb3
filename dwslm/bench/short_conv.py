"""What stands before the recurrence: short convolution, SiLU and L2 norm, one operation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dwslm.bench.case import Case, Cost, Engine, Run, Shape, compiled
from dwslm.bench.work import Work
from dwslm.ops.segments import Segments
from dwslm.ops.short_conv import WIDTH, resolve, short_conv
from dwslm.ops.short_conv.reference import short_conv_reference

GATE_TOKENS = 1024


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    heads = shape.delta_heads[0]
    channels = 3 * heads * shape.head_dim

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(tokens, channels, device=generator.device, generator=generator).to(dtype)
        weight = torch.rand(channels, WIDTH, device=generator.device, generator=generator) - 0.5  # as it is initialised
        return [x, weight]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        x, weight = inputs
        return short_conv_reference(x, weight, cu_seqlens, heads)

    def run(name: str) -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            x, weight = inputs
            return short_conv(x, weight, segments, heads, name)[:3]

        return own

    def fused() -> Run:
        resolve("fused", device, shape.head_dim, WIDTH)
        return run("fused")

    tokens = GATE_TOKENS if device.type == "cuda" else 128
    case = Case(
        op="short_conv",
        name="conv 4 + silu + l2 norm",
        heads=heads,
        inputs=("x", "weight"),
        tokenwise=(True, False),
        learnt=(True, True),
        outputs=("q", "k", "v"),
        dtype=dtype,
        draw=draw,
        reference=reference,
        plain=run("torch"),
        bound=0.005,
        cost=lambda work: cost(work, channels, dtype),
        gate_tokens=tokens,
        gate_context=tokens // 2,
        engines=(
            Engine("fused", fused),
            Engine("compiled", lambda: compiled(run("torch"), device), patience=60),
            Engine("torch", lambda: run("torch")),
        ),
    )
    return [case]


def cost(work: Work, channels: int, dtype: torch.dtype) -> Cost:
    """Forward, a channel and token: 4 taps of 2 operations, some 5 of SiLU and norm; backward twice that and the taps again.
    Bytes: forward x in, q, k, v out; backward x and three gradients in, dx out.
    """
    n = float(work.tokens * channels)
    size = n * dtype.itemsize
    return Cost(13 * n, 47 * n, 2 * size, 5 * size)
