"""Squared-ReLU feed-forward layer: relu(x up^T)^2 down^T (arXiv 2109.08668), in the model's dtype or in FP8."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.fp8 import Operand, product
from dwslm.ops.mlp import fit, fp8, fp8_fit
from dwslm.ops.mlp.fp8 import PEAKS, fp8_delayed_mlp, fp8_mlp, rounding
from dwslm.ops.mlp.plain import plain_mlp

__all__ = [
    "ENGINES",
    "PEAKS",
    "PRECISIONS",
    "check_name",
    "misfit",
    "resolve",
    "resolve_delayed",
    "rounding",
    "squared_relu_mlp",
]

ENGINES = choice.ENGINES
PRECISIONS = ("model", "fp8", "fp8_delayed")

resolve = fit.resolve
resolve_delayed = fp8_fit.resolve


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("MLP", engine)


def misfit(precision: str, device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> str | None:
    """Why a precision cannot be had for such a layer, and the way out; None where it can."""
    return None if precision == "model" else product.misfit(fp8.SETTING, device, dtype, hidden, width)


def squared_relu_mlp(
    x: Operand,
    up: Tensor,
    down: Tensor,
    precision: str = "model",
    peaks: Tensor | None = None,
    factor: float = 1.0,
    engine: str = "auto",
) -> Tensor:
    """The layer over T tokens, times `factor`.

    Args:
        x: [T, width]; for `fp8_delayed` with gradients it may come rounded, as `rounding` says.
        up: [hidden, width]; down: [width, hidden].
        precision: `model` multiplies in x's dtype. `fp8` runs the two products forward and the two of the input gradients in
            float8_e4m3 with one scale per row, `fp8_delayed` all six with one scale per tensor, from the micro-batch before.
            Both need width and hidden to be multiples of 16, and copy x where T is not.
        peaks: state of `fp8_delayed`, see `PEAKS`. It is read; `remember` writes it after the backward pass.
        factor: what the output is multiplied by, inside the products of either pass: it costs nothing and rounds nothing. Peaks
            are those of the tensors as they are rounded: a, dy as it comes in, and dh before the factor.
        engine: of precision `model`: "fused" has the squared ReLU inside the products, "torch" leaves it to the compiler; of
            `fp8_delayed` likewise, with its rounding; or `auto`. `fp8` has one engine.

    Returns:
        [T, width] in x's dtype.

    Raises:
        ValueError: for another precision, where the device, the dtype or the shape cannot do FP8, or as `resolve` does.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown MLP precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if precision == "fp8_delayed":
        return fp8_delayed_mlp(x, up, down, peaks, factor, engine)
    assert isinstance(x, Tensor), "other precisions round for themselves"
    if precision == "fp8":
        return fp8_mlp(x, up, down, factor)
    if resolve(engine, x.device, x.dtype, x.shape[0], x.shape[1], up.shape[0]) == "fused":
        from dwslm.ops.mlp.fused import fused_mlp  # Triton is there on GPU machines only

        return fused_mlp(x, up, down, factor)
    return plain_mlp(x, up, down, factor)
