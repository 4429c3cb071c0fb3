"""The operators of `quantize` as Triton kernels: every input is read once and every output written once.

All are bound by memory. Bytes at T = 65,536, width 1,024, hidden 4,096, and the least time at 4.2 TB/s:

    rows of x, dy             201 MB   0.048 ms      both of x, dy    268 MB   0.064 ms
    rows of relu(h)^2         805 MB   0.192 ms      both of a      1,074 MB   0.256 ms
    rows_gradient           2,416 MB   0.575 ms      both of dh     1,611 MB   0.384 ms

A weight is 17 MB both ways, 0.004 ms. Instructions leave room: 15, 17 and 21 a value in `both` of x, a and dh, where memory
leaves time for 27, 27 and 41. The same input gives the same bits: nothing is added atomically, and a largest value has no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.mlp import formats, quantize

FP8_MAX = tl.constexpr(formats.FP8_MAX)
TO_SCALE = tl.constexpr(1 / formats.FP8_MAX)
DELAYED_TO_SCALE = tl.constexpr(formats.MARGIN / formats.FP8_MAX)
TINY = tl.constexpr(formats.TINY)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
ROUND_FOUR = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")
KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)

ROW_ELEMENTS = 4096  # of a program of `rows`: several rows where they are short
ROW_WARPS = 4
GRADIENT_WARPS = 16
COLUMNS = 16  # of a program of `rows_transposed`: 32 bytes of a row, the least that memory hands out
COLUMN_ROWS = 512
BOTH_WARPS = 16
FIRST_SCALE_BLOCK = 16384


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=KEEP_NAN)


@triton.jit
def _load(x, at, mask):
    """`mask` None loads everything."""
    if mask is None:
        return tl.load(x + at)
    else:
        return tl.load(x + at, mask=mask, other=0.0)


@triton.jit
def _value(x, h, at, mask, SQUARE: tl.constexpr, GRADIENT: tl.constexpr):
    """What is rounded, float32."""
    v = _load(x, at, mask).to(tl.float32)
    if SQUARE:
        v = _relu(v)
        v = v * v
    if GRADIENT:
        v = v * (2.0 * _relu(_load(h, at, mask).to(tl.float32)))
    return v


@triton.jit
def _round(scaled):
    """To nearest, and to the largest value what is beyond it."""
    if INTERPRETED:
        return tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=KEEP_NAN).to(tl.float8e4nv)
    else:  # four at once, where the compiler needs a shuffle for each two
        four = tl.inline_asm_elementwise(ROUND_FOUR, "=r,f,f,f,f", [scaled], tl.int8, is_pure=True, pack=4)
        return four.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _round_four(a, b, c, d):
    """The four rounded as one int32, a in its lowest byte."""
    if INTERPRETED:
        low = _byte(a) | (_byte(b) << 8)
        return low | (_byte(c) << 16) | (_byte(d) << 24)
    else:
        return tl.inline_asm_elementwise(ROUND_FOUR, "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1)


@triton.jit
def _byte(scaled):
    return _round(scaled).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _fp8_rows_kernel(x, q, scales, rows, columns, SQUARE: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, K)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    v = _value(x, x, at, mask, SQUARE, False)
    scale = tl.maximum(tl.max(tl.abs(v), axis=1), TINY) * TO_SCALE
    tl.store(q + at, _round(v * tl.div_rn(1.0, scale)[:, None]), mask=mask)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _fp8_rows_gradient_kernel(da, h, dh, a, q, scales, columns, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start, column = row * columns, tl.arange(0, K)
    mask = column < columns
    r = _relu(tl.load(h + start + column, mask=mask, other=0.0).to(tl.float32))
    v = tl.load(da + start + column, mask=mask, other=0.0).to(tl.float32) * (2.0 * r)
    tl.store(a + start + column, (r * r).to(a.dtype.element_ty), mask=mask)
    tl.store(dh + start + column, v.to(dh.dtype.element_ty), mask=mask)
    scale = tl.maximum(tl.max(tl.abs(v), axis=0), TINY) * TO_SCALE
    tl.store(q + start + column, _round(v * tl.div_rn(1.0, scale)), mask=mask)
    tl.store(scales + row, scale)


@triton.jit
def _fp8_rows_transposed_kernel(x, q, scales, rows, columns, C: tl.constexpr, R: tl.constexpr):
    """Twice over its columns; the second time they come from the cache, since this is for weights."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    inside = column < columns
    peaks = tl.zeros([R, C], dtype=tl.float32)
    for start in range(0, rows, R):
        row = start + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        v = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
        peaks = tl.maximum(peaks, tl.abs(v.to(tl.float32)))
    scale = tl.maximum(tl.max(peaks, axis=0), TINY) * TO_SCALE
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, rows, R):
        row = start + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        v = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = tl.trans(_round(v * inverse[None, :]))
        tl.store(q + column[:, None] * rows + row[None, :], rounded, mask=tl.trans(mask))
    tl.store(scales + column, scale, mask=inside)


