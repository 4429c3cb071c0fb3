"""The least that each class of a step could take: operations over the matrix rate, bytes over the copy rate, of the same run.

Counted for the parts as they stand, each one pass over its inputs and outputs in the compute dtype of 2 bytes (masters and
tables 4, log decays as their engine reads them). Work that is fused into another kernel can lie below its count; a product is
never counted with its bytes. The formulas of attention, delta rule, convolution and Newton-Schulz stand beside the cases of the
day-0 benchmark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dwslm.bench import attention, delta_rule, newton_schulz, short_conv
from dwslm.bench.case import Cost, Shape
from dwslm.bench.work import Work
from dwslm.model.delta import DeltaAttention
from dwslm.model.lm import DTYPES, LanguageModel, ModelSettings
from dwslm.model.projection import Projection
from dwslm.ops import add_norm, delta_gate
from dwslm.ops import short_conv as convolution
from dwslm.ops.delta_rule import decay_dtype
from dwslm.ops.mlp import resolve, resolve_delayed
from dwslm.optim.optimizer import Optimizer

BYTES = 2  # of an activation
NORM_PASSES = 4 + 4
"""Residual addition and norm of a sublayer, in tensors [T, width]: stream and output in, stream and normed input out; backward
two gradients and the stream in, one gradient out, which is that of stream and output. In float8 the normed input is as large,
since it goes out twice."""
RELU_PASSES = 2 + 3
"""Squared ReLU, in tensors [T, hidden]: in and out; backward gradient and input in, gradient out."""
GATE_LOGITS, GATE_DECAYS = 1 + 2, 1 + 1
"""Decay gate, in tensors [T, inner]: logits in, decays out; backward logits and the decays' gradient in, that of logits out."""
NORM_GATE_PASSES = 3 + 5
"""Norm and gate of the delta rule's output: two in, one out; backward three in, two out."""
ROPE_PASSES = 2 + 3
"""Norm and rotation of queries and keys: in and out; backward gradient and input in, gradient out."""
TABLE_BYTES = (4 + 2) + (2 + 4 + 4)
"""A looked-up row, per element: float32 in, activation out; backward gradient in, float32 read and written."""
LOGIT_PASSES = 2
"""Logits in, their gradient out; in float8 it is as large, since it goes out twice."""


QUANTISED = {"model": (0, 0), "fp8": (3 + 3, 3 + 9), "fp8_delayed": (4 + 4, 4 + 5)}
"""FP8 MLP: bytes a token and element of [T, width] and of [T, hidden], the squared ReLU among them. By rows: x, a and dy in
with 2 bytes and out with 1; backward of the ReLU two in, FP8 and two of 2 bytes out, since weight gradients stay in bf16. With
delayed scales everything comes out twice, as it is and transposed, and backward reads the float8 square."""
DELAYED_BYTES = 2 + 2
"""A projection in FP8, per element of x and of dy: in with 2 bytes, out twice with 1."""


@dataclass(frozen=True)
class Floor:
    """Operations at the bf16 rate, operations at the FP8 rate, and bytes of a class in one step."""

    flop: float = 0.0
    bytes: float = 0.0
    fp8_flop: float = 0.0

    def ms(self, ceilings: Mapping[str, Any]) -> float | None:
        """Milliseconds at the rates of `ceilings`; None where a rate it needs was not measured."""
        computed = 0.0
        for flop, rate in ((self.flop, "bf16_tflops"), (self.fp8_flop, "fp8_tflops")):
            if flop and ceilings[rate] is None:
                return None
            computed += flop / ceilings[rate]["median"] / 1e9 if flop else 0.0
        return max(computed, self.bytes / ceilings["copy_gb_s"]["median"] / 1e6)


