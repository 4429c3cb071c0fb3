"""The float32 truth of addition and norm: one token after the other, in float64 inside."""

import torch
from torch import Tensor


def add_norm_reference(x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `add_norm`."""
    added = x.double() if y is None else x.double() + y.double()
    rows = [row / torch.sqrt((row * row).sum() / len(row) + eps) * gain.double() for row in added]
    return added.float(), torch.stack(rows).float()
