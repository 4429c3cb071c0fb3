"""The float32 truth of softmax attention: one query at a time."""

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Same arguments as `attention`, boundaries as a tensor; float32 throughout. Returns [T, heads, head_dim]."""
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    bounds = cu_seqlens.tolist()
    out = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        for t in range(start, end):
            first = start if window is None else max(start, t - window + 1)
            keys = k[first : t + 1].repeat_interleave(group, dim=1)
            values = v[first : t + 1].repeat_interleave(group, dim=1)
            weights = torch.softmax(scale * torch.einsum("hd,shd->hs", q[t], keys), dim=-1)
            out.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(out)