def floors(
    model: LanguageModel, optimizer: Optimizer, batches: Sequence[NDArray[np.int32]], tokens: int, context: int
) -> dict[str, Floor]:
    """By class, for one step.

    Args:
        batches: `cu_seqlens` of the step's micro-batches.
        tokens: slots of a micro-batch; context: of a row.
    """
    s, vocab, steps = model.settings, model.vocab_size, len(batches)
    total = tokens * steps
    kinds = s.kinds()
    soft = [kind for kind in kinds if kind in ("global", "window")]
    linear = len(kinds) - len(soft)
    inner = s.delta_heads * s.delta_head_dim
    product = 2.0 * total * s.width * s.mlp_hidden * s.layers
    mlp = {
        "model": Floor(flop=3 * product),
        "fp8": Floor(flop=product, fp8_flop=2 * product),
        "fp8_delayed": Floor(fp8_flop=3 * product),
    }[s.mlp_precision]
    weights = model.sizes()["matrices"] - 2 * s.layers * s.width * s.mlp_hidden
    in_fp8 = [part for part in model.modules() if isinstance(part, Projection) and part.precision != "model"]
    matrices = sum(block.rows * p.weight.shape[1] for p in in_fp8 for block in p.blocks if block.role == "matrix")
    # Reads of the attention residuals have both in them.
    elementwise = 0 if s.depth_block else BYTES * total * NORM_PASSES * 2 * s.layers * s.width
    size = tokens, s.width, s.mlp_hidden
    inside = s.mlp_precision != "model" or resolve(s.mlp_engine, optimizer.device, DTYPES[s.dtype], *size) == "fused"
    elementwise += 0 if inside else BYTES * total * RELU_PASSES * s.layers * s.mlp_hidden
    decays = _decays(s, optimizer.device)
    elementwise += total * linear * inner * (BYTES * (GATE_LOGITS + NORM_GATE_PASSES) + decays.itemsize * GATE_DECAYS)
    elementwise += BYTES * total * len(soft) * ROPE_PASSES * (s.heads + s.kv_heads) * s.head_dim
    tables = s.width + sum(_value_widths(model))
    found = {
        "mlp up": mlp,
        "mlp down": mlp,
        "projections": Floor(flop=6.0 * total * (weights - matrices), fp8_flop=6.0 * total * matrices),
        "head": Floor(**{"flop" if s.head_precision == "model" else "fp8_flop": 6.0 * total * s.width * vocab}),
        "newton-schulz": Floor(flop=_newton_schulz_flop(optimizer)),
        "head elementwise": Floor(bytes=float(BYTES * LOGIT_PASSES * total) * vocab),
        "norms and elementwise": Floor(bytes=float(elementwise)),
        "tables": Floor(bytes=float(total * tables * TABLE_BYTES)),
        "copies": Floor(bytes=_accumulation_bytes(optimizer) * steps),
        "optimizer": Floor(bytes=_update_bytes(optimizer)),
    }
    dtype, shape = DTYPES[s.dtype], _shape(s, vocab)
    works = [_work(cu_seqlens, tokens, context) for cu_seqlens in batches]
    attended = [
        attention.cost(work, shape, s.window if kind == "window" else None, dtype) for work in works for kind in soft
    ]
    found["softmax attention"] = _sum(attended)
    if linear:
        scalar = s.local == "gdn"
        rules = [delta_rule.cost(work, s.delta_heads, s.delta_head_dim, dtype, scalar, decays) for work in works]
        found["delta rule"] = _sum(rules * linear)
        # Its operations are not those of the matrix unit: bytes alone.
        found["convolution"] = Floor(
            bytes=sum(short_conv.cost(work, 3 * inner, dtype).bytes for work in works) * linear
        )
    of_width, of_hidden = QUANTISED[s.mlp_precision]
    quantised = s.layers * (of_width * s.width + of_hidden * s.mlp_hidden)
    quantised += DELAYED_BYTES * sum(sum(part.weight.shape) for part in in_fp8)
    quantised += 0 if s.head_precision == "model" else DELAYED_BYTES * s.width
    # Rounded where they are computed, and counted there: what the gated norm and the residual norm give, and the gradient of the
    # convolution's input.
    if in_fp8 and s.local == "kda" and delta_gate.resolve(s.gate_engine, optimizer.device, s.delta_head_dim) == "fused":
        quantised -= DELAYED_BYTES * linear * inner
    if not s.depth_block and add_norm.rounds(s.norm_engine, optimizer.device, s.width):
        readers = s.layers * ((s.mlp_precision == "fp8_delayed") + (s.projection_precision == "fp8_delayed"))
        quantised -= DELAYED_BYTES * readers * s.width
    if in_fp8 and convolution.rounds(s.conv_engine, optimizer.device, s.delta_head_dim):
        behind = [part.input.weight for part in model.modules() if isinstance(part, DeltaAttention)]
        quantised -= DELAYED_BYTES * sum(map(len, behind))
    if s.mlp_precision == "fp8_delayed" and resolve_delayed(s.mlp_engine, optimizer.device, *size) == "fused":
        quantised -= s.layers * of_hidden * s.mlp_hidden  # the square and its gradient, inside the products
    if quantised:
        found["quantisation"] = Floor(bytes=float(total * quantised))
    if s.depth_block:
        found["attention residuals"] = Floor(
            bytes=float(BYTES * total * s.width * depth_passes(s.layers, s.depth_block))
        )
    return found


