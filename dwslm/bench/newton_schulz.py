"""Newton-Schulz on stacks of the model's matrices."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dwslm.bench.case import Case, Cost, Engine, Run, Shape, compiled
from dwslm.ops.segments import Segments
from dwslm.optim.newton_schulz import COEFFICIENTS, newton_schulz, resolve

STEPS = len(COEFFICIENTS["polar_express"])
BOUND = 0.03
"""On bfloat16 Newton-Schulz against float32: 15 products one after the other, 1.2 to 1.4 % on random matrices."""


def stacks(shape: Shape) -> list[tuple[int, int, int]]:
    """(matrices, rows, columns) of the largest stacks of the model: up projections, and attention's square ones."""
    return [(shape.layers, shape.mlp_hidden, shape.width), (3 * shape.layers + 4, shape.width, shape.width)]


def cases(shape: Shape, device: torch.device) -> list[Case]:
    return [_case(stack, device) for stack in stacks(shape)]


def _case(stack: tuple[int, int, int], device: torch.device) -> Case:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        return [torch.randn(*stack, device=generator.device, generator=generator)]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        return (newton_schulz(inputs[0], dtype=torch.float32),)

    n, rows, columns = stack

    def make(engine: str, compile: bool) -> Run:
        resolve(engine, device, dtype, rows, columns)  # refuses what it cannot take

        def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            return (newton_schulz(inputs[0], dtype=dtype, engine=engine),)

        return compiled(run, device) if compile else run

    return Case(
        op="newton_schulz",
        name=f"{n} x {rows:,} x {columns:,}",
        heads=None,
        inputs=("matrices",),
        tokenwise=(False,),
        learnt=(False,),
        outputs=("o",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="the same polynomials, float32",
        bound=BOUND,
        packed=False,
        sized=False,
        cost=lambda work: cost(stack),
        engines=(
            Engine("symmetric", functools.partial(make, "symmetric", True)),
            Engine("compiled", functools.partial(make, "plain", True)),
            Engine("eager", functools.partial(make, "plain", False)),
        ),
    )


def cost(stack: tuple[int, int, int]) -> Cost:
    """A step on m x n with m the smaller side: Gram matrix 2 m m n, its square 2 m m m, product 2 m m n. The first two are
    symmetric and can be had for little more than half, which is left out here: the share of "symmetric" may be above 1.
    Bytes: the matrices in, the result out, float32."""
    count, rows, columns = stack
    m, n = min(rows, columns), max(rows, columns)
    flop = STEPS * count * (4.0 * m * m * n + 2.0 * m**3)
    size = 8.0 * count * m * n
    return Cost(flop, flop, size, size)
