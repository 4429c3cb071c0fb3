"""A linear map without bias whose three products run in float8_e4m3, with delayed scales.

    y = factor x W^T        dx = factor dy W        dW = factor dy^T x

One scale per tensor, from its peak in the micro-batch before. A scale known beforehand lets one kernel round a tensor and
transpose it while it is read, so each of x, W and dy is read once for its two products. x is kept transposed, in a byte a value,
and W likewise.

The factor costs nothing: each product has two of three operands, so each of the three scales is given times its root.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.product import MULTIPLE, misfit, product

PEAKS = ("x", "weight", "dy")
"""What is scaled, in the order of the state (`new_peaks(len(PEAKS))`)."""

X, WEIGHT, DY = range(len(PEAKS))
SETTING = "model.projection_precision"


class Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, peaks: Tensor, root: float) -> Tensor:  # type: ignore[no-untyped-def]
        x8, x8_t, x_scale, x_seen = quantize.both(x, None, False, peaks, X, root)
        weight8, weight8_t, weight_scale, weight_seen = quantize.both(_padded(weight), None, False, peaks, WEIGHT, root)
        ctx.save_for_backward(x8_t, weight8_t, peaks, x_scale, weight_scale, x_seen, weight_seen)
        ctx.root, ctx.rows = root, len(weight)
        return product(x8, x_scale, weight8, weight_scale, x.dtype, True)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x8_t, weight8_t, peaks, x_scale, weight_scale, x_seen, weight_seen = ctx.saved_tensors
        dy8, dy8_t, dy_scale, dy_seen = quantize.both(dy.contiguous(), None, False, peaks, DY, ctx.root)
        dx = product(dy8, dy_scale, weight8_t, weight_scale, dy.dtype, True)
        # A sum over all tokens of the micro-batch is too long for short registers.
        dweight = product(dy8_t, dy_scale, x8_t, x_scale, dy.dtype, False)
        return dx, dweight[: ctx.rows], quantize.largest([x_seen, weight_seen, dy_seen]), None


def _padded(weight: Tensor) -> Tensor:
    spare = -len(weight) % MULTIPLE
    return F.pad(weight, (0, 0, 0, spare)) if spare else weight


def delayed_linear(x: Tensor, weight: Tensor, peaks: Tensor | None, factor: float = 1.0) -> Tensor:
    """factor * x @ weight^T with delayed scales. Without gradients it takes one scale per row instead.

    A score must not move the state of training, nor depend on it or on what else is in the batch.

    Args:
        x: [T, k]; weight: [m, k], of one dtype. T and k are multiples of 16.
        peaks: state, see `PEAKS`. It is read; `remember` writes it after the backward pass. Peaks are those of the tensors as
            they come in, before the factor.
        factor: 0 or more; it rounds nothing.

    Returns:
        [T, m up to a multiple of 16] in x's dtype; what is past m is zero. Gradients come in the same dtype.

    Raises:
        ValueError: where the device, the dtype or the shape cannot do FP8, or without `peaks` where there are gradients.
    """
    if reason := misfit(SETTING, x.device, x.dtype, *x.shape):
        raise ValueError(reason)
    if not torch.is_grad_enabled():
        rows = quantize.rows(_padded(weight), False)
        return product(*quantize.rows(x.contiguous(), False, factor), *rows, x.dtype, True)
    if peaks is None:
        raise ValueError(
            "a linear map with delayed scales keeps the peaks of its tensors: give it `new_peaks(len(PEAKS))`"
        )
    return Delayed.apply(x.contiguous(), weight, peaks, math.sqrt(factor))
