"""Log-sum-exps as cuDNN's backward pass reads them, by segment: one small kernel in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Tokens of a program. At least as many behind a segment's end are `BEYOND`: more than any tile of cuDNN's reads there."""
BEYOND = tl.constexpr(1e30)
"""Stands behind a segment's end, where queries are masked: exp(score - this) is 0 whatever the score."""


@triton.jit
def _pad_kernel(stats, cu_seqlens, padded, context, heads, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    slot, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    start = tl.load(cu_seqlens + slot).to(tl.int64)
    length = tl.load(cu_seqlens + slot + 1) - start
    if (length > 0) & (first < length + BLOCK):
        t, h = first + tl.arange(0, BLOCK), tl.arange(0, HEADS)
        there = (t < length)[:, None] & (h < heads)[None, :]
        values = tl.load(stats + (start + t)[:, None] * heads + h[None, :], mask=there, other=BEYOND)
        to = padded + (slot * heads + h)[None, :] * context + t[:, None]
        tl.store(to, values, mask=(t < context)[:, None] & (h < heads)[None, :])


def by_segment(stats: Tensor, cu_seqlens: Tensor, context: int) -> Tensor:
    """[T, heads] as float32 [slots, heads, context]. Nothing is written from two blocks behind a segment's end on, or for an
    empty one.

    Args:
        stats: float32 [T, heads], contiguous.
        cu_seqlens: int32 [slots + 1]; no segment is longer than `context`.
    """
    slots, heads = len(cu_seqlens) - 1, stats.shape[1]
    padded = torch.empty(slots, heads, context, dtype=stats.dtype, device=stats.device)
    grid = slots, triton.cdiv(context, BLOCK)
    _pad_kernel[grid](
        stats, cu_seqlens, padded, context, heads, HEADS=triton.next_power_of_2(heads), BLOCK=BLOCK, num_warps=4
    )
    return padded
