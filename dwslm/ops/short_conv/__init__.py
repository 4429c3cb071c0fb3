"""What stands between a linear-attention layer's projection and its recurrence: convolution, SiLU, unit queries and keys."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.fp8 import Operand, delayed_linear, outline
from dwslm.ops.segments import Segments
from dwslm.ops.short_conv.shifted import short_conv_shifted

ENGINES = choice.ENGINES
WIDTH = 4  # taps of the fused kernels
HEAD, TOKENS = 128, 128  # of which the fused kernel that rounds takes multiples


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


def rounds(engine: str, device: torch.device, head_dim: int, width: int = WIDTH) -> bool:
    """Whether `projected_short_conv` rounds the gradient between the two, for micro-batches in multiples of 128 tokens."""
    return head_dim % HEAD == 0 and resolve(engine, device, head_dim, width) == "fused"


def projected_short_conv(
    x: Operand,
    projection: Tensor,
    peaks: Tensor | None,
    weight: Tensor,
    segments: Segments,
    heads: int,
    engine: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`short_conv` of `delayed_linear`, with the arguments of both.

    Where `rounds` says so, and there are gradients, that of the map is rounded where it is computed, once, out of float32; else
    the map rounds again what was rounded to x's dtype.

    Raises:
        ValueError: as the two do.
    """
    like, head_dim = outline(x), weight.shape[0] // (3 * heads)
    whole = torch.is_grad_enabled() and len(like) % TOKENS == 0
    if peaks is not None and whole and rounds(engine, like.device, head_dim, weight.shape[1]):
        from dwslm.ops.short_conv.rounded import projected_short_conv_fused

        return projected_short_conv_fused(x, projection, peaks, weight, segments, heads)
    return short_conv(delayed_linear(x, projection, peaks), weight, segments, heads, engine)
