"""`add_norm` before a product in FP8 with delayed scales: the norm is rounded where it is computed.

One Triton kernel reads stream and output and writes their sum, and its norm in float8 as it is and transposed: 8 bytes a value,
537 MB of 65,536 tokens by 1,024; apart, the norm is written and read once more in the compute dtype, 805 MB. It is rounded once,
out of float32. A norm wants whole rows and the transposed copy tiles of many rows, so that a program has some rows whole, and
goes over their columns twice: it adds, and then reads its sums once more, out of the L2 cache, to normalise them. Backward is
that of both, one after the other: neither wants the norm.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.add_norm.fused import _gradients
from dwslm.ops.fp8 import shapes
from dwslm.ops.fp8.kernels import ALIKE, DELAYED_TO_SCALE, TINY, _load_rows, _round_four_rows, _scaled
from dwslm.ops.fp8.rounded import Rounded, Rounding, hand_on

ROWS = 64  # of a program: 64 bytes of a transposed row, the least that memory of an H200 takes at once
COLUMNS = 128  # at a time; `__init__.STEP`
WARPS = 8
PROGRAMS = 2  # for a multiprocessor: what all of them have between their two passes, and read and write meanwhile, passes the L2
ONCE = tl.constexpr("evict_first")  # all but the sums, so that these are there when they are read again
FIRST_ROWS = 16  # at a time, where the scale is not known yet


@triton.jit
def _add(x, y):
    """In float32, rounded as the stream is kept."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _normed(v, inverse, gain):
    return v.to(tl.float32) * inverse * gain


@triton.jit
def _store_rows(x, at, step, a, b, c, d, mask, EVICT: tl.constexpr):
    """What `_load_rows` takes apart."""
    tl.store(x + at, a, mask=mask, eviction_policy=EVICT)
    tl.store(x + step + at, b, mask=mask, eviction_policy=EVICT)
    tl.store(x + 2 * step + at, c, mask=mask, eviction_policy=EVICT)
    tl.store(x + 3 * step + at, d, mask=mask, eviction_policy=EVICT)


