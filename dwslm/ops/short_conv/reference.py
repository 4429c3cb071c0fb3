"""The float32 truth of the short convolution: one token and one tap at a time."""

import torch
from torch import Tensor


def short_conv_reference(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Arguments as in `short_conv`, boundaries as a tensor; float32 throughout. Returns [T, channels]."""
    x, weight = x.float(), weight.float()
    width = weight.shape[1]
    bounds = cu_seqlens.tolist()
    out = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        for t in range(start, end):
            y = torch.zeros_like(x[0])
            for i in range(min(width, t - start + 1)):
                y = y + weight[:, width - 1 - i] * x[t - i]
            out.append(y * torch.sigmoid(y))
    return torch.stack(out)
