"""The layer with its products in float8_e4m3, under two recipes.

`rows`: one scale per row of each operand, of the tensor at hand. Forward and input gradients in FP8. The weights' gradients stay
in the compute dtype: a row of theirs runs over all tokens, so a scale per row would cost another pass over each operand.

`delayed`: one scale per tensor, from its peak in the micro-batch before. A scale known beforehand lets one kernel round a tensor
and transpose it while it is read, so all six products run in FP8.

In neither recipe does relu(h)^2 meet memory unrounded forward. `rows` keeps h, in the compute dtype, for backward; `delayed`
keeps relu(h)^2 as it was rounded, twice whose root is the derivative, in half of the bytes.

The layer's factor is in a scale of one operand of each product that it belongs to, or in the alpha of a product in the compute
dtype. `rows`: in those of relu(h)^2 and dy, and in the product for down's gradient. `delayed`: in that of relu(h)^2, which takes
it into the output and down's gradient, and in that of dh, which takes it into the gradients of x and up.
"""

from typing import Any

import torch
from torch import Tensor

from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.product import filled, first_rows, misfit, product
from dwslm.ops.fp8.rounded import Operand, Rounding, outline, rounded
from dwslm.ops.mlp import fp8_fit, fp8_products
from dwslm.ops.scaled_product import scaled_matmul

PEAKS = ("x", "up", "down", "a", "dy", "dh")
"""What the delayed recipe scales, in the order of its state (`new_peaks(len(PEAKS))`)."""

SETTING = "model.mlp_precision"
X, UP, DOWN, A, DY, DH = range(len(PEAKS))


