"""`delta_gate` as one Triton kernel forward and one backward, each reading and writing every value once.

A program has one head and a span of tokens. It asks for several tiles before it writes any: no read may pass a write that could
be to the same place, and a tile alone does not fill the memory's latency. Four values of a thread are 16 bytes of float32, the
wider side; both sides keep that layout, so nothing goes through shared memory.

Backward keeps its sums for `dt_bias` and `A_log` in registers, element by element, and adds up its tokens once at its end; the
spans' sums are added afterwards, in a fixed order. Nothing is added atomically.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.column_sums import add_pairs, column_sums

WARPS = 8
TILE = 4 * 32 * WARPS  # values: four of a thread
TILES = 4  # that are asked for together
# Tokens of a program backward: whole turns of TILES for heads of 16 and more. 1 MB of sums for 65,536 tokens and 8 heads of 128,
# beside 537 MB.
SPAN = 256
PER_LN2 = tl.constexpr(-1.4426950408889634)  # exp(-u) = exp2(u * this), and exp2 is one instruction


@triton.jit
def _sigmoid(t):
    """Of u, from t = PER_LN2 u. No division, and no hardware tanh: a gate that is nearly shut decays by its last digits."""
    root = tl.math.rsqrt(1.0 + tl.math.exp2(t))
    return root * root


@triton.jit
def _forward_kernel(
    f, a_log, dt_bias, logits, g, beta, total, heads, logits_row, bound,
    HEAD: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # Heads go fastest: programs that run together then read whole rows.
    head, start = tl.program_id(0), tl.program_id(1) * (TOKENS * TILES)
    left, row, start = total - start, heads * HEAD, start.to(tl.int64)
    t, c, own = tl.arange(0, TOKENS), tl.arange(0, HEAD), tl.arange(0, TOKENS * TILES)
    f += start * row + head * HEAD
    g += start * row + head * HEAD
    offsets = t[:, None] * row + c[None, :]
    z = tl.load(logits + (start + own) * logits_row + head, mask=own < left, other=0.0)
    tiles = ()  # type: Any
    for i in tl.static_range(TILES):
        there = (i * TOKENS + t < left)[:, None]
        tiles = tiles + (tl.load(f + (i * TOKENS * row + offsets), mask=there, other=0.0),)
    rate = PER_LN2 * tl.exp(tl.load(a_log + head))
    shift = (rate * tl.load(dt_bias + head * HEAD + c))[None, :]
    for i in tl.static_range(TILES):
        y = bound * _sigmoid(rate * tiles[i].to(tl.float32) + shift)
        tl.store(g + (i * TOKENS * row + offsets), y.to(g.dtype.element_ty), mask=(i * TOKENS + t < left)[:, None])
    tl.store(beta + (start + own) * heads + head, _sigmoid(PER_LN2 * z.to(tl.float32)), mask=own < left)


@triton.jit
def _backward_kernel(
    dg, dbeta, f, a_log, dt_bias, logits, df, dlogits, bias_sums, rate_sums, total, heads, logits_row, bound,
    HEAD: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """bias_sums [spans, heads * HEAD], of dt_bias; rate_sums [spans, heads], of A_log."""
    head, span, row = tl.program_id(0), tl.program_id(1), heads * HEAD
    left, start = total - span * SPAN, span.to(tl.int64) * SPAN
    t, c, own = tl.arange(0, TOKENS), tl.arange(0, HEAD), tl.arange(0, SPAN)
    f += start * row + head * HEAD
    dg += start * row + head * HEAD
    df += start * row + head * HEAD
    offsets = t[:, None] * row + c[None, :]
    z = tl.load(logits + (start + own) * logits_row + head, mask=own < left, other=0.0)
    dz = tl.load(dbeta + (start + own) * heads + head, mask=own < left, other=0.0)
    bias = tl.load(dt_bias + head * HEAD + c)
    slope = tl.exp(tl.load(a_log + head))
    rate = PER_LN2 * slope
    slope *= bound
    shift = (rate * bias)[None, :]
    bias_sum, rate_sum = tl.zeros((TOKENS, HEAD), tl.float32), tl.zeros((TOKENS, HEAD), tl.float32)
    for i in range(0, SPAN, TOKENS * TILES):
        inputs = ()  # type: Any
        upstream = ()  # type: Any
        for j in tl.static_range(TILES):
            there, place = (i + j * TOKENS + t < left)[:, None], (i + j * TOKENS) * row + offsets
            inputs = inputs + (tl.load(f + place, mask=there, other=0.0),)
            upstream = upstream + (tl.load(dg + place, mask=there, other=0.0),)
        for j in tl.static_range(TILES):
            x = inputs[j].to(tl.float32)
            s = _sigmoid(rate * x + shift)
            d = slope * upstream[j].to(tl.float32) * (s - s * s)
            there, place = (i + j * TOKENS + t < left)[:, None], (i + j * TOKENS) * row + offsets
            tl.store(df + place, d.to(df.dtype.element_ty), mask=there)
            bias_sum += d
            rate_sum += d * x  # and the bias's share at the end
    bias_sum, rate_sum = tl.reduce((bias_sum, rate_sum), 0, add_pairs)
    tl.store(bias_sums + span * row + head * HEAD + c, bias_sum)
    tl.store(rate_sums + span * heads + head, tl.sum(rate_sum + bias * bias_sum, axis=0))
    b = _sigmoid(PER_LN2 * z.to(tl.float32))
    tl.store(dlogits + (start + own) * heads + head, (dz * (b - b * b)).to(dlogits.dtype.element_ty), mask=own < left)


def delta_gate_fused(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `delta_gate`."""
    return _forward(f.contiguous(), a_log, dt_bias, logits, bound, dtype)


