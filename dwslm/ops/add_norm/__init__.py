"""What every reader of the usual residual stream does: the last sublayer's output is added, and the sum normalised."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.fp8 import Operand, Rounding
from dwslm.ops.fp8.product import MULTIPLE
from dwslm.ops.norm import rms_norm

ENGINES = choice.ENGINES
MOST_WIDTH = (
    8192  # of which the fused kernel keeps rows in registers, and the next ones in shared memory, in float32 too
)
STEP, MOST_ROUNDED = 128, 1024
"""Widths that the fused kernel rounds: multiples of the first, up to the second; it reads the sum twice, out of the L2 cache."""


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


def rounds(engine: str, device: torch.device, width: int) -> bool:
    """Whether `add_norm_rounded` hands out a rounded norm in training, for micro-batches in multiples of 16 tokens."""
    return width % STEP == 0 and width <= MOST_ROUNDED and resolve(engine, device, width) == "fused"


def add_norm_rounded(
    x: Tensor, y: Tensor | None, gain: Tensor, eps: float, how: Rounding, engine: str = "auto"
) -> tuple[Tensor, Operand]:
    """`add_norm` for a product in FP8 with delayed scales that wants the norm as `how` says, and is its only reader.

    Where `rounds` says so, and there are gradients, the norm comes rounded, once, out of float32; else as from `add_norm`, and
    the product rounds again what was rounded to x's dtype: the two differ where the first rounding crosses a midpoint of float8.

    Raises:
        ValueError: as `resolve` does.
    """
    if torch.is_grad_enabled() and len(x) % MULTIPLE == 0 and rounds(engine, x.device, x.shape[1]):
        from dwslm.ops.add_norm.rounded import add_norm_rounded_fused

        return add_norm_rounded_fused(x, y, gain, eps, how)
    return add_norm(x, y, gain, eps, engine)


def last_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, engine: str = "auto") -> Tensor:
    """The second result of `add_norm` for a reader after which nobody wants the first: it has no gradient to be read then."""
    if resolve(engine, x.device, x.shape[1]) == "fused":
        from dwslm.ops.add_norm.fused import last_norm_fused

        return last_norm_fused(x, y, gain, eps)
    return add_norm(x, y, gain, eps, engine)[1]
