"""A tensor that comes rounded to a product in float8_e4m3 with delayed scales, whoever rounds it: the product itself, or the
kernel that computes it, which then keeps it off the memory in the compute dtype.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.product import filled


class Rounding(NamedTuple):
    """How a product wants its input.

    Attributes:
        peaks: the state of delayed scales that the product goes by; `which` of them is the input's.
        factor: what the scale is given times.
    """

    peaks: Tensor
    which: int
    factor: float


class Rounded(NamedTuple):
    """What `quantize.both` gives of a tensor x, [T, k], and the way that x's gradient takes.

    Attributes:
        path: stands for x where gradients are concerned: of its shape and dtype, one NaN in memory, never read. Whoever made
            the others finds x's gradient in its own.
    """

    path: Tensor
    values: Tensor
    transposed: Tensor
    scale: Tensor
    seen: Tensor


Operand = Tensor | Rounded
"""Input of a product that may come rounded."""


def outline(x: Operand) -> Tensor:
    """Of x's shape, dtype and device; of its values only where these do not come rounded."""
    return x.path if isinstance(x, Rounded) else x


def hand_on(ctx: Any, x: Tensor, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The fields of `Rounded` as results of an autograd function: the first alone has a gradient. made: the others."""
    ctx.mark_non_differentiable(*made)
    return x.new_full((), torch.nan).expand(x.shape), *made


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peaks: Tensor, index: int, factor: float) -> tuple[Tensor, ...]:
        return hand_on(ctx, x, quantize.both(x, None, False, peaks, index, factor))

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        return dx, None, None, None


def rounded(x: Operand, how: Rounding) -> Rounded:
    """x [T, k] as `how` says, with zeros up to a multiple of 16 tokens; what comes rounded as it is."""
    return x if isinstance(x, Rounded) else Rounded(*Round.apply(filled(x.contiguous()), *how))
