"""`gated_norm` as one Triton kernel forward and one backward, each reading and writing every value once.

A program has one head and a span of tokens, so that a row is summed inside a warp. Backward computes norm and gate again, keeps
the sums for gain and bias in registers, element by element, and adds up its tokens once at its end; the spans' sums are added
afterwards, in a fixed order. Nothing is added atomically.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.column_sums import add_pairs, column_sums

TILE = 2048  # values that a program has at a time
SPAN = 512  # tokens of a program backward
WARPS = 4
PER_LN2 = tl.constexpr(-1.4426950408889634)  # exp(-u) = exp2(u * this), and exp2 is one instruction


@triton.jit
def _sigmoid(u):
    root = tl.math.rsqrt(1.0 + tl.math.exp2(u * PER_LN2))  # no division
    return root * root


@triton.jit
def _forward_kernel(o, gate, gain, bias, y, total, heads, eps, HEAD: tl.constexpr, TOKENS: tl.constexpr):
    # Heads go fastest: programs that run together then read whole rows.
    head, start = tl.program_id(0), tl.program_id(1).to(tl.int64) * TOKENS
    t, c, row = tl.arange(0, TOKENS), tl.arange(0, HEAD), heads * HEAD
    there = (t < total - start)[:, None]
    at = start * row + head * HEAD
    offsets = t[:, None] * row + c[None, :]
    x = tl.load(o + at + offsets, mask=there, other=0.0).to(tl.float32)
    z = tl.load(gate + at + offsets, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(gain + c)[None, :] * _sigmoid(z + tl.load(bias + head * HEAD + c)[None, :])
    inverse = tl.math.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)[:, None]
    tl.store(y + at + offsets, (x * inverse * scale).to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward_kernel(
    dy, o, gate, gain, bias, do, dgate, bias_sums, gain_sums, total, heads, eps,
    HEAD: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """bias_sums [spans, heads * HEAD]; gain_sums [spans * heads, HEAD]."""
    head, span = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = span * SPAN
    t, c, row = tl.arange(0, TOKENS), tl.arange(0, HEAD), heads * HEAD
    at = start * row + head * HEAD
    own_gain, own_bias = tl.load(gain + c)[None, :], tl.load(bias + head * HEAD + c)[None, :]
    bias_sum, gain_sum = tl.zeros((TOKENS, HEAD), tl.float32), tl.zeros((TOKENS, HEAD), tl.float32)
    for i in range(0, SPAN, TOKENS):
        there = (t < total - start - i)[:, None]
        offsets = (i + t)[:, None] * row + c[None, :]
        x = tl.load(o + at + offsets, mask=there, other=0.0).to(tl.float32)
        z = tl.load(gate + at + offsets, mask=there, other=0.0).to(tl.float32)
        d = tl.load(dy + at + offsets, mask=there, other=0.0).to(tl.float32)
        s = _sigmoid(z + own_bias)
        d *= s
        inner = tl.sum(d * own_gain * x, axis=1)  # beside the next sum, not after it: neither waits
        inverse = tl.math.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)
        share = (inner * inverse * inverse / HEAD)[:, None]
        inverse = inverse[:, None]
        tl.store(do + at + offsets, (inverse * (d * own_gain - x * share)).to(do.dtype.element_ty), mask=there)
        d *= x * inverse
        gain_sum += d
        d *= own_gain * (1.0 - s)
        tl.store(dgate + at + offsets, d.to(dgate.dtype.element_ty), mask=there)
        bias_sum += d
    bias_sum, gain_sum = tl.reduce((bias_sum, gain_sum), 0, add_pairs)
    own = span * row + head * HEAD + c
    tl.store(bias_sums + own, bias_sum)
    tl.store(gain_sums + own, gain_sum)


def gated_norm_fused(o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `gated_norm`."""
    return _forward(o.contiguous(), gate.contiguous(), gain, bias, eps)


def _tile(head: int) -> dict[str, int]:
    return {"HEAD": head, "TOKENS": TILE // head, "num_warps": WARPS}


@torch.library.custom_op("dwslm::gated_norm", mutates_args=())
def _forward(o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = _forward_shapes(o, gate, gain, bias, eps)
    total, heads, head = o.shape
    tile = _tile(head)
    _forward_kernel[heads, triton.cdiv(total, tile["TOKENS"])](o, gate, gain, bias, y, total, heads, eps, **tile)
    return y


@_forward.register_fake
def _forward_shapes(o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    return o.new_empty(gate.shape)


@torch.library.custom_op("dwslm::gated_norm_backward", mutates_args=())
def _backward(
    dy: Tensor, o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """do, dgate, and the gradients of the bias and the gain side by side, float32 [heads * head_dim + head_dim]."""
    do, dgate, _ = _backward_shapes(dy, o, gate, gain, bias, eps)
    total, heads, head = o.shape
    spans = triton.cdiv(total, SPAN)
    bias_sums, gain_sums = gain.new_empty(spans, heads * head), gain.new_empty(spans * heads, head)
    _backward_kernel[heads, spans](
        dy, o, gate, gain, bias, do, dgate, bias_sums, gain_sums, total, heads, eps, SPAN=SPAN, **_tile(head)
    )
    return do, dgate, column_sums(bias_sums, gain_sums)


@_backward.register_fake
def _backward_shapes(
    dy: Tensor, o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return o.new_empty(o.shape), gate.new_empty(gate.shape), gain.new_empty(bias.shape[0] + gain.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    o, gate, gain, bias = ctx.saved_tensors
    do, dgate, sums = _backward(dy.contiguous(), o, gate, gain, bias, ctx.eps)
    channels = bias.shape[0]
    return do, dgate, sums[channels:], sums[:channels], None


_forward.register_autograd(_differentiate, setup_context=_save)
