"""Softmax attention sublayer: the five global layers, and the local layers of the window arm."""

import torch
from torch import Tensor, nn

from dwslm.model.projection import OutputBlock, Projection
from dwslm.model.rotary import Rotary
from dwslm.model.value_embedding import ValueEmbedding
from dwslm.ops.attention import attention
from dwslm.ops.fp8 import Operand
from dwslm.ops.qk_norm_rope import qk_norm_rope
from dwslm.ops.segments import Segments

ALIGNED = 8
"""Columns that a projection's rows are filled up to: rows that do not begin at 16 bytes make products and reads slow."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and weight-free QK-norm, causal inside a segment.

    `window` is the number of tokens that a query sees, itself included; None sees all of the segment before it. The output is
    multiplied by `factor`. `precision` is that of the two projections.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        window: int | None,
        engine: str,
        qk_norm_engine: str,
        eps: float,
        value_embedding: ValueEmbedding | None,
        dtype: torch.dtype,
        factor: float = 1.0,
        precision: str = "model",
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.engine, self.qk_norm_engine, self.eps = window, engine, qk_norm_engine, eps
        blocks = [
            OutputBlock("q", heads * head_dim),
            OutputBlock("k", kv_heads * head_dim),
            OutputBlock("v", kv_heads * head_dim),
        ]
        if value_embedding is not None:
            blocks.append(OutputBlock("value_gate", kv_heads, role="vector", init="zero"))
        self.value_embedding = value_embedding
        self.input = Projection(width, *blocks, dtype=dtype, precision=precision, align=ALIGNED)
        inner = heads * head_dim
        self.output = Projection(inner, OutputBlock("", width), dtype=dtype, precision=precision, factor=factor)

    def forward(self, x: Operand, tokens: Tensor, segments: Segments, rotary: Rotary) -> Tensor:
        """[T, width] to [T, width]."""
        cos, sin, heads, kv_heads = rotary.cos, rotary.sin, self.heads, self.kv_heads
        q, k, more = qk_norm_rope(self.input(x), cos, sin, heads, kv_heads, eps=self.eps, engine=self.qk_norm_engine)
        values = kv_heads * self.head_dim
        v = more if more.shape[1] == values else more[:, :values]
        v = v.unflatten(-1, (kv_heads, self.head_dim))
        if self.value_embedding is not None:
            v = self.value_embedding(v, more[:, values : values + kv_heads], tokens)
        o = attention(q, k, v, segments, scale=rotary.scale, window=self.window, engine=self.engine)
        return self.output(o.flatten(1))