def rows_forward(x: Tensor, up: Tensor, down: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Output [T, width] and h [T, hidden] with a scale per row."""
    h = product(*quantize.rows(x, False), *quantize.rows(up, False), x.dtype, True)
    return product(*quantize.rows(h, True, factor), *quantize.rows(down, False), x.dtype, True), h


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, up: Tensor, down: Tensor, factor: float) -> Tensor:  # type: ignore[no-untyped-def]
        y, h = rows_forward(x, up, down, factor)
        ctx.factor = factor
        ctx.save_for_backward(x, h, up, down)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, h, up, down = ctx.saved_tensors
        dy = dy.contiguous()
        da = product(*quantize.rows(dy, False, ctx.factor), *quantize.rows_transposed(down), x.dtype, True)
        dh, a, *dh_rows = quantize.rows_gradient(da, h)
        dx = product(*dh_rows, *quantize.rows_transposed(up), x.dtype, True)
        return dx, dh.t() @ x, scaled_matmul(dy.t(), a, ctx.factor), None


def _squared_up(
    x8: Tensor, x_scale: Tensor, up8: Tensor, up_scale: Tensor, dtype: torch.dtype, peaks: Tensor, fused: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """relu(x up^T)^2 as `quantize.both` gives it."""
    if fused:
        return fp8_products.squared_relu_up(x8, x_scale, up8, up_scale, peaks, A)
    return quantize.both(product(x8, x_scale, up8, up_scale, dtype, True), None, True, peaks, A)


def _down_gradient(
    dy8: Tensor,
    dy_scale: Tensor,
    down8_t: Tensor,
    down_scale: Tensor,
    dtype: torch.dtype,
    a8: Tensor,
    a_scale: Tensor,
    peaks: Tensor,
    factor: float,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dy down) * 2 sqrt(a) as `quantize.both` gives it, its scale times `factor`."""
    if fused:
        return fp8_products.squared_relu_down_gradient(
            dy8, dy_scale, down8_t, down_scale, a8, a_scale, peaks, DH, factor
        )
    da = product(dy8, dy_scale, down8_t, down_scale, dtype, True)
    return quantize.both(da, a8, False, peaks, DH, factor, a_scale)


class Delayed(torch.autograd.Function):
    """Fields of `Rounded`, both weights, peaks, the factor, and whether the two products whose results are rounded at once round
    for themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        path: Tensor,
        x8: Tensor,
        x8_t: Tensor,
        x_scale: Tensor,
        x_seen: Tensor,
        up: Tensor,
        down: Tensor,
        peaks: Tensor,
        factor: float,
        fused: bool,
    ) -> Tensor:
        up8, up8_t, up_scale, up_seen = quantize.both(up, None, False, peaks, UP)
        down8, down8_t, down_scale, down_seen = quantize.both(down, None, False, peaks, DOWN)
        a8, a8_t, a_scale, a_seen = _squared_up(x8, x_scale, up8, up_scale, up.dtype, peaks, fused)
        times_factor = a_scale * factor
        y = product(a8, times_factor, down8, down_scale, up.dtype, True)
        scales, seen = (x_scale, up_scale, down_scale, a_scale, times_factor), (x_seen, up_seen, down_seen, a_seen)
        ctx.save_for_backward(x8_t, up8_t, down8_t, a8, a8_t, peaks, *scales, *seen)
        ctx.factor, ctx.fused = factor, fused
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x8_t, up8_t, down8_t, a8, a8_t, peaks, *scales, x_seen, up_seen, down_seen, a_seen = ctx.saved_tensors
        x_scale, up_scale, down_scale, a_scale, times_factor = scales
        dy8, dy8_t, dy_scale, dy_seen = quantize.both(dy.contiguous(), None, False, peaks, DY)
        dh8, dh8_t, dh_scale, dh_seen = _down_gradient(
            dy8, dy_scale, down8_t, down_scale, dy.dtype, a8, a_scale, peaks, ctx.factor, ctx.fused
        )
        # A sum over all tokens of the micro-batch is too long for short registers.
        ddown = product(dy8_t, dy_scale, a8_t, times_factor, dy.dtype, False)
        dup = product(dh8_t, dh_scale, x8_t, x_scale, dy.dtype, False)
        dx = product(dh8, dh_scale, up8_t, up_scale, dy.dtype, True)
        seen = quantize.largest([x_seen, up_seen, down_seen, a_seen, dy_seen, dh_seen])
        return dx, None, None, None, None, dup, ddown, seen, None, None


def rounding(peaks: Tensor) -> Rounding:
    """How `fp8_delayed_mlp` wants its input."""
    return Rounding(peaks, X, 1.0)


def check(x: Tensor, up: Tensor) -> None:
    """Raises ValueError where `misfit` has a reason; x [T, width], up [hidden, width]."""
    if reason := misfit(SETTING, x.device, x.dtype, *up.shape):
        raise ValueError(reason)


def fp8_mlp(x: Tensor, up: Tensor, down: Tensor, factor: float) -> Tensor:
    """`squared_relu_mlp` with one scale per row."""
    check(x, up)
    y: Tensor = Rows.apply(filled(x.contiguous()), up, down, factor)
    return first_rows(y, len(x))


def fp8_delayed_mlp(x: Operand, up: Tensor, down: Tensor, peaks: Tensor | None, factor: float, engine: str) -> Tensor:
    """`squared_relu_mlp` with delayed scales. Without gradients it takes one scale per row instead.

    A score must not move the state of training, nor depend on it or on what else is in the batch.
    """
    like = outline(x)
    check(like, up)
    if torch.is_grad_enabled():
        if peaks is None:
            raise ValueError(
                "MLP precision 'fp8_delayed' keeps the peaks of its tensors: give it `new_peaks(len(PEAKS))`"
            )
        made = rounded(x, rounding(peaks))
        fused = fp8_fit.resolve(engine, up.device, len(made.values), *up.shape[::-1]) == "fused"
        y: Tensor = Delayed.apply(*made, up, down, peaks, factor, fused)
    else:
        assert isinstance(x, Tensor), "what is rounded with a delayed scale is for training"
        y = rows_forward(filled(x.contiguous()), up, down, factor)[0]
    return first_rows(y, len(like))
