"""`train.micro_batch_tokens=auto`: which micro-batches a plan allows, and the largest that a device has room for."""

import math
from collections.abc import Callable, Sequence

SHARE = 0.9
"""Of a GPU's memory that counted bytes may fill. The rest is for what nobody counts: scoring, the context of CUDA, kernels'
scratch, gaps between allocations (but for those of attention residuals, see `dry_run.GAPS`). Measured peaks lay within 7 % of the
count (docs/training.md)."""
MOST_TOKENS = 131_072
"""Larger ones have little left to gain: a prototype's step gained 1.8 % from 65,536 to 131,072 tokens on an H200."""
CPU_TOKENS = 4_096
"""On a CPU, which gains nothing by more."""


def candidates(batch_tokens: int, contexts: Sequence[int], world: int) -> list[int]:
    """Micro-batches that divide a rank's part of the batch and hold whole rows of every context, largest first.

    At most `MOST_TOKENS`, unless one row is longer. Empty where the sizes do not divide.
    """
    row = math.lcm(*contexts)
    if batch_tokens % (world * row):
        return []
    rows = batch_tokens // (world * row)  # of a rank and step
    most = max(1, MOST_TOKENS // row)
    return [n * row for n in range(min(rows, most), 0, -1) if rows % n == 0]


def largest_that_fits(sizes: Sequence[int], needed: Callable[[int], int], memory: int | None) -> int | None:
    """The first of `sizes`, which fall, that needs no more than `SHARE` of `memory`; None where not even the last does.

    needed: bytes by tokens. memory: of the device; None for a CPU, which takes the first of at most `CPU_TOKENS`, else the last.
    """
    if memory is None:
        return next((n for n in sizes if n <= CPU_TOKENS), sizes[-1])
    return next((n for n in sizes if needed(n) <= SHARE * memory), None)
