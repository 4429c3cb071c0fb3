"""`short_conv` as masked shifts: what a compiler fuses into a few passes, and what a CPU does in a few."""

import torch.nn.functional as F
from torch import Tensor

from dwslm.ops.norm import l2_norm
from dwslm.ops.segments import Segments


def short_conv_shifted(
    x: Tensor, weight: Tensor, segments: Segments, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `short_conv`."""
    # Three apart, so that each result is contiguous as kernels want it and no copy joins or parts them.
    q, k, v = (
        _conv(y, w, segments).unflatten(-1, (heads, -1))
        for y, w in zip(x[:, : len(weight)].chunk(3, dim=1), weight.chunk(3), strict=True)
    )
    return l2_norm(q), l2_norm(k), v, x[:, len(weight) :]


def _conv(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
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
