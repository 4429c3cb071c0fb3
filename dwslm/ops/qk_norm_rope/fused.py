"""`qk_norm_rope` as one Triton kernel each way.

A program takes the whole projection of a few tokens, head after head, so that it reads their angles once. A head's two halves
are two tiles with the same lanes: a pair to be turned lies in one thread, and the sum over a head stays inside a warp. Backward
computes the norm again from the projection rather than keeping anything. Nothing is added across programs: the same input gives
the same bits. The projection's other columns pass through, so that its gradient is written where it belongs instead of being
joined from parts.

Bytes at 65,536 tokens, 8 and 2 heads of 128, 256 columns of values, bfloat16: 436 MB forward (projection in; q, k and values
out; angles 34 MB), 604 MB backward (three gradients and the projection's 1,280 columns in, its gradient out).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16  # of a program: with 4 warps and heads of 128 a thread has one 16-byte load a half
WARPS = 4


@triton.jit
def _load(base, row, left, TOKENS: tl.constexpr, HALF: tl.constexpr):
    """float32 [TOKENS, HALF]; zero past the batch's end, `left` tokens from here."""
    i, c = tl.arange(0, TOKENS)[:, None], tl.arange(0, HALF)[None, :]
    return tl.load(base + i * row + c, mask=i < left, other=0.0).to(tl.float32)


@triton.jit
def _store(base, row, left, y, TOKENS: tl.constexpr, HALF: tl.constexpr):
    i, c = tl.arange(0, TOKENS)[:, None], tl.arange(0, HALF)[None, :]
    tl.store(base + i * row + c, y.to(base.dtype.element_ty), mask=i < left)


@triton.jit
def _scale(a, b, eps, HALF: tl.constexpr):
    """1 / sqrt(mean square + eps) of each head [TOKENS, 1], from its halves."""
    return tl.math.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]


@triton.jit
def _forward_head(x, x_row, y, y_row, cos, sin, left, eps, TOKENS: tl.constexpr, HALF: tl.constexpr):
    a, b = _load(x, x_row, left, TOKENS, HALF), _load(x + HALF, x_row, left, TOKENS, HALF)
    scale = _scale(a, b, eps, HALF)
    a, b = a * scale, b * scale
    _store(y, y_row, left, a * cos - b * sin, TOKENS, HALF)
    _store(y + HALF, y_row, left, a * sin + b * cos, TOKENS, HALF)


@triton.jit
def _backward_head(x, x_row, dy, dy_row, dx, dx_row, cos, sin, left, eps, TOKENS: tl.constexpr, HALF: tl.constexpr):
    a, b = _load(x, x_row, left, TOKENS, HALF), _load(x + HALF, x_row, left, TOKENS, HALF)
    u, v = _load(dy, dy_row, left, TOKENS, HALF), _load(dy + HALF, dy_row, left, TOKENS, HALF)
    scale = _scale(a, b, eps, HALF)
    a, b = a * scale, b * scale
    da, db = u * cos + v * sin, v * cos - u * sin  # turned back
    along = (tl.sum(da * a + db * b, axis=1) / (2 * HALF))[:, None]
    _store(dx, dx_row, left, scale * (da - a * along), TOKENS, HALF)
    _store(dx + HALF, dx_row, left, scale * (db - b * along), TOKENS, HALF)


