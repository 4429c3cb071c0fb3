"""The operators of `quantize` as Triton kernels: every input is read once and every output written once.

All are bound by memory. Bytes at T = 65,536, width 1,024, hidden 4,096, and the least time at 4.2 TB/s:

    rows of x, dy             201 MB   0.048 ms      both of x, dy    268 MB   0.064 ms
    rows of relu(h)^2         805 MB   0.192 ms      both of a      1,074 MB   0.256 ms
    rows_gradient           2,416 MB   0.575 ms      both of dh     1,342 MB   0.320 ms
                                                     both of dy of a projection of 3,344 rows
                                                                      877 MB   0.209 ms

A weight of the MLP is 17 MB both ways, 0.004 ms. Instructions leave room: 11, 13 and 16 a value in `both` of x, a and dh, where
memory leaves time for 27, 27 and 34. The same input gives the same bits: nothing is added atomically, and a largest value has
no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.fp8 import formats, shapes

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
ROUND_SIXTEEN = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 a, b, c, d, ab, cd, ab_high, cd_high;
    cvt.rn.satfinite.e4m3x2.f32 low, $9, $8;
    cvt.rn.satfinite.e4m3x2.f32 high, $11, $10;
    mov.b32 a, {low, high};
    cvt.rn.satfinite.e4m3x2.f32 low, $13, $12;
    cvt.rn.satfinite.e4m3x2.f32 high, $15, $14;
    mov.b32 b, {low, high};
    cvt.rn.satfinite.e4m3x2.f32 low, $17, $16;
    cvt.rn.satfinite.e4m3x2.f32 high, $19, $18;
    mov.b32 c, {low, high};
    cvt.rn.satfinite.e4m3x2.f32 low, $21, $20;
    cvt.rn.satfinite.e4m3x2.f32 high, $23, $22;
    mov.b32 d, {low, high};
    prmt.b32 ab, a, b, 0x5140;
    prmt.b32 cd, c, d, 0x5140;
    prmt.b32 ab_high, a, b, 0x7362;
    prmt.b32 cd_high, c, d, 0x7362;
    mov.b32 $0, a;
    mov.b32 $1, b;
    mov.b32 $2, c;
    mov.b32 $3, d;
    prmt.b32 $4, ab, cd, 0x5410;
    prmt.b32 $5, ab, cd, 0x7632;
    prmt.b32 $6, ab_high, cd_high, 0x5410;
    prmt.b32 $7, ab_high, cd_high, 0x7632;
}""")
SIXTEEN = tl.constexpr(",".join(["=r"] * 8 + ["f"] * 16))
ROUNDED = tl.constexpr((tl.int8, tl.int8, tl.int8, tl.int8, tl.int32))
KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)
ALIKE = tl.constexpr("")  # no wish of the L2 cache

ROW_ELEMENTS = 4096  # of a program of `rows`: several rows where they are short
ROW_WARPS = 4
GRADIENT_WARPS = 16
COLUMNS = 16  # of a program of `rows_transposed`: 32 bytes of a row, the least that memory hands out
COLUMN_ROWS = 512
BOTH_WARPS = 16
TRANSPOSE_WARPS = 8
FIRST_SCALE_BLOCK = 16384


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=KEEP_NAN)


@triton.jit
def _value(v, a, twice_root, SQUARE: tl.constexpr, GRADIENT: tl.constexpr):
    """What is rounded, float32. twice_root: 2 sqrt of a's scale."""
    v = v.to(tl.float32)
    if SQUARE:
        v = _relu(v)
        v = v * v
    if GRADIENT:
        v = v * (twice_root * tl.sqrt(a.to(tl.float32)))
    return v


@triton.jit
def _twice_root(a_scale, GRADIENT: tl.constexpr):
    if GRADIENT:
        root = 2.0 * tl.sqrt(tl.load(a_scale))
    else:
        root = 1.0
    return root


@triton.jit
def _round(scaled):
    """To nearest, and to the largest value what is beyond it."""
    if INTERPRETED:
        return tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=KEEP_NAN).to(tl.float8e4nv)
    else:  # four at once, where the compiler needs a shuffle for each two
        four = tl.inline_asm_elementwise(ROUND_FOUR, "=r,f,f,f,f", [scaled], tl.int8, is_pure=True, pack=4)
        return four.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _round_four_rows(a, b, c, d):
    """Four rows rounded, and as int32 words: a byte of each, that of a lowest. Four columns at once are a 4 x 4 transposition."""
    if INTERPRETED:
        a, b, c, d = _round(a), _round(b), _round(c), _round(d)
        return a, b, c, d, _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)
    else:
        a, b, c, d, words = tl.inline_asm_elementwise(
            ROUND_SIXTEEN, SIXTEEN, [a, b, c, d], ROUNDED, is_pure=True, pack=4
        )
        return _float8(a), _float8(b), _float8(c), _float8(d), words


