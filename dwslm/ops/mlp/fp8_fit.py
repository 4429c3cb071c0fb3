"""What the delayed recipe's products with the squared ReLU inside ask for. Apart from the kernel, which only some machines can
import."""

import torch

from dwslm.ops import choice

ROWS, COLUMNS, INNER = 128, 256, 128  # of a tile: tokens, hidden, and a step along the width


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
    return choice.untried_triton("of which it uses experimental parts")
