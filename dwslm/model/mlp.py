"""The feed-forward sublayer."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from dwslm.model.projection import OutputBlock, Projection
from dwslm.ops.mlp import new_peaks, squared_relu_mlp


class MLP(nn.Module):
    """width -> hidden -> width with a squared ReLU, no gate, no bias, times `factor`; `precision` and `engine` as in
    `dwslm.ops.mlp`.

    Attributes:
        peaks: what the last micro-batch left for the scales of the next where `precision` keeps such, else None. A buffer; it
            changes by `dwslm.ops.mlp.remember` alone.
    """

    peaks: Tensor | None

    def __init__(
        self, width: int, hidden: int, precision: str, dtype: torch.dtype, factor: float = 1.0, engine: str = "auto"
    ):
        super().__init__()
        self.precision, self.engine, self.factor = precision, engine, factor
        self.up = Projection(width, OutputBlock("", hidden), dtype=dtype)
        self.down = Projection(hidden, OutputBlock("", width), dtype=dtype)
        self.register_buffer("peaks", new_peaks() if precision == "fp8_delayed" else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.peaks is not None:  # moved like a weight: a leaf again, and float32 whatever the weights are cast to
            self.peaks = self.peaks.detach().float().requires_grad_()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] to [T, width]."""
        return squared_relu_mlp(
            x, self.up.weight, self.down.weight, self.precision, self.peaks, self.factor, self.engine
        )
