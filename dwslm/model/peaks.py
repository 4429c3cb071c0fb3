"""What modules with delayed FP8 scales have in common."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from dwslm.ops.fp8 import new_peaks


class KeepsPeaks(nn.Module):
    """A module that may have delayed FP8 scales.

    Attributes:
        peaks: what the last micro-batch left for the scales of the next, see `dwslm.ops.fp8.new_peaks`; None where the precision
            keeps nothing. A buffer; it changes by `dwslm.ops.fp8.remember` alone.
    """

    peaks: Tensor | None

    def keep_peaks(self, count: int) -> None:
        """Makes the state for so many tensors, or none for 0."""
        self.register_buffer("peaks", new_peaks(count) if count else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.peaks is not None:  # moved like a weight: a leaf again, and float32 whatever the weights are cast to
            self.peaks = self.peaks.detach().float().requires_grad_()
        return self