@triton.jit
def _scale_kernel(
    x, y, gain, seen, scale, inverse, factor, rows, columns, eps,
    WHICH: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As that of `fp8_both`: one program, which goes through the tensors once a run."""
    peak = tl.load(seen + WHICH)
    if not (peak > 0.0):
        peaks = tl.zeros([R, BLOCK], dtype=tl.float32)
        c = tl.arange(0, BLOCK)[None, :]
        own = tl.load(gain + c, mask=c < columns, other=0.0)
        for start in range(0, rows, R):
            row = (start + tl.arange(0, R))[:, None]
            at, there = row.to(tl.int64) * columns + c, (row < rows) & (c < columns)
            v = tl.load(x + at, mask=there, other=0.0)
            if ADD:
                v = _add(v, tl.load(y + at, mask=there, other=0.0))
            v = v.to(tl.float32)
            root = tl.math.rsqrt(tl.sum(v * v, axis=1) / columns + eps)[:, None]
            peaks = tl.maximum(peaks, tl.abs(_normed(v, root, own)))
        peak = tl.max(tl.max(peaks, axis=1), axis=0)
    one = tl.maximum(peak, TINY) * DELAYED_TO_SCALE
    tl.store(inverse, tl.div_rn(1.0, one))
    tl.store(scale, one * factor)


@triton.jit
def _rounded_kernel(
    x, y, gain, inverse, added, q, q_t, seen, rows, columns, words, eps,
    ADD: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Tiles as those of `fp8_both`; q_t as int32 [columns, rows / 4]. added: written where ADD, else x is the sum."""
    step, by = columns.to(tl.int64), tl.load(inverse)
    four, column = tl.arange(0, R // 4), tl.arange(0, C)
    at = four[:, None] * (4 * columns) + column[None, :]
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        first_row = block * R
        start = first_row * step
        there = first_row + 4 * four < rows
        inside = None if EVEN else there[:, None]
        inside_t = None if EVEN else there[None, :]
        # Added up along the rows at the end, element by element until then.
        aa, bb = tl.zeros([R // 4, C], tl.float32), tl.zeros([R // 4, C], tl.float32)
        cc, dd = tl.zeros([R // 4, C], tl.float32), tl.zeros([R // 4, C], tl.float32)
        for first in range(0, columns, C):
            a, b, c, d = _load_rows(x + start + first, at, step, inside, ONCE if ADD else ALIKE)
            if ADD:
                of_a, of_b, of_c, of_d = _load_rows(y + start + first, at, step, inside, ONCE)
                a, b, c, d = _add(a, of_a), _add(b, of_b), _add(c, of_c), _add(d, of_d)
                _store_rows(added + start + first, at, step, a, b, c, d, inside, ALIKE)
            a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
            aa, bb, cc, dd = aa + a * a, bb + b * b, cc + c * c, dd + d * d
        a_root = tl.math.rsqrt(tl.sum(aa, axis=1) / columns + eps)[:, None]
        b_root = tl.math.rsqrt(tl.sum(bb, axis=1) / columns + eps)[:, None]
        c_root = tl.math.rsqrt(tl.sum(cc, axis=1) / columns + eps)[:, None]
        d_root = tl.math.rsqrt(tl.sum(dd, axis=1) / columns + eps)[:, None]
        if ADD:
            x_again = added
            tl.debug_barrier()  # a thread may read what another has written
        else:
            x_again = x
        size = tl.zeros([R // 4, C], tl.float32)
        for first in range(0, columns, C):
            a, b, c, d = _load_rows(x_again + start + first, at, step, inside, ONCE)
            own = tl.load(gain + first + column)[None, :]
            a, b, c, d = (
                _normed(a, a_root, own),
                _normed(b, b_root, own),
                _normed(c, c_root, own),
                _normed(d, d_root, own),
            )
            size = tl.maximum(size, tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d))))
            a, b, c, d, word = _round_four_rows(_scaled(a, by), _scaled(b, by), _scaled(c, by), _scaled(d, by))
            _store_rows(q + start + first, at, step, a, b, c, d, inside, ONCE)
            at_t = (first + column)[:, None] * words + four[None, :]
            tl.store(q_t + first_row // 4 + at_t, tl.trans(word), mask=inside_t, eviction_policy=ONCE)
        tl.store(seen + block, tl.max(tl.max(size, axis=1), axis=0))


@torch.library.custom_op("dwslm::add_norm_rounded", mutates_args=())
def rounded(
    x: Tensor, y: Tensor | None, gain: Tensor, eps: float, peaks: Tensor, which: int, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum, and `quantize.both` of its norm; T a multiple of 4, the width of `COLUMNS`. Without y the sum is empty."""
    added, q, q_t, scale, seen = _shapes(x, y, gain, eps, peaks, which, factor)
    inverse = torch.empty_like(scale)
    (total, width), add = x.shape, y is not None
    y = x if y is None else y
    _scale_kernel[(1,)](
        x, y, gain, peaks, scale, inverse, factor, total, width, eps,
        WHICH=which, ADD=add, R=FIRST_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=32,
    )  # fmt: skip
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    _rounded_kernel[(min(units * PROGRAMS, len(seen)),)](
        x, y, gain, inverse, added, q, q_t.view(torch.int32), seen, total, width, total // 4, eps,
        ADD=add, EVEN=total % ROWS == 0, R=ROWS, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return added, q, q_t, scale, seen


@rounded.register_fake
def _shapes(
    x: Tensor, y: Tensor | None, gain: Tensor, eps: float, peaks: Tensor, which: int, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, q_t, scale, _ = shapes.both(x, None, False, peaks, which, factor)
    added = x.new_empty(0 if y is None else len(x), x.shape[1])
    return added, q, q_t, scale, peaks.new_empty(triton.cdiv(len(x), ROWS))


class AddNormRounded(torch.autograd.Function):
    """The sum, and the fields of `Rounded` of its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, gain: Tensor, eps: float, peaks: Tensor, which: int, factor: float
    ) -> tuple[Tensor, ...]:
        added, *made = rounded(x, y, gain, eps, peaks, which, factor)
        ctx.save_for_backward(added, gain)
        ctx.eps, ctx.added = eps, True
        return added, *hand_on(ctx, x, tuple(made))

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, dnormed: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dnormed, dsum.contiguous()), None, None, None


class NormRounded(torch.autograd.Function):
    """The fields of `Rounded` of the norm of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, peaks: Tensor, which: int, factor: float
    ) -> tuple[Tensor, ...]:
        _, *made = rounded(x, None, gain, eps, peaks, which, factor)
        ctx.save_for_backward(x, gain)
        ctx.eps, ctx.added = eps, False
        return hand_on(ctx, x, tuple(made))

    @staticmethod
    def backward(ctx: Any, dnormed: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        dx, _, dgain, _ = _gradients(ctx, dnormed, None)
        return dx, dgain, None, None, None, None


def add_norm_rounded_fused(
    x: Tensor, y: Tensor | None, gain: Tensor, eps: float, how: Rounding
) -> tuple[Tensor, Rounded]:
    """See `add_norm_rounded`, for what fits."""
    x = x.contiguous()
    if y is None:
        return x, Rounded(*NormRounded.apply(x, gain, eps, *how))
    added, *made = AddNormRounded.apply(x, y.contiguous(), gain, eps, *how)
    return added, Rounded(*made)
