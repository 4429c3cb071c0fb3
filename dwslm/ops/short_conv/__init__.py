"""Depthwise causal convolution that restarts at every segment, then SiLU."""

import importlib.util

import torch
from torch import Tensor

from dwslm.ops.segments import Segments
from dwslm.ops.short_conv.shifted import short_conv_shifted

ENGINES = ("fused", "torch")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # looked up once: a compiler cannot trace the look-up


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"unknown convolution engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")


def resolve(engine: str, device: torch.device) -> str:
    """Name of the engine that `engine` stands for: `auto` is "torch", which a compiler makes faster than "fused" is today.

    Raises:
        ValueError: where a named engine cannot be had.
    """
    check_name(engine)
    if engine == "fused" and not (device.type == "cuda" and HAS_TRITON):
        raise ValueError(f"convolution engine 'fused' needs a GPU and Triton (it comes with torch there), not {device}")
    return "torch" if engine == "auto" else engine


def short_conv(x: Tensor, weight: Tensor, segments: Segments, engine: str = "auto") -> Tensor:
    """y_t = silu(sum_i weight[:, width - 1 - i] * x_{t-i}), terms before the segment's first token left out.

    Args:
        x: [T, channels].
        weight: float32 [channels, width]; the last column multiplies the current token.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        [T, channels] in x's dtype.
    """
    if resolve(engine, x.device) == "torch":
        return short_conv_shifted(x, weight, segments)
    from dwslm.ops.short_conv.fused import short_conv_fused  # Triton is there on GPU machines only

    return short_conv_fused(x, weight, segments)
