"""The float32 truth of the depth mix: one token at a time, straight from the paper's formula."""

import torch
from torch import Tensor


def depth_mix_reference(sources: list[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Arguments as in `depth_mix`. Returns float32 [T, width]."""
    out = []
    for t in range(sources[0].shape[0]):
        values = torch.stack([v[t].float() for v in sources])
        keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps) * gain.float()
        weights = torch.softmax(keys @ query.float(), dim=0)
        out.append(weights @ values)
    return torch.stack(out)
