"""Squared-ReLU feed-forward layer: relu(x up^T)^2 down^T (arXiv 2109.08668), in the model's dtype or in FP8."""

from torch import Tensor

from dwslm.ops.mlp.fp8 import fp8_linear
from dwslm.ops.mlp.plain import plain_linear

PRECISIONS = {"model": plain_linear, "fp8": fp8_linear}


def squared_relu_mlp(x: Tensor, up: Tensor, down: Tensor, precision: str = "model") -> Tensor:
    """The layer over T tokens.

    Args:
        x: [T, width].
        up: [hidden, width]; down: [width, hidden].
        precision: `model` multiplies in x's dtype; `fp8` runs all six matrix products (two forward, four backward) in
            float8_e4m3 with one scale per row, and needs width, hidden and T to be multiples of 16.

    Returns:
        [T, width] in x's dtype.

    Raises:
        ValueError: for another precision, or where the device or the shape cannot do FP8.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown MLP precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    linear = PRECISIONS[precision]
    return linear(linear(x, up).relu().square(), down)