def depth_passes(layers: int, block: int) -> int:
    """Tensors [T, width] that all reads of the attention residuals move. A read of n sources: n in, one out; backward its
    gradient and the sources in, and a share of the gradient out for each, which adds up outside this count."""
    sources = [1 + reader // block + (reader % block > 0) for reader in range(2 * layers + 1)]
    return sum(3 * n + 2 for n in sources)


def _decays(s: ModelSettings, device: torch.device) -> torch.dtype:
    """Of the log decays that the decay gate gives the delta rule."""
    if s.local != "kda" or s.delta_gate != "bounded":
        return torch.float32
    return decay_dtype(s.delta_engine, device=device, dtype=DTYPES[s.dtype], head_dim=s.delta_head_dim, bounded=True)


def _value_widths(model: LanguageModel) -> list[int]:
    roles = model.roles()
    return [p.shape[1] for name, p in model.named_parameters() if roles[name][0][2] == "value_table"]


def _newton_schulz_flop(optimizer: Optimizer) -> float:
    stacks = [
        group.stack.shape for group in optimizer.groups if group.rule in ("muonh", "muon") and group.stack is not None
    ]
    return sum(newton_schulz.cost((count, rows, columns)).flop for count, rows, columns in stacks)


def _accumulation_bytes(optimizer: Optimizer) -> float:
    """Every gradient in, its float32 sum read and written."""
    return float(sum(p.numel() * (p.element_size() + 8) for p in optimizer.params.values()))


def _update_bytes(optimizer: Optimizer) -> float:
    """Gradient in and cleared, weights and state in and out, compute copies out."""
    size = 8.0 * optimizer.gradient.numel()
    size += sum(2.0 * x.numel() * x.element_size() for group in optimizer.groups for x in group.changing())
    return size + sum(p.numel() * p.element_size() for p in optimizer.params.values() if p.dtype != torch.float32)


def _shape(s: ModelSettings, vocab: int) -> Shape:
    return Shape(
        width=s.width,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        window=s.window,
        delta_heads=(s.delta_heads,),
        delta_gate_rank=s.delta_gate_rank,
        mlp_hidden=s.mlp_hidden,
        softcap=s.softcap,
        vocab_size=vocab,
        layers=s.layers,
        global_layers=s.kinds().count("global"),
    )


def _work(cu_seqlens: NDArray[np.int32], tokens: int, context: int) -> Work:
    return Work(tokens, context, len(cu_seqlens) - 1, [cu_seqlens], [], np.zeros(0, np.int64), 0.0)


def _sum(costs: Sequence[Cost]) -> Floor:
    return Floor(flop=sum(cost.flop for cost in costs), bytes=sum(cost.bytes for cost in costs))
