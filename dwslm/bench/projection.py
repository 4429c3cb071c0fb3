"""The mixers' projections, in the compute dtype and in FP8."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.bench.case import FP8, Case, Cost, Engine, Run, Shape
from dwslm.bench.keep_first import KeepFirst
from dwslm.bench.work import Work
from dwslm.ops.fp8 import PEAKS, delayed_linear, new_peaks
from dwslm.ops.fp8.product import filled
from dwslm.ops.fp8.reference import linear_reference
from dwslm.ops.segments import Segments

FP8_BOUNDS = {"o": 0.05, "dx": 0.05, "dweight": 0.05}


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Input projections of both kinds of layer, and the output projection, which they share where their inner widths agree."""
    inner, delta_inner = shape.heads * shape.head_dim, shape.delta_heads[0] * shape.head_dim
    sizes = (
        (shape.width, 3 * delta_inner + 2 * shape.delta_gate_rank + shape.delta_heads[0]),
        (shape.width, inner + 2 * shape.kv_heads * shape.head_dim),
        (inner, shape.width),
    )
    return [_case(k, rows, dtype, device) for k, rows in sizes]


def _case(k: int, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        x, weight = (
            torch.randn(n, k, device=generator.device, generator=generator) * scale
            for n, scale in ((tokens, 1.0), (rows, 0.5 * k**-0.5))
        )
        return [x.to(dtype), weight.to(dtype)]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        x, weight = inputs
        return (linear_reference(x, filled(weight)),)

    def plain(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        x, weight = inputs
        return (F.linear(x, filled(weight)),)

    def delayed() -> Run:
        peaks = new_peaks(len(PEAKS), device)

        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            x, weight = inputs
            x, known = KeepFirst.apply(x, peaks)
            return (delayed_linear(x, weight, known),)

        return own

    return Case(
        op="projection",
        name=f"{k}-{rows}",
        heads=None,
        inputs=("x", "weight"),
        tokenwise=(True, False),
        learnt=(True, True),
        outputs=("o",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="one product, float32",
        packed=False,
        cost=lambda work: cost(work, k, rows, dtype),
        engines=(
            Engine("torch", lambda: plain),
            Engine("fp8_delayed", delayed, dtype=FP8, bounds=FP8_BOUNDS),
        ),
    )


def cost(work: Work, k: int, rows: int, dtype: torch.dtype) -> Cost:
    """One product of 2 T k rows forward, two backward.
    Bytes: forward x and the weight in, the output out; backward x, the weight and the output's gradient in, two gradients out.
    """
    product = 2.0 * work.tokens * k * rows
    x, y, weight = (n * dtype.itemsize for n in (work.tokens * k, work.tokens * rows, k * rows))
    return Cost(product, 3 * product, x + weight + y, 3 * x + 3 * weight + 2 * y)
