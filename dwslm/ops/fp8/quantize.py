"""Rounding to float8_e4m3, in the layouts and with the scales that products want: those of linear maps, and those of the MLP.

The value that is rounded is one of three, in float32 and never rounded before: x itself; relu(x)^2 (`square`); or the gradient of
relu(h)^2 for an output gradient x: x * 2 relu(h) where h is at hand, x * 2 sqrt(a) where its rounded square a is. On a GPU each
operator is a Triton kernel that reads its input once; elsewhere it is the formula below, to the same bits but for the root's. To
the compiler they are operators without insides.
"""

import torch
from torch import Tensor

from dwslm.ops.fp8 import shapes
from dwslm.ops.fp8.formats import FP8, FP8_MAX, MARGIN, TINY


def value(x: Tensor, h: Tensor | None = None, square: bool = False) -> Tensor:
    """What is rounded, float32."""
    if square:
        return x.float().clamp(min=0).square()
    return x.float() if h is None else x.float() * (2 * h.float().clamp(min=0))


@torch.library.custom_op("dwslm::fp8_rows", mutates_args=())
def rows(x: Tensor, square: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """[n, k] to float8 [n, k] and float32 scales [n, 1], each row's peak at the format's largest value.

    The scales are given back times `factor`: values times scales are factor * [n, k].
    """
    if x.is_cuda:
        from dwslm.ops.fp8 import kernels  # Triton is there on GPU machines only

        return kernels.rows(x, square, factor)
    rounded, scale = _by_rows(value(x, square=square))
    return rounded, scale * factor


@torch.library.custom_op("dwslm::fp8_rows_transposed", mutates_args=())
def rows_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` of x^T for x [n, k]: float8 [k, n] and float32 scales [k, 1]."""
    if x.is_cuda:
        from dwslm.ops.fp8 import kernels

        return kernels.rows_transposed(x)
    return _by_rows(x.t().contiguous().float())


@torch.library.custom_op("dwslm::fp8_rows_gradient", mutates_args=())
def rows_gradient(da: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of a = relu(h)^2 in one pass over da and h [n, k]: dh and a in h's dtype, and dh's `rows`."""
    if h.is_cuda:
        from dwslm.ops.fp8 import kernels

        return kernels.rows_gradient(da, h)
    dh = value(da, h)
    return dh.to(h.dtype), value(h, square=True).to(h.dtype), *_by_rows(dh)


@torch.library.custom_op("dwslm::fp8_both", mutates_args=())
def both(
    x: Tensor,
    a: Tensor | None,
    square: bool,
    peaks: Tensor,
    index: int,
    factor: float = 1.0,
    a_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[n, k] rounded with one scale, as it is and transposed, in one pass; n a multiple of 4.

    What is rounded is x; or relu(x)^2 where `square`; or x times 2 sqrt(a a_scale), the derivative at a square that was
    rounded to float8 `a` [n, k] with scale `a_scale` [1, 1].

    The scale makes room for 1.5 times `peaks[index]`, or where that is 0 times the peak of the tensor at hand. What is beyond it
    saturates; what is not finite becomes NaN.

    Returns:
        float8 [n, k], float8 [k, n], float32 [1, 1]: the scale times `factor`, and float32 [tiles]: each tile's largest magnitude
        before rounding.
    """
    if x.is_cuda:
        from dwslm.ops.fp8 import kernels

        return kernels.both(x, a, square, peaks, index, factor, a_scale)
    full = value(x, square=square)
    if a is not None and a_scale is not None:
        full = full * (2 * (a.float() * a_scale).sqrt())
    peak = full.abs().amax()
    scale = torch.where(peaks[index] > 0, peaks[index], peak).clamp(min=TINY).view(1, 1) * (MARGIN / FP8_MAX)
    scaled = (full * scale.reciprocal()).where(full.isfinite(), torch.nan)
    rounded = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return rounded, rounded.t().contiguous(), scale * factor, peak.view(1)


@torch.library.custom_op("dwslm::fp8_peaks", mutates_args=())
def largest(tiles: list[Tensor]) -> Tensor:
    """The largest of each list of peaks, float32 [len(tiles)]."""
    if tiles[0].is_cuda:
        from dwslm.ops.fp8 import kernels

        return kernels.largest(tiles)
    return torch.stack([peaks.amax() for peaks in tiles])


def _by_rows(full: Tensor) -> tuple[Tensor, Tensor]:
    scale = full.abs().amax(dim=1, keepdim=True).clamp(min=TINY) * (1 / FP8_MAX)
    return (full * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


rows.register_fake(shapes.rows)
rows_transposed.register_fake(shapes.rows_transposed)
rows_gradient.register_fake(shapes.rows_gradient)
both.register_fake(shapes.both)
largest.register_fake(shapes.largest)
