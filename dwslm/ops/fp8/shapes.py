"""Empty results of the operators of `quantize`: what the compiler is told of them, and what their kernels write to."""

import torch
from torch import Tensor

from dwslm.ops.fp8.formats import FP8

TILE = 128, 128  # of `both`: rows and columns of one program


def tiles(x: Tensor) -> int:
    """Programs of `both` on x."""
    return -(-x.shape[0] // TILE[0]) * -(-x.shape[1] // TILE[1])


def rows(x: Tensor, square: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def rows_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[::-1], dtype=FP8), x.new_empty(x.shape[1], 1, dtype=torch.float32)


def rows_gradient(da: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape), *rows(h, False)


def both(
    x: Tensor,
    a: Tensor | None,
    square: bool,
    peaks: Tensor,
    index: int,
    factor: float = 1.0,
    a_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = tiles(x) if x.is_cuda else 1
    return (
        x.new_empty(x.shape, dtype=FP8),
        x.new_empty(x.shape[::-1], dtype=FP8),
        x.new_empty(1, 1, dtype=torch.float32),
        x.new_empty(count, dtype=torch.float32),
    )


def largest(tiles: list[Tensor]) -> Tensor:
    return tiles[0].new_empty(len(tiles))
