"""A linear map without bias whose three products run in float8_e4m3, with delayed scales.

    y = factor x W^T        dx = factor dy W        dW = factor dy^T x

One scale per tensor, from its peak in the micro-batch before. A scale known beforehand lets one kernel round a tensor and
transpose it while it is read, so each of x, W and dy is read once for its two products. x is kept transposed, in a byte a value,
and W likewise.

The factor costs nothing: each product has two of three operands, so each of the three scales is given times its root.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.product import filled, first_rows, misfit, product
from dwslm.ops.fp8.rounded import Operand, Rounded, Rounding, outline, rounded

PEAKS = ("x", "weight", "dy")
"""What is scaled, in the order of the state (`new_peaks(len(PEAKS))`)."""

X, WEIGHT, DY = range(len(PEAKS))
SETTING = "model.projection_precision"


def multiply(x: Rounded, weight: Tensor, peaks: Tensor, root: float) -> tuple[Tensor, list[Tensor]]:
    """x @ weight^T, and what `differentiate` wants of it. root: of the factor, which is in x's scale already."""
    weight8, weight8_t, weight_scale, weight_seen = quantize.both(filled(weight), None, False, peaks, WEIGHT, root)
    y = product(x.values, x.scale, weight8, weight_scale, weight.dtype, True)
    return y, [x.transposed, x.scale, x.seen, weight8_t, weight_scale, weight_seen]


def differentiate(
    kept: Sequence[Tensor], dy: Sequence[Tensor], rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `multiply` for one that comes rounded, whoever rounded it: the product, or the kernel that computes it.

    Args:
        kept: what `multiply` gave.
        dy: as from `quantize.both`, by the third of the peaks, with the scale times the root.
        rows: of the weight.

    Returns:
        Those of x and weight in `dtype`, and for the peaks' own: those that were seen.
    """
    x8_t, x_scale, x_seen, weight8_t, weight_scale, weight_seen = kept
    dy8, dy8_t, dy_scale, dy_seen = dy
    dx = product(dy8, dy_scale, weight8_t, weight_scale, dtype, True)
    # A sum over all tokens of the micro-batch is too long for short registers.
    dweight = product(dy8_t, dy_scale, x8_t, x_scale, dtype, False)
    return dx, dweight[:rows], quantize.largest([x_seen, weight_seen, dy_seen])


class Multiply(torch.autograd.Function):
    """Fields of `Rounded`, weight, peaks, and the factor's root. The gradient is rounded here."""

    @staticmethod
    def forward(
        ctx: Any,
        path: Tensor,
        x8: Tensor,
        x8_t: Tensor,
        x_scale: Tensor,
        x_seen: Tensor,
        weight: Tensor,
        peaks: Tensor,
        root: float,
    ) -> Tensor:
        y, kept = multiply(Rounded(path, x8, x8_t, x_scale, x_seen), weight, peaks, root)
        ctx.save_for_backward(peaks, *kept)
        ctx.rows, ctx.root = len(weight), root
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        peaks, *kept = ctx.saved_tensors
        rounded_dy = quantize.both(dy.contiguous(), None, False, peaks, DY, ctx.root)
        dx, dweight, seen = differentiate(kept, rounded_dy, ctx.rows, dy.dtype)
        return dx, None, None, None, None, dweight, seen, None


def check(x: Tensor) -> None:
    """Raises ValueError where `misfit` has a reason; x [T, k]."""
    if reason := misfit(SETTING, x.device, x.dtype, x.shape[1]):
        raise ValueError(reason)


def rounding(peaks: Tensor, factor: float) -> Rounding:
    """How `delayed_linear` wants its input."""
    return Rounding(peaks, X, math.sqrt(factor))


def delayed_linear(x: Operand, weight: Tensor, peaks: Tensor | None, factor: float = 1.0) -> Tensor:
    """factor * x @ weight^T with delayed scales. Without gradients it takes one scale per row instead.

    A score must not move the state of training, nor depend on it or on what else is in the batch.

    Args:
        x: [T, k]; weight: [m, k], of one dtype. k is a multiple of 16; where T is not, x is copied. With gradients x may come
            rounded, as `rounding` says.
        peaks: state, see `PEAKS`. It is read; `remember` writes it after the backward pass. Peaks are those of the tensors as
            they come in, before the factor.
        factor: 0 or more; it rounds nothing.

    Returns:
        [T, m up to a multiple of 16] in x's dtype; what is past m is zero. Gradients come in the same dtype.

    Raises:
        ValueError: where the device, the dtype or the shape cannot do FP8, or without `peaks` where there are gradients.
    """
    like = outline(x)
    check(like)
    if torch.is_grad_enabled():
        if peaks is None:
            raise ValueError(
                "a linear map with delayed scales keeps the peaks of its tensors: give it `new_peaks(len(PEAKS))`"
            )
        how = rounding(peaks, factor)
        y: Tensor = Multiply.apply(*rounded(x, how), weight, peaks, how.factor)
    else:
        assert isinstance(x, Tensor), "what is rounded with a delayed scale is for training"
        y = product(
            *quantize.rows(filled(x.contiguous()), False, factor), *quantize.rows(filled(weight), False), x.dtype, True
        )
    return first_rows(y, len(like))
