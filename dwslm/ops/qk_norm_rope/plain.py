"""`qk_norm_rope` in plain PyTorch."""

import torch
from torch import Tensor

from dwslm.ops.norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (i, i + head_dim / 2) of x [T, heads, head_dim]; computed in float32, returned in x's dtype.

    Args:
        cos, sin: float32 [T, 1, head_dim / 2].
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def qk_norm_rope_plain(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `qk_norm_rope`. The last of the results is a view of x."""
    head_dim = 2 * cos.shape[-1]
    columns = heads * head_dim, kv_heads * head_dim
    q, k, more = x.split([*columns, x.shape[1] - sum(columns)], dim=-1)
    q, k = (rotate(rms_norm(y.unflatten(-1, (-1, head_dim)), eps=eps), cos, sin) for y in (q, k))
    return q, k, more
