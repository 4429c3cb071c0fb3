"""What every reader of the usual residual stream does: the last sublayer's output is added, and the sum normalised."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.norm import rms_norm

ENGINES = choice.ENGINES
MOST_WIDTH = (
    8192  # of which the fused kernel keeps rows in registers, and the next ones in shared memory, in float32 too
)


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("norm", engine)


def resolve(engine: str, device: torch.device, width: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    reason = choice.misfit(device)
    if reason is None and width > MOST_WIDTH:
        reason = f"takes widths of up to {MOST_WIDTH}, not {width}"
    return choice.resolve("norm", engine, reason)


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, engine: str = "auto") -> tuple[Tensor, Tensor]:
    """Adds y to the stream and normalises the sum.

    Args:
        x: the stream, [T, width].
        y: output of the last sublayer in x's dtype, or None where there is none to add.
        gain: float32 [width].
        eps: added to the mean square.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        x + y, and rms_norm(x + y) * gain, both [T, width] in x's dtype.

    Raises:
        ValueError: as `resolve` does.
    """
    if resolve(engine, x.device, x.shape[1]) == "fused":
        from dwslm.ops.add_norm.fused import add_norm_fused  # Triton is there on GPU machines only

        return add_norm_fused(x, y, gain, eps)
    added = x if y is None else x + y
    return added, rms_norm(added, gain, eps)


def last_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, engine: str = "auto") -> Tensor:
    """The second result of `add_norm` for a reader after which nobody wants the first: it has no gradient to be read then."""
    if resolve(engine, x.device, x.shape[1]) == "fused":
        from dwslm.ops.add_norm.fused import last_norm_fused

        return last_norm_fused(x, y, gain, eps)
    return add_norm(x, y, gain, eps, engine)[1]
