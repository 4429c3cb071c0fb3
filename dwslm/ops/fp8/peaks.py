"""The state of delayed scales: the largest magnitudes that the micro-batch before has shown."""

import torch
from torch import Tensor


def new_peaks(count: int, device: torch.device | None = None) -> Tensor:
    """State of what scales `count` tensors, float32 [count]: their largest magnitudes in the last micro-batch.

    0 is "not seen yet": the peak is then taken from the tensor at hand. It is a leaf that asks for a gradient, and its gradient
    is not one: backward hands out there the peaks that it saw. So a layer is a function without side effects. After each
    backward pass `remember` moves them into the state.
    """
    return torch.zeros(count, device=device, requires_grad=True)


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
    new, old = torch.cat(seen), torch.cat(states)
    kept = torch.where(new.isfinite() & (new > 0), new, old)
    torch._foreach_copy_(states, kept.split([len(state) for state in states]))
    for state in states:
        state.grad = None
