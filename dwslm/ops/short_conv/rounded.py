"""A linear map in FP8 before `short_conv`: the convolution's backward pass rounds its gradient, which the map wants in float8.

Per token and column 1 byte out of the convolution, and 2 through a kernel that transposes it; apart 2, and 4 through one that
rounds. At 65,536 tokens and 3,344 columns 657 MB less. A scale that is not known yet asks for the convolution's pass twice.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from dwslm.ops.fp8 import Operand, Rounded, outline, rounding
from dwslm.ops.fp8.formats import FP8
from dwslm.ops.fp8.kernels import FIRST_SCALE_BLOCK, _fp8_scale_of_peaks_kernel, transpose
from dwslm.ops.fp8.linear import DY, check, differentiate, multiply
from dwslm.ops.fp8.rounded import rounded
from dwslm.ops.segments import Segments
from dwslm.ops.short_conv.fused import REGISTERS, SPAN, _backward_kernel, _forward, _launch


@torch.library.custom_op("dwslm::short_conv_backward_rounded", mutates_args=())
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    drest: Tensor,
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    heads: int,
    peaks: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of x's gradient what `quantize.both` gives, and the gradient of the taps. Peaks are those of the map."""
    q, q_t, scale, seen, _ = _shapes(dq, dk, dv, drest, x, weight, positions, heads, peaks)
    inverse = torch.empty_like(scale)
    grid, constants = _launch(x, weight, heads, dq, dk, dv)
    constants |= {"DX_ROW": q.stride(0), "maxnreg": REGISTERS}
    dw = weight.new_empty(grid[1], weight.shape[1], weight.shape[0])
    given = dq, dk, dv, drest, x, weight, positions, q, dw, peaks[DY:], inverse, seen, len(x)
    _backward_kernel[grid](*given, AS="nothing", **constants)
    _fp8_scale_of_peaks_kernel[(1,)](
        peaks, seen, scale, inverse, len(seen), INDEX=DY, BLOCK=FIRST_SCALE_BLOCK, num_warps=32
    )
    _backward_kernel[grid](*given, AS="float8", **constants)
    transpose(q, q_t)
    return q, q_t, scale, seen, dw.sum(0).T.contiguous()


@_backward.register_fake
def _shapes(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    drest: Tensor,
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    heads: int,
    peaks: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    programs = (3 * heads + (x.shape[1] > len(weight))) * triton.cdiv(len(x), SPAN)
    q, q_t = x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape[::-1], dtype=FP8)
    return q, q_t, peaks.new_empty(1, 1), peaks.new_empty(programs), torch.empty_like(weight)


class ProjectedConv(torch.autograd.Function):
    """Fields of `Rounded`, the map's weight and peaks; taps, positions and heads of the convolution."""

    @staticmethod
    def forward(
        ctx: Any,
        path: Tensor,
        x8: Tensor,
        x8_t: Tensor,
        x_scale: Tensor,
        x_seen: Tensor,
        projection: Tensor,
        peaks: Tensor,
        weight: Tensor,
        positions: Tensor,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, kept = multiply(Rounded(path, x8, x8_t, x_scale, x_seen), projection, peaks, 1.0)
        ctx.save_for_backward(peaks, y, weight, positions, *kept)
        ctx.rows, ctx.heads = len(projection), heads
        return _forward(y, weight, positions, heads)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
        peaks, y, weight, positions, *kept = ctx.saved_tensors
        *dy, dweight = _backward(*(t.contiguous() for t in d), y, weight, positions, ctx.heads, peaks)
        dx, dprojection, seen = differentiate(kept, dy, ctx.rows, y.dtype)
        return dx, None, None, None, None, dprojection, seen, dweight, None, None


def projected_short_conv_fused(
    x: Operand, projection: Tensor, peaks: Tensor, weight: Tensor, segments: Segments, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `projected_short_conv`, with gradients."""
    check(outline(x))
    y: tuple[Tensor, Tensor, Tensor, Tensor] = ProjectedConv.apply(
        *rounded(x, rounding(peaks, 1.0)), projection, peaks, weight, segments.positions, heads
    )
    return y
