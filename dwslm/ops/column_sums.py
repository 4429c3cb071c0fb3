"""The last addition of gradients that are sums over tokens: what the programs of a backward kernel have left, by column.

One launch for the matrix or two that such a kernel leaves (`add_norm`, `delta_gate`, `gated_norm`), in a fixed order and without
atomics. A matrix of a few hundred rows and a thousand columns is read in about the time that a launch takes: as sums of PyTorch's
each would take several times as long.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 256  # at a time
COLUMNS = 16  # of a program: 64 bytes a row, and dozens of programs for a thousand columns
WARPS = 8


@triton.jit
def add_pairs(a, b, c, d):
    """For `tl.reduce` of two tensors at a time."""
    return a + c, b + d


@triton.jit
def _sums_kernel(a, b, out, a_rows, b_rows, a_columns, b_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, x, rows, columns = tl.program_id(0) * COLUMNS, a, a_rows, a_columns
    of_a = tl.cdiv(a_columns, COLUMNS) * COLUMNS
    if first >= of_a:
        first, x, rows, columns = first - of_a, b, b_rows, b_columns
        out += a_columns
    r, c = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, rows, ROWS):
        there = (i + r < rows) & (c < columns)[None, :]
        total += tl.load(x + (i + r) * columns + c[None, :], mask=there, other=0.0)
    tl.store(out + c, tl.sum(total, axis=0), mask=c < columns)


def column_sums(a: Tensor, b: Tensor | None = None) -> Tensor:
    """The sums of float32 [n, a_columns] and [m, b_columns] over their rows, side by side: [a_columns + b_columns]."""
    b = a[:, :0] if b is None else b
    columns = a.shape[1], b.shape[1]
    out = a.new_empty(sum(columns))
    programs = sum(triton.cdiv(n, COLUMNS) for n in columns)
    _sums_kernel[(programs,)](a, b, out, len(a), len(b), *columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return out
