"""Softmax attention sublayer: the five global layers, and the local layers of the window arm."""

import torch
from torch import Tensor, nn

from dwslm.model.projection import OutputBlock, Projection
from dwslm.model.rotary import Rotary
from dwslm.model.value_embedding import ValueEmbedding
from dwslm.ops.attention import attention
from dwslm.ops.norm import rms_norm
from dwslm.ops.segments import Segments


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and weight-free QK-norm, causal inside a segment.

    `window` is the number of tokens that a query sees, itself included; None sees all of the segment before it.
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
        eps: float,
        value_embedding: ValueEmbedding | None,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.engine, self.eps = window, engine, eps
        blocks = [
            OutputBlock("q", heads * head_dim),
            OutputBlock("k", kv_heads * head_dim),
            OutputBlock("v", kv_heads * head_dim),
        ]
        if value_embedding is not None:
            blocks.append(OutputBlock("value_gate", kv_heads, role="vector", init="zero"))
        self.value_embedding = value_embedding
        self.input = Projection(width, *blocks, dtype=dtype)
        self.output = Projection(heads * head_dim, OutputBlock("", width), dtype=dtype)

    def forward(self, x: Tensor, tokens: Tensor, segments: Segments, rotary: Rotary) -> Tensor:
        """[T, width] to [T, width]."""
        q, k, v, *gate = self.input.split(x)
        q = rotary.apply(rms_norm(q.unflatten(-1, (self.heads, self.head_dim)), eps=self.eps))
        k = rotary.apply(rms_norm(k.unflatten(-1, (self.kv_heads, self.head_dim)), eps=self.eps))
        v = v.unflatten(-1, (self.kv_heads, self.head_dim))
        if self.value_embedding is not None:
            v = self.value_embedding(v, gate[0], tokens)
        o = attention(q, k, v, segments, scale=rotary.scale, window=self.window, engine=self.engine)
        return self.output(o.flatten(1))
