"""`gated_norm` before a product in FP8 with delayed scales: the gated output is rounded where it is computed.

One Triton kernel reads o and gate and writes float8 as it is and transposed, 6 bytes a value and 402 MB of 65,536 tokens by 1,024
channels; apart, what is gated is written and read once more, 670 MB. It is rounded once, out of float32. A program has one head's
tokens, so its tile is one that `fp8_both` would have. Backward is that of both, one after the other; neither wants what was
gated.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.fp8 import shapes
from dwslm.ops.fp8.kernels import BOTH_WARPS, DELAYED_TO_SCALE, TINY, _load_rows, _round_four_rows, _scaled
from dwslm.ops.fp8.rounded import Rounded, Rounding, hand_on
from dwslm.ops.gated_norm.fused import _backward, _sigmoid

TOKENS = 128  # of a program
FIRST_ROWS = 128  # at a time, where the scale is not known yet


@triton.jit
def _gated(o, gate, gain, bias, eps, HEAD: tl.constexpr):
    """Rows of one head, float32."""
    x = o.to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)[:, None]
    return x * inverse * (gain * _sigmoid(gate.to(tl.float32) + bias))


@triton.jit
def _scale_kernel(
    o, gate, gain, bias, seen, scale, inverse, factor, rows, heads, eps,
    INDEX: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As that of `fp8_both`: one program, which goes through the tensor once a run. rows: of all heads."""
    peak = tl.load(seen + INDEX)
    if not (peak > 0.0):
        peaks = tl.zeros([ROWS, HEAD], dtype=tl.float32)
        c = tl.arange(0, HEAD)[None, :]
        for start in range(0, rows, ROWS):
            row = (start + tl.arange(0, ROWS))[:, None]
            at, there = row.to(tl.int64) * HEAD + c, row < rows
            x, z = tl.load(o + at, mask=there, other=0.0), tl.load(gate + at, mask=there, other=0.0)
            own = tl.load(bias + row % heads * HEAD + c)
            peaks = tl.maximum(peaks, tl.abs(_gated(x, z, tl.load(gain + c), own, eps, HEAD)))
        peak = tl.max(tl.max(peaks, axis=1), axis=0)
    one = tl.maximum(peak, TINY) * DELAYED_TO_SCALE
    tl.store(inverse, tl.div_rn(1.0, one))
    tl.store(scale, one * factor)


@triton.jit
def _rounded_kernel(
    o, gate, gain, bias, inverse, q, q_t, seen, rows, columns, words, eps,
    EVEN: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """As `fp8_both`; q_t as int32 [columns, rows / 4]."""
    first_row, first_column = tl.program_id(1).to(tl.int64) * R, tl.program_id(0).to(tl.int64) * HEAD
    four, column = tl.arange(0, R // 4), tl.arange(0, HEAD)
    start, step = first_row * columns + first_column, columns.to(tl.int64)
    at = four[:, None] * (4 * columns) + column[None, :]
    there = first_row + 4 * four < rows
    inside = None if EVEN else there[:, None]
    inside_t = None if EVEN else there[None, :]
    a, b, c, d = _load_rows(o + start, at, step, inside)
    of_a, of_b, of_c, of_d = _load_rows(gate + start, at, step, inside)
    own_gain, own_bias = tl.load(gain + column)[None, :], tl.load(bias + first_column + column)[None, :]
    a, b = _gated(a, of_a, own_gain, own_bias, eps, HEAD), _gated(b, of_b, own_gain, own_bias, eps, HEAD)
    c, d = _gated(c, of_c, own_gain, own_bias, eps, HEAD), _gated(d, of_d, own_gain, own_bias, eps, HEAD)
    size = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    by = tl.load(inverse)
    a, b, c, d, word = _round_four_rows(_scaled(a, by), _scaled(b, by), _scaled(c, by), _scaled(d, by))
    q += start
    tl.store(q + at, a, mask=inside)
    tl.store(q + step + at, b, mask=inside)
    tl.store(q + 2 * step + at, c, mask=inside)
    tl.store(q + 3 * step + at, d, mask=inside)
    at_t = column[:, None] * words + four[None, :]
    tl.store(q_t + first_column * words + first_row // 4 + at_t, tl.trans(word), mask=inside_t)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(seen + tile, tl.max(tl.max(size, axis=1), axis=0))


@torch.library.custom_op("dwslm::gated_norm_rounded", mutates_args=())
def rounded(
    o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float, peaks: Tensor, index: int, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize.both` of `gated_norm`, which it is called as but for a bias that must be there; T a multiple of 4."""
    q, q_t, scale, seen = _shapes(o, gate, gain, bias, eps, peaks, index, factor)
    inverse = torch.empty_like(scale)
    total, heads, head = o.shape
    _scale_kernel[(1,)](
        o, gate, gain, bias, peaks, scale, inverse, factor, total * heads, heads, eps,
        INDEX=index, HEAD=head, ROWS=FIRST_ROWS, num_warps=32,
    )  # fmt: skip
    _rounded_kernel[heads, triton.cdiv(total, TOKENS)](
        o, gate, gain, bias, inverse, q, q_t.view(torch.int32), seen, *gate.shape, total // 4, eps,
        EVEN=total % TOKENS == 0, R=TOKENS, HEAD=head, num_warps=BOTH_WARPS,
    )  # fmt: skip
    return q, q_t, scale, seen


@rounded.register_fake
def _shapes(
    o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float, peaks: Tensor, index: int, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, q_t, scale, _ = shapes.both(gate, None, False, peaks, index, factor)
    return q, q_t, scale, peaks.new_empty(triton.cdiv(o.shape[0], TOKENS) * o.shape[1])


class GatedNormRounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        gate: Tensor,
        gain: Tensor,
        bias: Tensor,
        eps: float,
        peaks: Tensor,
        index: int,
        factor: float,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(o, gate, gain, bias)
        ctx.eps = eps
        return hand_on(ctx, gate, rounded(o, gate, gain, bias, eps, peaks, index, factor))

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        o, gate, gain, bias = ctx.saved_tensors
        do, dgate, sums = _backward(dx.contiguous(), o, gate, gain, bias, ctx.eps)
        channels = bias.shape[0]
        return do, dgate, sums[channels:], sums[:channels], None, None, None, None


def gated_norm_rounded(o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float, how: Rounding) -> Rounded:
    """`gated_norm` as `how` says; T a multiple of 16, with gradients."""
    return Rounded(*GatedNormRounded.apply(o.contiguous(), gate.contiguous(), gain, bias, eps, *how))