@triton.jit
def _fp8_scale_kernel(
    x, h, seen, scale, count, INDEX: tl.constexpr, SQUARE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program, which reads one number: only where none was ever seen does it go through the tensor, once a run."""
    peak = tl.load(seen + INDEX)
    if not (peak > 0.0):
        peaks = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            peaks = tl.maximum(peaks, tl.abs(_value(x, h, at, at < count, SQUARE, GRADIENT)))
        peak = tl.max(peaks, axis=0)
    tl.store(scale, tl.maximum(peak, TINY) * DELAYED_TO_SCALE)


@triton.jit
def _fp8_both_quarter(x, h, q, at, mask, inverse, SQUARE: tl.constexpr, GRADIENT: tl.constexpr):
    """Every fourth row of a tile: rounded and written, and given back as it is before rounding, with its magnitudes."""
    v = _value(x, h, at, mask, SQUARE, GRADIENT)
    size = tl.abs(v)
    scaled = tl.where(size < float("inf"), v * inverse, float("nan"))
    tl.store(q + at, _round(scaled), mask=mask)
    return scaled, size


@triton.jit
def _fp8_both_kernel(
    x, h, scale, q, q_t, seen, rows, columns, words,
    SQUARE: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """q_t as int32 [columns, rows / 4]: four rows of a column are one word, so the transposition moves words and not bytes."""
    # Columns go first: programs that run together read whole rows.
    wide = tl.cdiv(columns, C)
    tile = tl.program_id(0)
    first_row, first_column = (tile // wide).to(tl.int64) * R, (tile % wide).to(tl.int64) * C
    four, column = tl.arange(0, R // 4), tl.arange(0, C)
    start, step = first_row * columns + first_column, columns.to(tl.int64)
    at = four[:, None] * (4 * columns) + column[None, :]
    inside = None if EVEN else (first_row + 4 * four < rows)[:, None] & (first_column + column < columns)[None, :]
    inverse = tl.div_rn(1.0, tl.load(scale))
    x, h, q = x + start, h + start, q + start
    a, size_a = _fp8_both_quarter(x, h, q, at, inside, inverse, SQUARE, GRADIENT)
    x, h, q = x + step, h + step, q + step
    b, size_b = _fp8_both_quarter(x, h, q, at, inside, inverse, SQUARE, GRADIENT)
    x, h, q = x + step, h + step, q + step
    c, size_c = _fp8_both_quarter(x, h, q, at, inside, inverse, SQUARE, GRADIENT)
    x, h, q = x + step, h + step, q + step
    d, size_d = _fp8_both_quarter(x, h, q, at, inside, inverse, SQUARE, GRADIENT)
    at_t = column[:, None] * words + four[None, :]
    inside_t = None if EVEN else (first_column + column < columns)[:, None] & (first_row + 4 * four < rows)[None, :]
    tl.store(q_t + first_column * words + first_row // 4 + at_t, tl.trans(_round_four(a, b, c, d)), mask=inside_t)
    size = tl.maximum(tl.maximum(size_a, size_b), tl.maximum(size_c, size_d))
    tl.store(seen + tile, tl.max(tl.max(size, axis=1), axis=0))


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5"])
def _fp8_largest_kernel(p0, p1, p2, p3, p4, p5, n0, n1, n2, n3, n4, n5, out, BLOCK: tl.constexpr):
    """One program a list."""
    which = tl.program_id(0)
    p, n = p0, n0
    if which == 1:
        p, n = p1, n1
    elif which == 2:
        p, n = p2, n2
    elif which == 3:
        p, n = p3, n3
    elif which == 4:
        p, n = p4, n4
    elif which == 5:
        p, n = p5, n5
    peaks = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(p + at, mask=at < n, other=0.0))
    tl.store(out + which, tl.max(peaks, axis=0))


def rows(x: Tensor, square: bool) -> tuple[Tensor, Tensor]:
    q, scales = quantize.empty_rows(x, square)
    k = triton.next_power_of_2(x.shape[1])
    r = max(1, ROW_ELEMENTS // k)
    _fp8_rows_kernel[(triton.cdiv(len(x), r),)](x, q, scales, *x.shape, SQUARE=square, R=r, K=k, num_warps=ROW_WARPS)
    return q, scales


def rows_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scales = quantize.empty_rows_transposed(x)
    grid = (triton.cdiv(x.shape[1], COLUMNS),)
    _fp8_rows_transposed_kernel[grid](x, q, scales, *x.shape, C=COLUMNS, R=COLUMN_ROWS, num_warps=4)
    return q, scales


def rows_gradient(da: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh, a, q, scales = quantize.empty_rows_gradient(da, h)
    k = triton.next_power_of_2(h.shape[1])
    _fp8_rows_gradient_kernel[(len(h),)](da, h, dh, a, q, scales, h.shape[1], K=k, num_warps=GRADIENT_WARPS)
    return dh, a, q, scales


def both(x: Tensor, h: Tensor | None, square: bool, peaks: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, q_t, scale, seen = quantize.empty_both(x, h, square, peaks, index)
    value = {"SQUARE": square, "GRADIENT": h is not None}
    h = x if h is None else h
    block = FIRST_SCALE_BLOCK
    _fp8_scale_kernel[(1,)](x, h, peaks, scale, x.numel(), INDEX=index, **value, BLOCK=block, num_warps=32)
    r, c = quantize.TILE
    even = x.shape[0] % r == 0 and x.shape[1] % c == 0
    grid = (quantize.tiles(x),)
    arguments = x, h, scale, q, q_t.view(torch.int32), seen, *x.shape, len(x) // 4
    _fp8_both_kernel[grid](*arguments, **value, EVEN=even, R=r, C=c, num_warps=BOTH_WARPS)
    return q, q_t, scale, seen


def largest(tiles: list[Tensor]) -> Tensor:
    out = quantize.empty_largest(tiles)
    lists = [*tiles, *tiles[:1] * (6 - len(tiles))]
    lengths = [len(peaks) for peaks in lists]
    _fp8_largest_kernel[(len(tiles),)](*lists, *lengths, out, BLOCK=4096, num_warps=8)
    return out
