"""Attention in plain PyTorch: blocks of queries against the keys they can see, one masked product a block."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.ops.segments import Segments

QUERY_BLOCK = 256


def attention_blocked(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """See `attention`. Memory grows with QUERY_BLOCK x context, not with context squared."""
    total, heads, head_dim = q.shape
    rows, context = segments.rows, segments.context
    group = heads // k.shape[1]

    def by_row(x: Tensor) -> Tensor:
        return x.view(rows, context, -1, head_dim).transpose(1, 2)

    q, k, v = by_row(q), by_row(k.repeat_interleave(group, dim=1)), by_row(v.repeat_interleave(group, dim=1))
    ids = segments.ids.view(rows, context)
    index = torch.arange(context, device=q.device)
    out = []
    for start in range(0, context, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, context)
        first = 0 if window is None else max(0, start - window + 1)
        ahead = index[start:end, None] - index[None, first:end]
        near = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
        mask = near & (ids[:, start:end, None] == ids[:, None, first:end])
        block = F.scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], attn_mask=mask[:, None], scale=scale
        )
        out.append(block)
    return torch.cat(out, dim=2).transpose(1, 2).reshape(total, heads, head_dim)
