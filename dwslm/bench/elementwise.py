"""Passes over memory with hardly any arithmetic: the residual stream's addition and norm, and QK-norm with rotary positions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dwslm.bench.case import Case, Cost, Engine, Run, Shape, compiled
from dwslm.bench.work import Work
from dwslm.ops import add_norm
from dwslm.ops.add_norm.reference import add_norm_reference
from dwslm.ops.norm import rms_norm
from dwslm.ops.qk_norm_rope import qk_norm_rope, resolve
from dwslm.ops.qk_norm_rope.reference import qk_norm_rope_reference
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


def residual_cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """As a reader of the stream has it: forward compiled in any case, since "fused" is a kernel for the backward pass."""
    width = shape.width

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        x, y = (torch.randn(tokens, width, device=generator.device, generator=generator).to(dtype) for _ in range(2))
        return [x, y, 1 + 0.1 * torch.randn(width, device=generator.device, generator=generator)]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        x, y, gain = inputs
        return add_norm_reference(x, y, gain, EPS)

    def run(name: str) -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            x, y, gain = inputs
            return add_norm.add_norm(x, y, gain, EPS, name)

        return own

    def fused() -> Run:
        add_norm.resolve("fused", device, width)
        return compiled(run("fused"), device)

    def cost(work: Work) -> Cost:
        """Some 5 operations an entry forward, 17 in all. Forward: x and y in, sum and norm out. Backward: both gradients and the
        sum in, one gradient out, which is that of x and of y."""
        n = float(work.tokens * width)
        return Cost(5 * n, 17 * n, 4 * n * dtype.itemsize, 8 * n * dtype.itemsize)

    case = Case(
        op="add_norm",
        name=f"addition and rms norm {width}",
        heads=None,
        inputs=("x", "y", "gain"),
        tokenwise=(True, True, False),
        learnt=(True, True, True),
        outputs=("sum", "o"),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="the formula, float64",
        bound=BOUND,
        packed=False,
        cost=cost,
        engines=(
            Engine("fused", fused),
            Engine("compiled", lambda: compiled(run("torch"), device)),
            Engine("torch", lambda: run("torch")),
        ),
    )
    return [case]


def rope_cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    columns = (heads + 2 * kv_heads) * dim

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(tokens, columns, device=generator.device, generator=generator).to(dtype)
        # Angles out of the blue: which token has which is up to who makes the tables, once a batch.
        angle = 6.28 * torch.rand(tokens, 1, dim // 2, device=generator.device, generator=generator)
        return [x, angle.cos(), angle.sin()]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        x, cos, sin = inputs
        turn = torch.complex(cos.double(), sin.double())[:, 0]
        return tuple(y.float() for y in qk_norm_rope_reference(x, turn, heads, kv_heads, eps=EPS))

    def run(name: str) -> Run:
        def own(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            x, cos, sin = inputs
            return qk_norm_rope(x, cos, sin, heads, kv_heads, eps=EPS, engine=name)

        return own

    def fused() -> Run:
        resolve("fused", device, dim)
        return run("fused")

    def cost(work: Work) -> Cost:
        """Of queries and keys: 3 operations an entry to turn it, 4 to normalise it; backward twice that and the norm again.
        Bytes: forward the projection and both tables in, q, k and values out; backward three gradients, what was normalised and
        the tables in, the projection's gradient out.
        """
        turned = float(work.tokens * (heads + kv_heads) * dim)
        whole = float(work.tokens * columns)
        tables = 4.0 * work.tokens * dim
        forward = 2 * whole * dtype.itemsize + tables
        return Cost(7 * turned, 25 * turned, forward, forward + (2 * whole + turned) * dtype.itemsize + tables)

    case = Case(
        op="rope",
        name="qk norm + rotary",
        heads=heads,
        inputs=("x", "cos", "sin"),
        tokenwise=(True, True, True),
        learnt=(True, False, False),
        outputs=("q", "k", "v"),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="complex products, float64",
        bound=BOUND,
        packed=False,
        cost=cost,
        engines=(
            Engine("fused", fused),
            Engine("compiled", lambda: compiled(run("torch"), device)),
            Engine("eager", lambda: run("torch")),
        ),
    )
    return [case]
