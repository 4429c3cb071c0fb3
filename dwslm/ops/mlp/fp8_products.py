"""The delayed recipe's products that round what they give. On a GPU each is one kernel (`fp8_fused`), for what
`fp8_fit` has nothing against; elsewhere it is the formula. To the compiler they are operators without insides."""

import torch
from torch import Tensor

from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.product import product
from dwslm.ops.mlp import fp8_fit


@torch.library.custom_op("dwslm::fp8_squared_relu_up", mutates_args=())
def squared_relu_up(
    x: Tensor, x_scale: Tensor, up: Tensor, up_scale: Tensor, peaks: Tensor, index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """relu(x up^T)^2 of x [T, width] and up [hidden, width], float8 with scales [1, 1], as `quantize.both` rounds it.

    Returns:
        float8 [T, hidden], float8 [hidden, T], the scale [1, 1], and magnitudes before rounding: the largest is the peak.
    """
    if x.is_cuda:
        from dwslm.ops.mlp import fp8_fused  # Triton is there on GPU machines only

        return fp8_fused.launch(x, x_scale, up, up_scale, None, None, peaks, index, 1.0)
    return quantize.both(product(x, x_scale, up, up_scale, torch.float32, True), None, True, peaks, index)


@torch.library.custom_op("dwslm::fp8_squared_relu_down_gradient", mutates_args=())
def squared_relu_down_gradient(
    dy: Tensor,
    dy_scale: Tensor,
    down_t: Tensor,
    down_scale: Tensor,
    a: Tensor,
    a_scale: Tensor,
    peaks: Tensor,
    index: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dy down) * 2 sqrt(a) of dy [T, width], down's transpose [hidden, width] and a [T, hidden], float8 with scales [1, 1].

    Returns:
        As `squared_relu_up`, the scale times `factor`.
    """
    if dy.is_cuda:
        from dwslm.ops.mlp import fp8_fused

        return fp8_fused.launch(dy, dy_scale, down_t, down_scale, a, a_scale, peaks, index, factor)
    da = product(dy, dy_scale, down_t, down_scale, torch.float32, True)
    return quantize.both(da, a, False, peaks, index, factor, a_scale)


@squared_relu_up.register_fake
def _(
    x: Tensor, x_scale: Tensor, up: Tensor, up_scale: Tensor, peaks: Tensor, index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fp8_fit.empty(x, up)


@squared_relu_down_gradient.register_fake
def _(
    dy: Tensor,
    dy_scale: Tensor,
    down_t: Tensor,
    down_scale: Tensor,
    a: Tensor,
    a_scale: Tensor,
    peaks: Tensor,
    index: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fp8_fit.empty(dy, down_t)
