"""The squared-ReLU feed-forward layer in the compute dtype and in FP8."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dwslm.bench import engines_mlp as others
from dwslm.bench.case import FP8, Case, Cost, Engine, Run, Shape, compiled
from dwslm.bench.keep_first import KeepFirst
from dwslm.bench.work import Work
from dwslm.ops import mlp
from dwslm.ops.fp8 import new_peaks
from dwslm.ops.mlp import PEAKS, fit, squared_relu_mlp
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from dwslm.ops.segments import Segments

FP8_BOUNDS = {"o": 0.08, "dx": 0.10, "dup": 0.10, "ddown": 0.10}


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    width, hidden = shape.width, shape.mlp_hidden

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        def normal(rows: int, columns: int, scale: float) -> Tensor:
            return (torch.randn(rows, columns, device=generator.device, generator=generator) * scale).to(dtype)

        return [
            normal(tokens, width, 1.0),
            normal(hidden, width, 0.5 * width**-0.5),
            normal(width, hidden, 0.5 * hidden**-0.5),
        ]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        x, up, down = inputs
        return (squared_relu_mlp_reference(x, up, down),)

    def run(precision: str, engine: str = "torch") -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            x, up, down = inputs
            return (squared_relu_mlp(x, up, down, precision, engine=engine),)

        return own

    def fused() -> Run:
        mlp.resolve("fused", device, dtype, fit.ROWS, width, hidden)
        return run("model", "fused")

    def delayed(engine: str) -> Run:
        mlp.resolve_delayed(engine, device, fit.ROWS, width, hidden)
        peaks = new_peaks(len(PEAKS), device)

        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            x, up, down = inputs
            x, known = KeepFirst.apply(x, peaks)
            return (squared_relu_mlp(x, up, down, "fp8_delayed", known, engine=engine),)

        return own

    case = Case(
        op="mlp",
        name=f"{width}-{hidden}-{width}",
        heads=None,
        inputs=("x", "up", "down"),
        tokenwise=(True, False, False),
        learnt=(True, True, True),
        outputs=("o",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="one product after the other, float32",
        packed=False,
        cost=lambda work: cost(work, width, hidden, dtype),
        engines=(
            Engine("compiled", lambda: compiled(run("model"), device), patience=60),
            Engine("fused", fused),
            Engine("fp8", lambda: run("fp8"), dtype=FP8, bounds=FP8_BOUNDS),
            Engine("fp8_delayed", lambda: delayed("torch"), dtype=FP8, bounds=FP8_BOUNDS),
            Engine("fp8_delayed_fused", lambda: delayed("fused"), dtype=FP8, bounds=FP8_BOUNDS),
            Engine("eager", lambda: run("model")),
            Engine(
                "transformer_engine",
                functools.partial(others.transformer_engine, width, hidden),
                "transformer_engine",
                "pip install 'dwslm[te]'",
                dtype=FP8,
                bounds=FP8_BOUNDS,
            ),
        ),
    )
    return [case]


def cost(work: Work, width: int, hidden: int, dtype: torch.dtype) -> Cost:
    """Two products of 2 T width hidden forward, four backward.
    Bytes: forward x and both matrices in, the output out; backward x, its gradient, both matrices in, three gradients out.
    The hidden layer is left out: it need not leave the chip, in principle.
    """
    product = 2.0 * work.tokens * width * hidden
    x, matrices = work.tokens * width * dtype.itemsize, 2 * width * hidden * dtype.itemsize
    forward = 2 * x + matrices
    return Cost(2 * product, 6 * product, forward, forward + 3 * x + 2 * matrices)
