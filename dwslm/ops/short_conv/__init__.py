"""What stands between a linear-attention layer's projection and its recurrence: convolution, SiLU, unit queries and keys."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.segments import Segments
from dwslm.ops.short_conv.shifted import short_conv_shifted

ENGINES = choice.ENGINES
WIDTH = 4  # taps of the fused kernels


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("convolution", engine)


def resolve(engine: str, device: torch.device, head_dim: int, width: int = WIDTH) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    taps = None if width == WIDTH else f"takes {WIDTH} taps, not {width}"
    return choice.resolve("convolution", engine, choice.misfit(device, head_dim) or taps)


def short_conv(
    x: Tensor, weight: Tensor, segments: Segments, heads: int, engine: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values out of their projection, and what else it holds.

        y_t = silu(sum_i weight[:, width - 1 - i] * x_{t-i})     terms before the segment's first token left out
        q, k: each head's y / sqrt(sum y^2 + 1e-6);  v: y

    Args:
        x: [T, 3 * heads * head_dim + more]: queries, keys, values, and columns that pass through.
        weight: float32 [3 * heads * head_dim, width], depthwise; the last column multiplies the current token.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        q, k, v: [T, heads, head_dim] in x's dtype, each contiguous; and x's other columns, [T, more].

    Raises:
        ValueError: as `resolve` does.
    """
    if resolve(engine, x.device, weight.shape[0] // (3 * heads), weight.shape[1]) == "torch":
        return short_conv_shifted(x, weight, segments, heads)
    from dwslm.ops.short_conv.fused import short_conv_fused  # Triton is there on GPU machines only

    return short_conv_fused(x, weight, segments, heads)
