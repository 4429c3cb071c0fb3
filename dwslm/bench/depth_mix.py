"""Attention residuals: the readers of two blocks of sublayers and the final one, whatever stands between them left out."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dwslm.bench.case import Case, Cost, Engine, Run, Shape, compiled
from dwslm.bench.work import Work
from dwslm.model.block import DepthStream, FusedDepthStream
from dwslm.ops.depth_mix import resolve
from dwslm.ops.depth_mix.reference import depth_mix_reference
from dwslm.ops.norm import rms_norm
from dwslm.ops.segments import Segments

SUBLAYERS = 8
BLOCK = 4
READERS = SUBLAYERS + 1
GATE_TOKENS = 256
EPS = 1e-6


class Query(NamedTuple):
    """As `DepthQuery`, with tensors that are inputs."""

    query: Tensor
    gain: Tensor


class Gain(NamedTuple):
    """As `Norm`."""

    gain: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain, self.eps)


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    width = shape.width

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=generator.device, generator=generator)

        # The embedding is normalised, sublayers add less; queries that are neither flat nor decided.
        rows = [normal(tokens, width).to(dtype), *(0.5 * normal(tokens, width).to(dtype) for _ in range(SUBLAYERS))]
        gains = [1 + 0.1 * normal(READERS, width) for _ in range(2)]
        return [*rows, normal(READERS, width) / width**0.5, *gains]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        *rows, queries, gains, norms = inputs
        outputs = []
        for j in range(READERS):
            sums = [sum(rows[start : min(start + BLOCK, j + 1)]) for start in range(1, j + 1, BLOCK)]
            h = depth_mix_reference([rows[0], *sums], queries[j], gains[j], EPS)  # type: ignore[list-item]
            outputs.append(h / torch.sqrt(h.square().mean(-1, keepdim=True) + EPS) * norms[j])
        return tuple(outputs)

    def run(engine: str) -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            *rows, queries, gains, norms = inputs
            stream: DepthStream | FusedDepthStream = DepthStream(BLOCK, EPS)
            if engine == "fused":
                stream = FusedDepthStream(BLOCK, EPS, queries * gains)
            stream = stream.with_block(rows[0])
            outputs = []
            for j in range(READERS):
                x, stream = stream.read(Query(queries[j], gains[j]), Gain(norms[j], EPS))  # type: ignore[arg-type]
                outputs.append(x)
                if j < SUBLAYERS:
                    stream = stream.add(rows[j + 1])
            return tuple(outputs)

        return own

    def fused() -> Run:
        resolve("fused", device)
        return run("fused")

    tokens = GATE_TOKENS if device.type == "cuda" else 32
    case = Case(
        op="depth_mix",
        name=f"{SUBLAYERS} sublayers, {BLOCK} a block",
        heads=None,
        inputs=("embedding", *(f"y{j}" for j in range(1, READERS)), "query", "key_gain", "gain"),
        tokenwise=(*[True] * READERS, False, False, False),
        learnt=(True,) * (READERS + 3),
        outputs=tuple(f"x{j}" for j in range(READERS)),
        dtype=dtype,
        draw=draw,
        reference=reference,
        plain=run("torch"),
        packed=False,
        cost=lambda work: cost(work, width, dtype),
        gate_tokens=tokens,
        gate_context=tokens,
        engines=(
            Engine("fused", fused, patience=60),
            Engine("compiled", lambda: compiled(run("torch"), device), patience=60),
            Engine("torch", lambda: run("torch")),
        ),
    )
    return [case]


def cost(work: Work, width: int, dtype: torch.dtype) -> Cost:
    """A read of n sources: 4 operations an entry of each and 4 of its norm; backward twice that and the scores again.
    Bytes, in rows of a token: forward n in and one out; backward its gradient and the sources in, and a share of the gradient
    out for each. Additions lie outside this count.
    """
    sources = [1 + j // BLOCK + (j % BLOCK > 0) for j in range(READERS)]
    row = float(work.tokens * width)
    forward = sum(4 * n + 4 for n in sources) * row
    again = sum(2 * n for n in sources) * row
    size = row * dtype.itemsize
    one_way = sum(n + 1 for n in sources) * size
    return Cost(forward, 3 * forward + again, one_way, one_way + sum(2 * n + 1 for n in sources) * size)