@triton.jit
def _copy(x, x_row, y, y_row, left, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """COLUMNS columns, WIDTH at a time."""
    i, c = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    for first in tl.static_range(0, COLUMNS, WIDTH):
        mask = (i < left) & (first + c < COLUMNS)
        tl.store(y + i * y_row + first + c, tl.load(x + i * x_row + first + c, mask=mask), mask=mask)


@triton.jit
def _forward_kernel(
    x, cos, sin, q, k, more, total, x_row, more_row, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, MORE: tl.constexpr,
    X_ROW: tl.constexpr, MORE_ROW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    HEAD: tl.constexpr = 2 * HALF
    start = tl.program_id(0).to(tl.int64) * TOKENS
    left, x_row, more_row = (total - start).to(tl.int32), x_row * X_ROW, more_row * MORE_ROW
    x += start * x_row
    q += start * HEADS * HEAD
    k += start * KV_HEADS * HEAD
    c = _load(cos + start * HALF, HALF, left, TOKENS, HALF)
    s = _load(sin + start * HALF, HALF, left, TOKENS, HALF)
    for h in tl.static_range(HEADS):
        _forward_head(x + h * HEAD, x_row, q + h * HEAD, HEADS * HEAD, c, s, left, eps, TOKENS, HALF)
    for h in tl.static_range(KV_HEADS):
        _forward_head(x + (HEADS + h) * HEAD, x_row, k + h * HEAD, KV_HEADS * HEAD, c, s, left, eps, TOKENS, HALF)
    _copy(x + (HEADS + KV_HEADS) * HEAD, x_row, more + start * more_row, more_row, left, TOKENS, MORE, HEAD)


@triton.jit
def _backward_kernel(
    dq, dk, dmore, x, cos, sin, dx, total, x_row, more_row, dx_row, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, MORE: tl.constexpr,
    X_ROW: tl.constexpr, MORE_ROW: tl.constexpr, DX_ROW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    HEAD: tl.constexpr = 2 * HALF
    start = tl.program_id(0).to(tl.int64) * TOKENS
    left, x_row = (total - start).to(tl.int32), x_row * X_ROW
    more_row, dx_row = more_row * MORE_ROW, dx_row * DX_ROW
    x += start * x_row
    dx += start * dx_row
    dq += start * HEADS * HEAD
    dk += start * KV_HEADS * HEAD
    c = _load(cos + start * HALF, HALF, left, TOKENS, HALF)
    s = _load(sin + start * HALF, HALF, left, TOKENS, HALF)
    for h in tl.static_range(HEADS):
        at = h * HEAD
        _backward_head(x + at, x_row, dq + at, HEADS * HEAD, dx + at, dx_row, c, s, left, eps, TOKENS, HALF)
    for h in tl.static_range(KV_HEADS):
        at = (HEADS + h) * HEAD
        _backward_head(x + at, x_row, dk + h * HEAD, KV_HEADS * HEAD, dx + at, dx_row, c, s, left, eps, TOKENS, HALF)
    _copy(dmore + start * more_row, more_row, dx + (HEADS + KV_HEADS) * HEAD, dx_row, left, TOKENS, MORE, HEAD)


def qk_norm_rope_fused(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `qk_norm_rope`. Only the last dimension of x has to be dense."""
    return _forward(x, cos, sin, heads, kv_heads, eps)


def _unit(stride: int) -> int:
    """The compiler proves 16-byte loads from a factor that it sees: a stride such as 1,544 is a multiple of 8, not of 16."""
    return 8 if stride % 8 == 0 else 1


def _constants(x: Tensor, cos: Tensor, heads: int, kv_heads: int) -> dict[str, Any]:
    half = cos.shape[-1]
    more = x.shape[1] - (heads + kv_heads) * 2 * half
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "HALF": half, "MORE": more, "MORE_ROW": _unit(more)}
    return shape | {"X_ROW": _unit(x.stride(0)), "TOKENS": TOKENS, "num_warps": WARPS}


@torch.library.custom_op("dwslm::qk_norm_rope", mutates_args=())
def _forward(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, more = _shapes(x, cos, sin, heads, kv_heads, eps)
    constants = _constants(x, cos, heads, kv_heads)
    rows = x.stride(0) // constants["X_ROW"], more.shape[1] // constants["MORE_ROW"]
    _forward_kernel[(triton.cdiv(len(x), TOKENS),)](x, cos, sin, q, k, more, len(x), *rows, eps, **constants)
    return q, k, more


@torch.library.custom_op("dwslm::qk_norm_rope_backward", mutates_args=())
def _backward(
    dq: Tensor, dk: Tensor, dmore: Tensor, x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> Tensor:
    dx = x.new_empty(x.shape)
    constants, unit = _constants(x, cos, heads, kv_heads), _unit(dx.stride(0))
    rows = x.stride(0) // constants["X_ROW"], dmore.shape[1] // constants["MORE_ROW"], dx.stride(0) // unit
    _backward_kernel[(triton.cdiv(len(x), TOKENS),)](
        dq, dk, dmore, x, cos, sin, dx, len(x), *rows, eps, DX_ROW=unit, **constants
    )
    return dx


@_forward.register_fake
def _shapes(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = 2 * cos.shape[-1]
    more = x.shape[1] - (heads + kv_heads) * head_dim
    shapes = (len(x), heads, head_dim), (len(x), kv_heads, head_dim), (len(x), more)
    q, k, rest = (x.new_empty(shape) for shape in shapes)
    return q, k, rest


@_backward.register_fake
def _(
    dq: Tensor, dk: Tensor, dmore: Tensor, x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, cos, sin, *ctx.settings = inputs
    ctx.save_for_backward(x, cos, sin)


def _differentiate(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = _backward(*(d.contiguous() for d in dy), *ctx.saved_tensors, *ctx.settings)
    return dx, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
