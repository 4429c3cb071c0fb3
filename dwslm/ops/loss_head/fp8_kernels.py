"""The gradient of a chunk's logits in float8, as it is and transposed, as two Triton kernels.

The gradient needs the sum of a row's exponentials, and its transposed copy wants tiles of many rows: one kernel reads the logits
for their sums, the other reads them again and writes 2 bytes a logit. 6 bytes in all, where bfloat16 in place takes 4: 3.2 GB
or 0.77 ms for a chunk of 16,384 tokens and 32,768 entries at 4.2 TB/s. Special functions, 2.5 a logit and kernel, are as scarce:
0.38 ms a kernel at 16 a cycle and multiprocessor and 1.65 GHz. Nothing is added atomically.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.fp8.formats import BOUNDED, BOUNDED_STEPS
from dwslm.ops.fp8.kernels import INTERPRETED, ROUND_SIXTEEN, ROUNDED, SIXTEEN, _load_rows
from dwslm.ops.loss_head.fused import KEEP_NAN, _exponentials
from dwslm.ops.loss_head.fused import TILE as SUM_TILE
from dwslm.ops.loss_head.fused import WARPS as SUM_WARPS

ROWS, COLUMNS = 128, 128  # of a program, as those of `fp8_both`
ROUND_WARPS = 16
TIMES = tl.constexpr(BOUNDED_STEPS)
ROUND_SIXTEEN_E5M2 = tl.constexpr(ROUND_SIXTEEN.value.replace("e4m3x2", "e5m2x2"))


@triton.jit
def _nats_sums_kernel(
    logits, targets, nats, factors, vocab, columns, cap, ignore, TILE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A row a program: its nats, and 4 / N (see `fused`); both 0 where it is not scored, whose logits are not read."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * columns
    factor = 0.0
    loss = 0.0
    if target != ignore:
        aim = tl.load(logits + target).to(tl.float32)
        c = tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float32)
        for i in range(0, vocab, 2 * TILE):
            if WHOLE:
                a, b = tl.load(logits + i + c).to(tl.float32), tl.load(logits + i + TILE + c).to(tl.float32)
                e_a, e_b, _, _ = _exponentials(a, b, cap)
            else:
                there_a, there_b = i + c < vocab, i + TILE + c < vocab
                a = tl.load(logits + i + c, mask=there_a, other=0.0).to(tl.float32)
                b = tl.load(logits + i + TILE + c, mask=there_b, other=0.0).to(tl.float32)
                e_a, e_b, _, _ = _exponentials(a, b, cap)
                e_a, e_b = tl.where(there_a, e_a, 0.0), tl.where(there_b, e_b, 0.0)
            total += e_a + e_b
        normaliser = tl.sum(total, axis=0)
        r = 1.0 / (1.0 + tl.exp(tl.minimum(2.0 * aim / cap, 60.0, propagate_nan=KEEP_NAN)))
        loss = tl.log(normaliser) + 2.0 * cap * r
        factor = 4.0 / normaliser
    tl.store(nats + row, loss)
    tl.store(factors + row, factor)


@triton.jit
def _gradient(e, slope, factor, target, column, vocab, WHOLE: tl.constexpr):
    """D times `TIMES`, from what `_exponentials` gives: zero in rows that are not scored, and past the vocabulary."""
    d = e * slope * (factor * TIMES)[:, None]
    at_target = (column[None, :] == target[:, None]) & (factor != 0.0)[:, None]
    d = tl.where(at_target, d - slope * (4.0 * TIMES), d)
    if not WHOLE:
        d = tl.where(column[None, :] < vocab, d, 0.0)
    return d


@triton.jit
def _round_four_rows_e5m2(a, b, c, d):
    """As `_round_four_rows` of `ops/fp8`: bytes of four rows, and int32 words of a byte of each."""
    if INTERPRETED:
        a, b = a.to(tl.float8e5).to(tl.int8, bitcast=True), b.to(tl.float8e5).to(tl.int8, bitcast=True)
        c, d = c.to(tl.float8e5).to(tl.int8, bitcast=True), d.to(tl.float8e5).to(tl.int8, bitcast=True)
        low = (a.to(tl.int32) & 255) | ((b.to(tl.int32) & 255) << 8)
        return a, b, c, d, low | ((c.to(tl.int32) & 255) << 16) | ((d.to(tl.int32) & 255) << 24)
    else:
        return tl.inline_asm_elementwise(ROUND_SIXTEEN_E5M2, SIXTEEN, [a, b, c, d], ROUNDED, is_pure=True, pack=4)


@triton.jit
def _nats_gradient_kernel(
    logits, targets, factors, q, q_t, rows, columns, vocab, words, cap,
    EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """q [rows, columns] and q_t as int32 [columns, words], the chunk's part of it; see `fp8_both` for both tiles and masks."""
    first_row, first_column = tl.program_id(1).to(tl.int64) * R, tl.program_id(0).to(tl.int64) * C
    four, column = tl.arange(0, R // 4), tl.arange(0, C)
    start, step = first_row * columns + first_column, columns.to(tl.int64)
    at = four[:, None] * (4 * columns) + column[None, :]
    row = first_row + 4 * four
    row_there, column_there = row < rows, first_column + column < columns
    inside, inside_t = None, None
    if not EVEN_COLUMNS:
        inside, inside_t = column_there[None, :], column_there[:, None]
    if not EVEN_ROWS:
        inside = row_there[:, None] if EVEN_COLUMNS else row_there[:, None] & inside
        inside_t = row_there[None, :] if EVEN_COLUMNS else row_there[None, :] & inside_t
    a, b, c, d = _load_rows(logits + start, at, step, inside)
    own = None if EVEN_ROWS else row_there
    fa, fb, fc, fd = _load_rows(factors, row, 1, own)
    ta, tb, tc, td = _load_rows(targets, row, 1, own)
    a, b, slope_a, slope_b = _exponentials(a.to(tl.float32), b.to(tl.float32), cap)
    c, d, slope_c, slope_d = _exponentials(c.to(tl.float32), d.to(tl.float32), cap)
    real = first_column + column
    a, b = _gradient(a, slope_a, fa, ta, real, vocab, WHOLE), _gradient(b, slope_b, fb, tb, real, vocab, WHOLE)
    c, d = _gradient(c, slope_c, fc, tc, real, vocab, WHOLE), _gradient(d, slope_d, fd, td, real, vocab, WHOLE)
    a, b, c, d, word = _round_four_rows_e5m2(a, b, c, d)
    q += start
    tl.store(q + at, a, mask=inside)
    tl.store(q + step + at, b, mask=inside)
    tl.store(q + 2 * step + at, c, mask=inside)
    tl.store(q + 3 * step + at, d, mask=inside)
    at_t = column.to(tl.int64)[:, None] * words + four[None, :]
    tl.store(q_t + first_column * words + first_row // 4 + at_t, tl.trans(word), mask=inside_t)


def gradient(
    logits: Tensor, targets: Tensor, nats: Tensor, d8_t: Tensor, vocab: int, softcap: float, ignore: int
) -> Tensor:
    """See `fp8._formulas`. d8_t: float8 [columns, rows], a part of the columns of a tensor; rows a multiple of 4."""
    rows, columns = logits.shape
    factors = torch.empty_like(nats)
    _nats_sums_kernel[(rows,)](
        logits, targets, nats, factors, vocab, columns, softcap, ignore,
        TILE=SUM_TILE, WHOLE=vocab % (2 * SUM_TILE) == 0, num_warps=SUM_WARPS,
    )  # fmt: skip
    d8 = torch.empty_like(logits, dtype=BOUNDED)
    words = d8_t.view(torch.int32)
    grid = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)
    _nats_gradient_kernel[grid](
        logits, targets, factors, d8.view(torch.int8), words, rows, columns, vocab, words.stride(0), softcap,
        EVEN_ROWS=rows % ROWS == 0, EVEN_COLUMNS=columns % COLUMNS == 0, WHOLE=vocab == columns, R=ROWS, C=COLUMNS,
        num_warps=ROUND_WARPS,
    )  # fmt: skip
    return d8
