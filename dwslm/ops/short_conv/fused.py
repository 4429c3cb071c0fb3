"""The short convolution with its SiLU as one Triton kernel forward and one backward.

Forward reads x once (its shifts come out of the cache) and writes y. Backward reads x and dy and writes dx; the pre-activation
is computed again instead of kept. The weight's gradient is summed per tile of tokens in registers, and the tiles are added up
in a fixed order afterwards: nothing is added atomically, so the same input gives the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.segments import Segments

TOKENS, CHANNELS = 64, 64  # a program's tile


@triton.jit
def _pre_activation(x, weight, positions, t, c, keep_t, keep_c, row, WIDTH: tl.constexpr):
    """sum_j weight[c, WIDTH - 1 - j] x[t - j, c] over taps inside t's segment, float32 [tokens, channels]."""
    position = tl.load(positions + t, mask=keep_t, other=-1)
    z = tl.zeros((t.shape[0], c.shape[0]), dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        inside = (keep_t & (position >= j))[:, None] & keep_c[None, :]
        tap = tl.load(x + (t - j)[:, None] * row + c[None, :], mask=inside, other=0.0).to(tl.float32)
        z += tap * tl.load(weight + c * WIDTH + (WIDTH - 1 - j), mask=keep_c, other=0.0)[None, :]
    return z


@triton.jit
def _forward_kernel(
    x, weight, positions, y, total, channels, row, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    keep_t, keep_c = t < total, c < channels
    z = _pre_activation(x, weight, positions, t, c, keep_t, keep_c, row, WIDTH)
    out = z / (1 + tl.exp(-z))
    tl.store(y + t[:, None] * channels + c[None, :], out.to(y.dtype.element_ty), mask=keep_t[:, None] & keep_c[None, :])


@triton.jit
def _backward_kernel(
    dy, x, weight, positions, dx, dw, total, channels, row,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    t = tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    keep_t, keep_c = t < total, c < channels
    position = tl.load(positions + t, mask=keep_t, other=-1)
    grad_x = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for i in tl.static_range(WIDTH):
        # x_t reaches y at t + i, if t + i is in the same segment: then its position there is at least i.
        later = t + i
        keep_later = later < total
        z = _pre_activation(x, weight, positions, later, c, keep_later, keep_c, row, WIDTH)
        both = keep_later[:, None] & keep_c[None, :]
        upstream = tl.load(dy + later[:, None] * channels + c[None, :], mask=both, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-z))
        dz = upstream * sigmoid * (1 + z * (1 - sigmoid))
        reached = tl.load(positions + later, mask=keep_later, other=-1) >= i
        w = tl.load(weight + c * WIDTH + (WIDTH - 1 - i), mask=keep_c, other=0.0)
        grad_x += tl.where(reached[:, None], dz * w[None, :], 0.0)
        if i == 0:
            for j in tl.static_range(WIDTH):
                inside = (keep_t & (position >= j))[:, None] & keep_c[None, :]
                tap = tl.load(x + (t - j)[:, None] * row + c[None, :], mask=inside, other=0.0).to(tl.float32)
                place = dw + (tile * channels + c) * WIDTH + (WIDTH - 1 - j)
                tl.store(place, tl.sum(dz * tap, axis=0), mask=keep_c)
    both = keep_t[:, None] & keep_c[None, :]
    tl.store(dx + t[:, None] * channels + c[None, :], grad_x.to(dx.dtype.element_ty), mask=both)


def short_conv_fused(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """See `short_conv`. x may be columns of a wider tensor: only its last dimension has to be dense."""
    return _forward(x, weight, segments.positions)


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], TOKENS), triton.cdiv(x.shape[1], CHANNELS)


@torch.library.custom_op("dwslm::short_conv", mutates_args=())
def _forward(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    _forward_kernel[_grid(x)](
        x, weight, positions, y, *x.shape, x.stride(0), WIDTH=weight.shape[1], TOKENS=TOKENS, CHANNELS=CHANNELS
    )
    return y


@torch.library.custom_op("dwslm::short_conv_backward", mutates_args=())
def _backward(dy: Tensor, x: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    grid = _grid(x)
    dw = weight.new_empty(grid[0], *weight.shape)
    _backward_kernel[grid](
        dy, x, weight, positions, dx, dw, *x.shape, x.stride(0),
        WIDTH=weight.shape[1], TOKENS=TOKENS, CHANNELS=CHANNELS,
    )  # fmt: skip
    return dx, dw.sum(0)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(dy.contiguous(), *ctx.saved_tensors), None


_forward.register_autograd(_differentiate, setup_context=_save)