@triton.jit
def _byte(rounded):
    return rounded.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _float8(byte):
    return byte.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _fp8_rows_kernel(x, q, scales, rows, columns, factor, SQUARE: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, K)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    v = tl.load(x + at, mask=mask, other=0.0)
    v = _value(v, v, 1.0, SQUARE, False)
    scale = tl.maximum(tl.max(tl.abs(v), axis=1), TINY) * TO_SCALE
    tl.store(q + at, _round(v * tl.div_rn(1.0, scale)[:, None]), mask=mask)
    tl.store(scales + row, scale * factor, mask=row < rows)


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
    x, a, a_scale, seen, scale, inverse, factor, count,
    INDEX: tl.constexpr, SQUARE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, which reads one number: only where none was ever seen does it go through the tensor, once a run."""
    peak = tl.load(seen + INDEX)
    if not (peak > 0.0):
        peaks = tl.zeros([BLOCK], dtype=tl.float32)
        root = _twice_root(a_scale, GRADIENT)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            v = tl.load(x + at, mask=at < count, other=0.0)
            of = tl.load(a + at, mask=at < count, other=0.0) if GRADIENT else v
            peaks = tl.maximum(peaks, tl.abs(_value(v, of, root, SQUARE, GRADIENT)))
        peak = tl.max(peaks, axis=0)
    one = tl.maximum(peak, TINY) * DELAYED_TO_SCALE
    tl.store(inverse, tl.div_rn(1.0, one))
    tl.store(scale, one * factor)


@triton.jit
def _load_rows(x, at, step, mask, EVICT: tl.constexpr = ALIKE):
    """Four tensors: every fourth row of a tile from its first, second, third and fourth on. `mask` None loads everything.
    EVICT: what the L2 cache does with it."""
    a, b = _load(x + at, mask, EVICT), _load(x + step + at, mask, EVICT)
    c, d = _load(x + 2 * step + at, mask, EVICT), _load(x + 3 * step + at, mask, EVICT)
    return a, b, c, d


@triton.jit
def _load(x, mask, EVICT: tl.constexpr):
    if mask is None:
        v = tl.load(x, eviction_policy=EVICT)
    else:
        v = tl.load(x, mask=mask, other=0.0, eviction_policy=EVICT)
    return v


@triton.jit
def _scaled(v, inverse):
    """v * inverse, and NaN where v is not finite: the product with 0 is 0 or NaN, in one instruction less than a comparison."""
    return tl.fma(v, inverse, v * 0.0)


@triton.jit
def _fp8_both_kernel(
    x, square, square_scale, inverse, q, q_t, seen, rows, columns, words,
    SQUARE: tl.constexpr, GRADIENT: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """q_t as int32 [columns, rows / 4]: four rows of a column are one word, so the transposition moves words and not bytes.

    Masks are those that a tensor needs: with one along the rows, words of q_t are stored one by one and not four at once.

    All that a tile reads is asked for before anything is written: no read may pass a write that could be to the same place, and
    one after the other the reads of two programs would not fill the memory's latency.
    """
    # Columns go first: programs that run together read whole rows.
    first_row, first_column = tl.program_id(1).to(tl.int64) * R, tl.program_id(0).to(tl.int64) * C
    four, column = tl.arange(0, R // 4), tl.arange(0, C)
    start, step = first_row * columns + first_column, columns.to(tl.int64)
    at = four[:, None] * (4 * columns) + column[None, :]
    row_there, column_there = first_row + 4 * four < rows, first_column + column < columns
    inside, inside_t = None, None
    if not EVEN_COLUMNS:
        inside, inside_t = column_there[None, :], column_there[:, None]
    if not EVEN_ROWS:
        inside = row_there[:, None] if EVEN_COLUMNS else row_there[:, None] & inside
        inside_t = row_there[None, :] if EVEN_COLUMNS else row_there[None, :] & inside_t
    a, b, c, d = _load_rows(x + start, at, step, inside)
    if GRADIENT:
        of_a, of_b, of_c, of_d = _load_rows(square + start, at, step, inside)
    else:
        of_a, of_b, of_c, of_d = a, b, c, d
    root = _twice_root(square_scale, GRADIENT)
    a, b = _value(a, of_a, root, SQUARE, GRADIENT), _value(b, of_b, root, SQUARE, GRADIENT)
    c, d = _value(c, of_c, root, SQUARE, GRADIENT), _value(d, of_d, root, SQUARE, GRADIENT)
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


@triton.jit
def _fp8_scale_of_peaks_kernel(
    seen, peaks, scale, inverse, count, INDEX: tl.constexpr, BLOCK: tl.constexpr, factor=1.0
):  # fmt: skip
    """As `_fp8_scale_kernel`, out of what each tile has seen where nothing is known."""
    peak = tl.load(seen + INDEX)
    if not (peak > 0.0):
        largest = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.load(peaks + at, mask=at < count, other=0.0))
        peak = tl.max(largest, axis=0)
    one = tl.maximum(peak, TINY) * DELAYED_TO_SCALE
    tl.store(inverse, tl.div_rn(1.0, one))
    tl.store(scale, one * factor)


@triton.jit
def _fp8_transpose_kernel(q, q_t, rows, columns, words, EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Bytes; q_t as int32 [columns, rows / 4], as in `_fp8_both_kernel`. rows a multiple of R; EVEN: columns one of C."""
    first_row, first_column = tl.program_id(1).to(tl.int64) * R, tl.program_id(0).to(tl.int64) * C
    four, column = tl.arange(0, R // 4), tl.arange(0, C)
    there = first_column + column < columns
    inside = None if EVEN else there[None, :]
    inside_t = None if EVEN else there[:, None]
    at = four[:, None] * (4 * columns) + column[None, :]
    a, b, c, d = _load_rows(q + first_row * columns + first_column, at, columns.to(tl.int64), inside)
    low = a.to(tl.int32) | (b.to(tl.int32) << 8)
    word = low | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    at_t = column[:, None] * words + four[None, :]
    tl.store(q_t + first_column * words + first_row // 4 + at_t, tl.trans(word), mask=inside_t)


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


def rows(x: Tensor, square: bool, factor: float) -> tuple[Tensor, Tensor]:
    q, scales = shapes.rows(x, square)
    k = triton.next_power_of_2(x.shape[1])
    r = max(1, ROW_ELEMENTS // k)
    grid = (triton.cdiv(len(x), r),)
    _fp8_rows_kernel[grid](x, q, scales, *x.shape, factor, SQUARE=square, R=r, K=k, num_warps=ROW_WARPS)
    return q, scales


def rows_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scales = shapes.rows_transposed(x)
    grid = (triton.cdiv(x.shape[1], COLUMNS),)
    _fp8_rows_transposed_kernel[grid](x, q, scales, *x.shape, C=COLUMNS, R=COLUMN_ROWS, num_warps=4)
    return q, scales


def rows_gradient(da: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh, a, q, scales = shapes.rows_gradient(da, h)
    k = triton.next_power_of_2(h.shape[1])
    _fp8_rows_gradient_kernel[(len(h),)](da, h, dh, a, q, scales, h.shape[1], K=k, num_warps=GRADIENT_WARPS)
    return dh, a, q, scales


def both(
    x: Tensor, a: Tensor | None, square: bool, peaks: Tensor, index: int, factor: float, a_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, q_t, scale, seen = shapes.both(x, a, square, peaks, index, factor)
    inverse = torch.empty_like(scale)
    value = {"SQUARE": square, "GRADIENT": a is not None}
    if a is None or a_scale is None:
        a, a_scale = x, scale  # neither is read
    block = FIRST_SCALE_BLOCK
    _fp8_scale_kernel[(1,)](
        x, a, a_scale, peaks, scale, inverse, factor, x.numel(), INDEX=index, **value, BLOCK=block, num_warps=32
    )
    r, c = shapes.TILE
    even = {"EVEN_ROWS": x.shape[0] % r == 0, "EVEN_COLUMNS": x.shape[1] % c == 0}
    grid = triton.cdiv(x.shape[1], c), triton.cdiv(x.shape[0], r)
    arguments = x, a, a_scale, inverse, q, q_t.view(torch.int32), seen, *x.shape, len(x) // 4
    _fp8_both_kernel[grid](*arguments, **value, **even, R=r, C=c, num_warps=BOTH_WARPS)
    return q, q_t, scale, seen


def transpose(q: Tensor, q_t: Tensor) -> None:
    """q^T into q_t, float8; rows of q are a multiple of a tile's."""
    r, c = shapes.TILE
    grid = triton.cdiv(q.shape[1], c), q.shape[0] // r
    even = q.shape[1] % c == 0
    _fp8_transpose_kernel[grid](
        q.view(torch.uint8),
        q_t.view(torch.int32),
        *q.shape,
        len(q) // 4,
        EVEN=even,
        R=r,
        C=c,
        num_warps=TRANSPOSE_WARPS,
    )


def largest(tiles: list[Tensor]) -> Tensor:
    out = shapes.largest(tiles)
    lists = [*tiles, *tiles[:1] * (6 - len(tiles))]
    lengths = [len(peaks) for peaks in lists]
    _fp8_largest_kernel[(len(tiles),)](*lists, *lengths, out, BLOCK=4096, num_warps=8)
    return out
