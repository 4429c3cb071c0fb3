"""The float32 truth of the gated norm: one head after the other, in float64 inside."""

import torch
from torch import Tensor


def gated_norm_reference(o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `gated_norm`."""
    out = []
    for head in range(o.shape[1]):
        own = slice(head * o.shape[2], (head + 1) * o.shape[2])
        x = o[:, head].double()
        unit = x / torch.sqrt((x * x).sum(-1, keepdim=True) / o.shape[2] + eps)
        out.append(unit * gain.double() / (1 + torch.exp(-(gate[:, own].double() + bias[own].double()))))
    return torch.cat(out, dim=1).float()
