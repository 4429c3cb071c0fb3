"""What the delayed recipe's products with the squared ReLU inside ask for, and what they fill. Apart from the kernel, which only
some machines can import."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.fp8.formats import FP8

ROWS, COLUMNS, INNER = 128, 256, 128  # of a tile: tokens, hidden, and a step along the width
WARPS = 4  # of a warpgroup, of which two multiply


def misfit(device: torch.device, tokens: int, width: int, hidden: int) -> str | None:
    """Why the fused products cannot take such a layer on a device; None where they can."""
    if reason := choice.misfit(device):
        return reason
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if tokens < ROWS or tokens % ROWS or width % INNER or width < 2 * INNER or hidden % COLUMNS:
        return (
            f"takes tokens in multiples of {ROWS}, model.width in multiples of {INNER} from {2 * INNER} on and model.mlp_hidden "
            f"in multiples of {COLUMNS}, not {tokens}, {width} and {hidden}"
        )
    return choice.untried_triton()


def resolve(engine: str, device: torch.device, tokens: int, width: int, hidden: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where it fits, else "torch", products and roundings apart.

    Raises:
        ValueError: where "fused" cannot be had.
    """
    return choice.resolve("MLP", engine, misfit(device, tokens, width, hidden))


def programs(x: Tensor, w: Tensor) -> int:
    """For x [T, width] and w [hidden, width]: as many as there are multiprocessors, or tiles."""
    tiles = x.shape[0] // ROWS * (w.shape[0] // COLUMNS)
    return min(torch.cuda.get_device_properties(x.device).multi_processor_count, tiles)


def empty(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `quantize.both` of [T, hidden]; on a GPU each warp has seen a peak of its own."""
    tokens, hidden = x.shape[0], w.shape[0]
    seen = programs(x, w) * 2 * WARPS if x.is_cuda else 1
    shapes = (tokens, hidden), (hidden, tokens), (1, 1), (seen,)
    a, b, c, d = (
        x.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(shapes, (FP8, FP8, torch.float32, torch.float32), strict=True)
    )
    return a, b, c, d
