"""The short convolution as masked shifts: what a compiler fuses into one pass, and what a CPU does in a few."""

import torch.nn.functional as F
from torch import Tensor

from dwslm.ops.segments import Segments


def short_conv_shifted(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """See `short_conv`."""
    total, width = x.shape[0], weight.shape[1]
    weight = weight.to(x.dtype)
    # One padded copy and views of it: a compiler keeps that copy for the backward pass, instead of one for every shift.
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = padded[width - 1 :] * weight[:, -1]
    for i in range(1, width):
        shifted = padded[width - 1 - i : width - 1 - i + total]
        # Positions restart in every segment, so `position >= i` says that token t - i is in the same one.
        inside = (segments.positions >= i).to(x.dtype)[:, None]
        y = y + shifted * inside * weight[:, width - 1 - i]
    return F.silu(y)
