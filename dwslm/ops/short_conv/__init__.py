"""Depthwise causal convolution that restarts at every segment, then SiLU."""

from collections.abc import Callable

from torch import Tensor

from dwslm.ops.segments import Segments
from dwslm.ops.short_conv.shifted import short_conv_shifted

ENGINES: dict[str, Callable[..., Tensor]] = {"torch": short_conv_shifted}


def short_conv(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """y_t = silu(sum_i weight[:, width - 1 - i] * x_{t-i}), terms before the segment's first token left out.

    Args:
        x: [T, channels].
        weight: float32 [channels, width]; the last column multiplies the current token.

    Returns:
        [T, channels] in x's dtype.
    """
    return ENGINES["torch"](x, weight, segments)
