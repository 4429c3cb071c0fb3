"""A linear map without bias whose three products run in float8_e4m3, with delayed scales.

    y = factor x W^T        dx = factor dy W        dW = factor dy^T x

One scale per tensor, from its peak in the micro-batch before. A scale known beforehand lets one kernel round a tensor and
transpose it while it is read, so each of x, W and dy is read once for its two products. x is kept transposed, in a byte a value,
and W likewise.

The factor costs nothing: each product has two of three operands, so each of the three scales is given times its root.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.product import filled, first_rows, misfit, product

PEAKS = ("x", "weight", "dy")
"""What is scaled, in the order of the state (`new_peaks(len(PEAKS))`)."""

X, WEIGHT, DY = range(len(PEAKS))
SETTING = "model.projection_precision"


class Rounded(NamedTuple):
    """What goes into the map, as `quantize.both` gives it."""

    values: Tensor
    transposed: Tensor
    scale: Tensor
    seen: Tensor


def multiply(x: Rounded, weight: Tensor, peaks: Tensor, root: float) -> tuple[Tensor, list[Tensor]]:
    """The product, and what its gradients want of it. root: of the factor, as in x's scale."""
    of_weight = Rounded(*quantize.both(filled(weight), None, False, peaks, WEIGHT, root))
    y = product(x.values, x.scale, of_weight.values, of_weight.scale, weight.dtype, True)
    return y, [peaks, x.transposed, x.scale, x.seen, of_weight.transposed, of_weight.scale, of_weight.seen]


def differentiate(kept: Sequence[Tensor], dy: Tensor, rows: int, root: float) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight of so many rows, and the peaks that were seen. kept: what `multiply` gave."""
    peaks, x8_t, x_scale, x_seen, weight8_t, weight_scale, weight_seen = kept
    dy8, dy8_t, dy_scale, dy_seen = quantize.both(dy.contiguous(), None, False, peaks, DY, root)
    dx = product(dy8, dy_scale, weight8_t, weight_scale, dy.dtype, True)
    # A sum over all tokens of the micro-batch is too long for short registers.
    dweight = product(dy8_t, dy_scale, x8_t, x_scale, dy.dtype, False)
    return dx, dweight[:rows], quantize.largest([x_seen, weight_seen, dy_seen])


class Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, peaks: Tensor, root: float) -> Tensor:  # type: ignore[no-untyped-def]
        y, kept = multiply(Rounded(*quantize.both(x, None, False, peaks, X, root)), weight, peaks, root)
        ctx.save_for_backward(*kept)
        ctx.rows, ctx.root = len(weight), root
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        return *differentiate(ctx.saved_tensors, dy, ctx.rows, ctx.root), None


def check(x: Tensor, peaks: Tensor | None) -> None:
    """Raises ValueError where x cannot be multiplied in FP8 by any weight, or where gradients would find no state."""
    if reason := misfit(SETTING, x.device, x.dtype, x.shape[1]):
        raise ValueError(reason)
    if peaks is None and torch.is_grad_enabled():
        raise ValueError(
            "a linear map with delayed scales keeps the peaks of its tensors: give it `new_peaks(len(PEAKS))`"
        )


def delayed_linear(x: Tensor, weight: Tensor, peaks: Tensor | None, factor: float = 1.0) -> Tensor:
    """factor * x @ weight^T with delayed scales. Without gradients it takes one scale per row instead.

    A score must not move the state of training, nor depend on it or on what else is in the batch.

    Args:
        x: [T, k]; weight: [m, k], of one dtype. k is a multiple of 16; where T is not, x is copied.
        peaks: state, see `PEAKS`. It is read; `remember` writes it after the backward pass. Peaks are those of the tensors as
            they come in, before the factor.
        factor: 0 or more; it rounds nothing.

    Returns:
        [T, m up to a multiple of 16] in x's dtype; what is past m is zero. Gradients come in the same dtype.

    Raises:
        ValueError: where the device, the dtype or the shape cannot do FP8, or without `peaks` where there are gradients.
    """
    check(x, peaks)
    whole = filled(x.contiguous())
    if torch.is_grad_enabled():
        y: Tensor = Delayed.apply(whole, weight, peaks, math.sqrt(factor))
    else:
        y = product(*quantize.rows(whole, False, factor), *quantize.rows(filled(weight), False), x.dtype, True)
    return first_rows(y, len(x))
