"""The feed-forward sublayer."""

import torch
from torch import Tensor

from dwslm.model.peaks import KeepsPeaks
from dwslm.model.projection import OutputBlock, Projection
from dwslm.ops import mlp
from dwslm.ops.fp8 import Operand, Rounding
from dwslm.ops.mlp import PEAKS, squared_relu_mlp


class MLP(KeepsPeaks):
    """width -> hidden -> width with a squared ReLU, no gate, no bias, times `factor`; `precision` and `engine` as in
    `dwslm.ops.mlp`."""

    def __init__(
        self, width: int, hidden: int, precision: str, dtype: torch.dtype, factor: float = 1.0, engine: str = "auto"
    ):
        super().__init__()
        self.precision, self.engine, self.factor = precision, engine, factor
        self.up = Projection(width, OutputBlock("", hidden), dtype=dtype)
        self.down = Projection(hidden, OutputBlock("", width), dtype=dtype)
        self.keep_peaks(len(PEAKS) if precision == "fp8_delayed" else 0)

    def rounding(self) -> Rounding | None:
        """How x may come rounded; None where it may not."""
        return None if self.peaks is None else mlp.rounding(self.peaks)

    def forward(self, x: Operand) -> Tensor:
        """[T, width] to [T, width]."""
        return squared_relu_mlp(
            x, self.up.weight, self.down.weight, self.precision, self.peaks, self.factor, self.engine
        )
