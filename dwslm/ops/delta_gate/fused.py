"""`delta_gate` as one Triton kernel forward and one backward, each reading and writing every value once.

A program has one head and a span of tokens. Backward keeps its sums for `dt_bias` and `A_log` in registers, element by element,
and adds up its tokens once at its end; the spans' sums are added afterwards, in a fixed order. Nothing is added atomically.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # values that a program has at a time
SPAN = 256  # tokens of a program backward: 2 MB of sums for 65,536 tokens and 8 heads of 128, beside 540 MB
WARPS = 8
PER_LN2 = tl.constexpr(-1.4426950408889634)  # exp(-u) = exp2(u * this), and exp2 is one instruction


@triton.jit
def _sigmoid(u):
    # No division, and no hardware tanh: a gate that is nearly shut decays by its last digits.
    root = tl.math.rsqrt(1.0 + tl.math.exp2(u * PER_LN2))
    return root * root


@triton.jit
def _forward_kernel(
    f, a_log, dt_bias, logits, g, beta, total, heads, logits_row, bound, HEAD: tl.constexpr, TOKENS: tl.constexpr
):
    # Heads go fastest: programs that run together then read whole rows.
    head, start = tl.program_id(0), tl.program_id(1).to(tl.int64) * TOKENS
    t, c, row = tl.arange(0, TOKENS), tl.arange(0, HEAD), heads * HEAD
    there = t < total - start
    at = start * row + head * HEAD
    offsets = t[:, None] * row + c[None, :]
    bias = tl.load(dt_bias + head * HEAD + c)[None, :]
    rate = tl.exp(tl.load(a_log + head))
    x = tl.load(f + at + offsets, mask=there[:, None], other=0.0).to(tl.float32)
    tl.store(g + at + offsets, bound * _sigmoid(rate * (x + bias)), mask=there[:, None])
    z = tl.load(logits + (start + t) * logits_row + head, mask=there, other=0.0).to(tl.float32)
    tl.store(beta + (start + t) * heads + head, _sigmoid(z), mask=there)


@triton.jit
def _backward_kernel(
    dg, dbeta, f, a_log, dt_bias, logits, df, dlogits, sums, total, heads, logits_row, bound,
    HEAD: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """sums [spans, heads * HEAD + heads]: of dt_bias, then of A_log."""
    head, span = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = span * SPAN
    t, c, row = tl.arange(0, TOKENS), tl.arange(0, HEAD), heads * HEAD
    at = start * row + head * HEAD
    bias = tl.load(dt_bias + head * HEAD + c)[None, :]
    rate = tl.exp(tl.load(a_log + head))
    bias_sum, rate_sum = tl.zeros((TOKENS, HEAD), tl.float32), tl.zeros((TOKENS, HEAD), tl.float32)
    for i in range(0, SPAN, TOKENS):
        there = (t < total - start - i)[:, None]
        offsets = (i + t)[:, None] * row + c[None, :]
        x = tl.load(f + at + offsets, mask=there, other=0.0).to(tl.float32) + bias
        upstream = tl.load(dg + at + offsets, mask=there, other=0.0)
        s = _sigmoid(rate * x)
        d = (bound * rate) * upstream * (s * (1.0 - s))
        tl.store(df + at + offsets, d.to(df.dtype.element_ty), mask=there)
        bias_sum += d
        rate_sum += d * x
    sums += span * (row + heads)
    tl.store(sums + head * HEAD + c, tl.sum(bias_sum, axis=0))
    tl.store(sums + row + head, tl.sum(tl.sum(rate_sum, axis=0), axis=0))
    t = tl.arange(0, SPAN)
    there = t < total - start
    b = _sigmoid(tl.load(logits + (start + t) * logits_row + head, mask=there, other=0.0).to(tl.float32))
    upstream = tl.load(dbeta + (start + t) * heads + head, mask=there, other=0.0)
    d = upstream * (b * (1.0 - b))
    tl.store(dlogits + (start + t) * heads + head, d.to(dlogits.dtype.element_ty), mask=there)


def delta_gate_fused(f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """See `delta_gate`."""
    return _forward(f.contiguous(), a_log, dt_bias, logits, bound)


def _tile(f: Tensor, a_log: Tensor) -> dict[str, int]:
    head = f.shape[1] // len(a_log)
    return {"HEAD": head, "TOKENS": TILE // head, "num_warps": WARPS}


@torch.library.custom_op("dwslm::delta_gate", mutates_args=())
def _forward(f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    g, beta = _forward_shapes(f, a_log, dt_bias, logits, bound)
    total, heads, tile = len(f), len(a_log), _tile(f, a_log)
    _forward_kernel[heads, triton.cdiv(total, tile["TOKENS"])](
        f, a_log, dt_bias, logits, g, beta, total, heads, logits.stride(0), bound, **tile
    )
    return g, beta


@_forward.register_fake
def _forward_shapes(f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    heads = a_log.shape[0]
    return a_log.new_empty(f.shape[0], heads, f.shape[1] // heads), a_log.new_empty(f.shape[0], heads)


@torch.library.custom_op("dwslm::delta_gate_backward", mutates_args=())
def _backward(
    dg: Tensor, dbeta: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """df, dlogits, and the gradients of dt_bias and a_log side by side."""
    df, dlogits, _ = _backward_shapes(dg, dbeta, f, a_log, dt_bias, logits, bound)
    total, heads = len(f), len(a_log)
    spans = triton.cdiv(total, SPAN)
    sums = a_log.new_empty(spans, len(dt_bias) + heads)
    _backward_kernel[heads, spans](
        dg, dbeta, f, a_log, dt_bias, logits, df, dlogits, sums, total, heads, logits.stride(0), bound,
        SPAN=SPAN, **_tile(f, a_log),
    )  # fmt: skip
    return df, dlogits, sums.sum(0)


@_backward.register_fake
def _backward_shapes(
    dg: Tensor, dbeta: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    sums = a_log.new_empty(dt_bias.shape[0] + a_log.shape[0])
    return f.new_empty(f.shape), logits.new_empty(logits.shape), sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bound = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
    f, a_log, dt_bias, logits = ctx.saved_tensors
    df, dlogits, sums = _backward(dg.contiguous(), dbeta.contiguous(), f, a_log, dt_bias, logits, ctx.bound)
    channels = dt_bias.shape[0]
    return df, sums[channels:], sums[:channels], dlogits, None


_forward.register_autograd(_differentiate, setup_context=_save)