def _tile(f: Tensor, a_log: Tensor) -> dict[str, int]:
    head = f.shape[1] // len(a_log)
    return {"HEAD": head, "TOKENS": TILE // head, "TILES": TILES, "num_warps": WARPS}


@torch.library.custom_op("dwslm::delta_gate", mutates_args=())
def _forward(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    g, beta = _forward_shapes(f, a_log, dt_bias, logits, bound, dtype)
    total, heads, tile = len(f), len(a_log), _tile(f, a_log)
    _forward_kernel[heads, triton.cdiv(total, TILES * tile["TOKENS"])](
        f, a_log, dt_bias, logits, g, beta, total, heads, logits.stride(0), bound, **tile
    )
    return g, beta


@_forward.register_fake
def _forward_shapes(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    heads = a_log.shape[0]
    return a_log.new_empty(f.shape[0], heads, f.shape[1] // heads, dtype=dtype), a_log.new_empty(f.shape[0], heads)


@torch.library.custom_op("dwslm::delta_gate_backward", mutates_args=())
def _backward(
    dg: Tensor, dbeta: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """df, dlogits, and the gradients of dt_bias and a_log side by side."""
    df, dlogits, _ = _backward_shapes(dg, dbeta, f, a_log, dt_bias, logits, bound)
    total, heads = len(f), len(a_log)
    tile = _tile(f, a_log)
    spans = triton.cdiv(total, SPAN)
    bias_sums, rate_sums = a_log.new_empty(spans, len(dt_bias)), a_log.new_empty(spans, heads)
    _backward_kernel[heads, spans](
        dg, dbeta, f, a_log, dt_bias, logits, df, dlogits, bias_sums, rate_sums, total, heads, logits.stride(0), bound,
        SPAN=SPAN, **tile,
    )  # fmt: skip
    return df, dlogits, column_sums(bias_sums, rate_sums)


@_backward.register_fake
def _backward_shapes(
    dg: Tensor, dbeta: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    sums = a_log.new_empty(dt_bias.shape[0] + a_log.shape[0])
    return f.new_empty(f.shape), logits.new_empty(logits.shape), sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bound, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
    f, a_log, dt_bias, logits = ctx.saved_tensors
    df, dlogits, sums = _backward(dg.contiguous(), dbeta.contiguous(), f, a_log, dt_bias, logits, ctx.bound)
    channels = dt_bias.shape[0]
    return df, sums[channels:], sums[:channels], dlogits, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
