"""The symmetric products of Newton-Schulz as one Triton kernel: half of each is computed, the other half is its mirror image.

    gram: X X^T, or X^T X of tall matrices;    gram_polynomial: a I + b G + c G G

Tiles on or below the diagonal only, each written to its own place and, turned over, to its mirror image's: of a side of 1,024
that is 36 of 64 blocks of 128. Where a tile lies on the diagonal its own lower half is mirrored as well, so that results are
symmetric to the bit. Sums run along the inner side in one order in one program: the same input gives the same bits.

Tiles of a matrix follow one another in the grid, so that its operands are read from memory once and from the second-level cache
afterwards. Loads and stores go through tensor descriptors: the memory unit moves whole tiles and works out their addresses.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dwslm.optim.newton_schulz import BLOCK

SIDE = tl.constexpr(BLOCK)  # of the blocks that are written, and of a tile in columns
ROWS, INNER, WARPS, STAGES = 128, 64, 8, 3
"""A tile's rows, its step along the inner side, warps of a program, and steps under way: two programs a multiprocessor."""


@triton.jit
def _product(
    left, right, first, row, column, inner, TALL: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr
):  # fmt: skip
    """Float32 tile of X X^T, or of X^T X; `first` is the matrix's first row in its stack."""
    total = tl.zeros([ROWS, SIDE], dtype=tl.float32)
    for k in range(0, inner, INNER):
        if TALL:
            total = tl.dot(left.load([first + k, row]).T, right.load([first + k, column]), total)
        else:
            total = tl.dot(left.load([first + row, k]), right.load([first + column, k]).T, total)
    return total


@triton.jit
def _square(x, first, row, inner, TALL: tl.constexpr, INNER: tl.constexpr):
    """`_product` on the diagonal, where both operands are one tile: loaded once."""
    total = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for k in range(0, inner, INNER):
        if TALL:
            tile = x.load([first + k, row])
            total = tl.dot(tile.T, tile, total)
        else:
            tile = x.load([first + row, k])
            total = tl.dot(tile, tile.T, total)
    return total


@triton.jit
def _write(block, out, g, first, row, column, a, b, c, POLYNOMIAL: tl.constexpr):
    """A block on or below the diagonal and its mirror image; of one above, nothing."""
    if column <= row:
        if POLYNOMIAL:
            block = c * block + b * g.load([first + row, column]).to(tl.float32)
        if column < row:
            rounded = block.to(out.dtype)
            out.store([first + row, column], rounded)
            out.store([first + column, row], rounded.T)
        else:
            i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
            if POLYNOMIAL:
                block = tl.where(i == j, block + a, block)
            rounded = block.to(out.dtype)
            out.store([first + row, column], tl.where(i >= j, rounded, rounded.T))


@triton.jit
def _symmetric_kernel(
    left, right, g, out, side, inner, a, b, c,
    TALL: tl.constexpr, POLYNOMIAL: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    matrix, tile = tl.program_id(1), tl.program_id(0)
    # Tiles go row by row; each row of tiles is longer than the one above by as many columns as it has blocks in height.
    row, tiles = 0, ROWS // SIDE
    while tile >= tiles:
        tile -= tiles
        tiles += ROWS // SIDE
        row += ROWS
    column, first = tile * SIDE, matrix * side
    start = matrix * inner if TALL else first
    if ROWS == SIDE:
        if row == column:
            total = _square(left, start, row, inner, TALL, INNER)
        else:
            total = _product(left, right, start, row, column, inner, TALL, ROWS, INNER)
        _write(total, out, g, first, row, column, a, b, c, POLYNOMIAL)
    else:
        total = _product(left, right, start, row, column, inner, TALL, ROWS, INNER)
        upper, lower = tl.split(tl.permute(tl.reshape(total, [2, SIDE, SIDE]), [1, 2, 0]))
        _write(upper, out, g, first, row, column, a, b, c, POLYNOMIAL)
        _write(lower, out, g, first, row + SIDE, column, a, b, c, POLYNOMIAL)


def launch(
    x: Tensor, g: Tensor | None, scalars: tuple[float, float, float], tall: bool,
    rows: int = ROWS, step: int = INNER, warps: int = WARPS, stages: int = STAGES,
) -> Tensor:  # fmt: skip
    """X X^T of x [N, side, inner], or X^T X of x [N, inner, side] where `tall`; with g [N, side, side] and scalars (a, b, c):
    a I + b g + c times that. `side` is a multiple of `rows`, `inner` of `step`. Returns [N, side, side] in x's dtype."""
    x = x.contiguous()
    count, side, inner = (x.shape[0], x.shape[2], x.shape[1]) if tall else x.shape
    out = x.new_empty(count, side, side)

    def tiles(of: Tensor, height: int, width: int) -> TensorDescriptor:
        flat = of.view(-1, of.shape[2])
        return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [height, width])

    left, right = (tiles(x, *((step, wide) if tall else (wide, step))) for wide in (rows, BLOCK))
    blocks = tiles(out, BLOCK, BLOCK)
    bands, high = side // rows, rows // BLOCK  # rows of tiles, and blocks in a tile
    _symmetric_kernel[(high * bands * (bands + 1) // 2, count)](
        left, right, blocks if g is None else tiles(g.contiguous(), BLOCK, BLOCK), blocks, side, inner, *scalars,
        TALL=tall, POLYNOMIAL=g is not None, ROWS=rows, INNER=step, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@torch.library.custom_op("dwslm::gram", mutates_args=())
def gram(x: Tensor, tall: bool) -> Tensor:
    """X X^T [N, m, m] of each matrix [m, n] of a stack; where `tall`, X^T X [N, n, n]. Sides are multiples of 128."""
    return launch(x, None, (0.0, 0.0, 0.0), tall)


@torch.library.custom_op("dwslm::gram_polynomial", mutates_args=())
def gram_polynomial(g: Tensor, a: float, b: float, c: float) -> Tensor:
    """a I + b G + c G G [N, m, m] of symmetric matrices; m is a multiple of 128."""
    return launch(g, g, (a, b, c), False)


@gram.register_fake
def _(x: Tensor, tall: bool) -> Tensor:
    side = x.shape[2] if tall else x.shape[1]
    return x.new_empty(x.shape[0], side, side)


@gram_polynomial.register_fake
def _(g: Tensor, a: float, b: float, c: float) -> Tensor:
    return g.new_empty(g.shape)
