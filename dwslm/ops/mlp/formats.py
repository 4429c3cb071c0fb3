"""What float8_e4m3 holds here, and the scales. A value is stored as value / scale, a scale multiplies it back."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448

TINY = 1e-30
"""Peak of what is zero throughout: its scale must not be."""

MARGIN = 1.5
"""A delayed scale makes room for 1.5 times the peak that was last seen; what is beyond stops at the largest value."""

PEAKS = ("x", "up", "down", "a", "dy", "dh")
"""What the delayed recipe scales, in the order of its state."""


def new_peaks(device: torch.device | None = None) -> Tensor:
    """State of one layer under delayed scales, float32 [6] as `PEAKS`: largest magnitudes of the last micro-batch.

    0 is "not seen yet": the peak is then taken from the tensor at hand. It is a leaf that asks for a gradient, and its gradient
    is not one: backward hands out there the peaks that it saw. So the layer is a function without side effects. After each
    backward pass `remember` moves them into the state.
    """
    return torch.zeros(len(PEAKS), device=device, requires_grad=True)


@torch.no_grad()
def remember(states: list[Tensor]) -> None:
    """Moves what the last backward pass left as `.grad` into each state; a peak that is not finite, or zero, changes nothing.

    Nothing is read by the host. Raises RuntimeError for a state that took part in no backward pass.
    """
    if not states:
        return
    seen = [state.grad for state in states if state.grad is not None]
    if len(seen) < len(states):
        raise RuntimeError("a layer with delayed scales took part in no backward pass: its peaks are not known")
    new, old = torch.stack(seen), torch.stack(states)
    torch._foreach_copy_(states, list(torch.where(new.isfinite() & (new > 0), new, old)))
    for state in states:
        state.grad = None
