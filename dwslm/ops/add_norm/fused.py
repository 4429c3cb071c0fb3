"""`add_norm` with a backward pass of one Triton kernel, which reads and writes every value once.

    r = 1 / rms(x')        u = gain dout        dx = dy = dx' + r (u - x' r^2 (u . x') / width)        dgain = sum_t dout r x'

Forward stays in PyTorch: a compiler makes one pass of addition and norm, at the rate of a copy. What it makes of the backward
pass is a loop that waits for each row before it asks for the next. Here the rows of the next tokens are on their way through
shared memory while one is worked on. Each program keeps its sums for the gain in registers until its end; they are added
afterwards in a fixed order. Nothing is added atomically.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.column_sums import add_pairs, column_sums

WARPS = 4  # of a program, for rows of up to `ROW` columns: 16 bytes a thread and tensor; longer rows get more
ROW = 1024
MOST_WARPS = 16
ROWS = 1  # tokens of a turn
STAGES = 3  # turns at a time: one is worked on, the next ones are on their way
PROGRAMS = 6  # for a multiprocessor, which has room for seven of 4 warps; each has its share of the tokens


@triton.jit
def _backward_kernel(
    dout, dsum, x, gain, dx, sums, total, eps, width: tl.constexpr,
    SUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x: the sum. dsum: its gradient from later readers, read where SUM. sums [programs, width], of the gain's gradient."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    r, c = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    own_gain = tl.load(gain + c, mask=c < width, other=0.0)[None, :]
    gain_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.range(program * ROWS, total, programs * ROWS, num_stages=STAGES):
        t = (i + r)[:, None]
        place, there = t.to(tl.int64) * width + c[None, :], (t < total) & (c < width)[None, :]
        d = tl.load(dout + place, mask=there, other=0.0).to(tl.float32)
        row = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        if SUM:
            later = tl.load(dsum + place, mask=there, other=0.0).to(tl.float32)
        u = d * own_gain
        squares, inner = tl.reduce((row * row, u * row), 1, add_pairs)
        inverse = tl.math.rsqrt(squares / width + eps)[:, None]
        share = inner[:, None] * inverse * inverse * inverse / width
        gain_sum += d * (row * inverse)
        change = inverse * u - share * row
        if SUM:
            change += later
        tl.store(dx + place, change.to(dx.dtype.element_ty), mask=there)
    tl.store(sums + program * width + c, tl.sum(gain_sum, axis=0), mask=c < width)


class AddNorm(torch.autograd.Function):
    """The sum and its norm."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return _forward(ctx, x, y, gain, eps)

    @staticmethod
    def backward(ctx, dsum: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout, dsum.contiguous())


class LastNorm(torch.autograd.Function):
    """The norm of the sum alone."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        return _forward(ctx, x, y, gain, eps)[1]

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout, None)


def _forward(ctx: Any, x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    added = x if y is None else x + y
    ctx.save_for_backward(added, gain)
    ctx.eps, ctx.added = eps, y is not None
    # As `rms_norm`, without conversions to the dtype that a tensor has: in PyTorch 2.11 the compiler takes the result of one for
    # another tensor and drops the gradient of the first.
    whole = added.dtype == torch.float32
    normed = F.rms_norm(added if whole else added.float(), x.shape[-1:], None, eps) * gain
    return added, normed if whole else normed.to(added.dtype)


def _gradients(ctx: Any, dout: Tensor, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
    added, gain = ctx.saved_tensors
    dx, dgain = _backward(dout.contiguous(), dsum, added.contiguous(), gain, ctx.eps)
    return dx, dx if ctx.added else None, dgain, None


def add_norm_fused(x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `add_norm`."""
    if y is None:
        return x, last_norm_fused(x, y, gain, eps)
    added, normed = AddNorm.apply(x, y, gain, eps)
    return added, normed


def last_norm_fused(x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> Tensor:
    """See `last_norm`."""
    normed: Tensor = LastNorm.apply(x, y, gain, eps)
    return normed


@torch.library.custom_op("dwslm::add_norm_backward", mutates_args=())
def _backward(dout: Tensor, dsum: Tensor | None, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradient of both summands, and the gain's."""
    dx, _ = _backward_shapes(dout, dsum, x, gain, eps)
    total, width = x.shape
    block = triton.next_power_of_2(width)
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    sums = gain.new_empty(min(units * PROGRAMS, triton.cdiv(total, ROWS)), width)
    _backward_kernel[(len(sums),)](
        dout, x if dsum is None else dsum, x, gain, dx, sums, total, eps, width, SUM=dsum is not None, ROWS=ROWS,
        BLOCK=block, STAGES=STAGES, num_warps=min(MOST_WARPS, WARPS * max(1, block // ROW)),
    )  # fmt: skip
    return dx, column_sums(sums)


@_backward.register_fake
def _backward_shapes(dout: Tensor, dsum: Tensor | None, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gain.new_empty(gain.shape)
