"""What the layer with its squared ReLU inside the products asks for. Apart from the kernel, which only some machines can
import."""

import torch

from dwslm.ops import choice

ROWS, COLUMNS, INNER = 128, 256, 64  # of a tile: tokens, hidden, and a step along the width


def misfit(device: torch.device, dtype: torch.dtype, tokens: int, width: int, hidden: int) -> str | None:
    """Why "fused" cannot take such a layer on a device; None where it can."""
    if reason := choice.misfit(device):
        return reason
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if dtype != torch.bfloat16:
        return f"multiplies in bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
    if tokens % ROWS or width % INNER or width <= 4 * INNER or hidden % COLUMNS:
        return (
            f"takes tokens in multiples of {ROWS}, model.width in multiples of {INNER} above {4 * INNER} and model.mlp_hidden in "
            f"multiples of {COLUMNS}, not {tokens}, {width} and {hidden}"
        )
    return choice.untried_triton()


def resolve(engine: str, device: torch.device, dtype: torch.dtype, tokens: int, width: int, hidden: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    return choice.resolve("MLP", engine, None if engine == "torch" else misfit(device, dtype, tokens, width, hidden))
