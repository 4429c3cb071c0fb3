"""The float32 truth of `short_conv`: one token and one tap at a time."""

import torch
from torch import Tensor


def short_conv_reference(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, heads: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as in `short_conv`, boundaries as a tensor; float32 throughout. Returns q, k, v: [T, heads, head_dim]."""
    x, weight = x[:, : len(weight)].float(), weight.float()
    width = weight.shape[1]
    bounds = cu_seqlens.tolist()
    out = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        for t in range(start, end):
            y = torch.zeros_like(x[0])
            for i in range(min(width, t - start + 1)):
                y = y + weight[:, width - 1 - i] * x[t - i]
            out.append(y * torch.sigmoid(y))
    q, k, v = torch.stack(out).view(x.shape[0], 3, heads, -1).unbind(1)
    q, k = (y / torch.sqrt(y.square().sum(-1, keepdim=True) + eps) for y in (q, k))
    return q, k, v
