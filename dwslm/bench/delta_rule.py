"""The gated delta rule: Kimi Delta Attention with one decay per channel, Gated DeltaNet with one a head."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.bench import engines_delta as others
from dwslm.bench.case import Case, Cost, Engine, Run, Shape
from dwslm.bench.work import Work
from dwslm.ops.delta_rule import decay_dtype, delta_rule, gated_delta_rule, resolve
from dwslm.ops.delta_rule.reference import delta_rule_reference
from dwslm.ops.segments import Segments

LEAST = -5.0  # log decay of the bounded gate
CHUNK = 64  # of the count of operations
GATE_TOKENS = 1024  # token by token: more would take longer than all else

Gate = Callable[[Tensor, Tensor], Tensor]
# From normal and uniform numbers to log decays. Trained gates are slow in most channels; fast ones flatter some kernels, since
# state that decays need not be carried. The first is timed.
GATES: dict[str, Gate] = {
    "typical": lambda normal, uniform: LEAST * torch.sigmoid(normal - 3),
    "slow": lambda normal, uniform: -0.02 * uniform,
    "uniform": lambda normal, uniform: LEAST * uniform,
    "extreme": lambda normal, uniform: torch.where(uniform < 0.5, LEAST, -1e-4),
}
FAST = ("uniform", "extreme")


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [_case(shape, kind, heads, dtype, device) for heads in shape.delta_heads for kind in ("kda", "gdn")]


def _case(shape: Shape, kind: str, heads: int, dtype: torch.dtype, device: torch.device) -> Case:
    dim = shape.head_dim
    scale, scalar = dim**-0.5, kind == "gdn"

    def draw(tokens: int, gate: str, generator: torch.Generator) -> list[Tensor]:
        def random(make: Callable[..., Tensor], *size: int) -> Tensor:
            return make(*size, device=generator.device, generator=generator)

        q, k = (F.normalize(random(torch.randn, tokens, heads, dim), dim=-1).to(dtype) for _ in range(2))
        v = random(torch.randn, tokens, heads, dim).to(dtype)
        size = (tokens, heads) if scalar else (tokens, heads, dim)
        g = GATES[gate](random(torch.randn, *size), random(torch.rand, *size))
        return [q, k, v, g, random(torch.rand, tokens, heads)]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta = inputs
        wide = g[:, :, None].expand(-1, -1, dim) if scalar else g
        return (delta_rule_reference(q, k, v, wide, beta, cu_seqlens, scale=scale),)

    rule = gated_delta_rule if scalar else delta_rule

    def own(name: str) -> Run:
        resolve(name, device=device, dtype=dtype, head_dim=dim, bounded=True, scalar_gate=scalar)

        def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            q, k, v, g, beta = inputs
            return (rule(q, k, v, g, beta, segments, scale=scale, bounded=True, engine=name),)

        return run

    def plain(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        q, k, v, g, beta = inputs
        return (rule(q, k, v, g, beta, segments, scale=scale, bounded=True, engine="torch"),)

    # As the model's decay gate makes them; that of GDN is formulas in float32.
    decays = torch.float32 if scalar else decay_dtype("auto", device=device, dtype=dtype, head_dim=dim, bounded=True)
    make = functools.partial
    gpu = "pip install 'dwslm[gpu]'"
    engines = [
        Engine("fused", make(own, "fused"), patience=60, takes={} if scalar else {"g": torch.bfloat16}),
        Engine("cudnn", make(own, "cudnn"), "cudnn", gpu, patience=90),
        Engine("fla", make(own, "fla"), "fla", gpu, patience=240),
        Engine("torch", make(own, "torch"), ask=True, same_bits=False),
    ]
    if scalar:
        install = "pip install flash-qla"
        engines.insert(3, Engine("fla_gdn", make(own, "fla_gdn"), "fla", gpu, patience=150))
        engines.insert(4, Engine("flashqla", make(others.flash_qla, scale), "flash_qla", install, patience=150))
    tokens = GATE_TOKENS if device.type == "cuda" else 128
    return Case(
        op="delta_rule",
        name=kind,
        heads=heads,
        inputs=("q", "k", "v", "g", "beta"),
        tokenwise=(True,) * 5,
        learnt=(True,) * 5,
        outputs=("o",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        plain=plain,
        kinds=tuple(GATES),
        bounds={f"dg {gate}": 0.02 for gate in FAST},
        cost=lambda work: cost(work, heads, dim, dtype, scalar, decays),
        gate_tokens=tokens,
        gate_context=tokens // 2,
        engines=tuple(engines),
    )


def cost(
    work: Work, heads: int, dim: int, dtype: torch.dtype, scalar: bool, decays: torch.dtype = torch.float32
) -> Cost:
    """The chunked form with chunks of C = 64 and d = head_dim, a token and head:
    q k^T, k k^T, the system applied to keys and to values, scores by values: five products of 2 C d;
    state into outputs, into corrections, and keys into the state: three of 2 d d. Backward twice that.
    Bytes: forward q, k, v, g, beta in, o out; backward the same and do in, dq, dk, dv, dg, dbeta out. States stay on the chip.
    """
    product = work.tokens * heads * (10.0 * CHUNK * dim + 6.0 * dim * dim)
    value = work.tokens * heads * dim * dtype.itemsize
    gate = work.tokens * heads * ((1 if scalar else dim) * decays.itemsize + 4)  # g, and beta in float32
    forward = 4 * value + gate
    return Cost(product, 3 * product, forward, forward + 7 * value + 2 * gate)
