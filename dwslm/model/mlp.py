"""The feed-forward sublayer."""

import torch
from torch import Tensor, nn

from dwslm.model.projection import OutputBlock, Projection
from dwslm.ops.mlp import squared_relu_mlp


class MLP(nn.Module):
    """width -> hidden -> width with a squared ReLU, no gate, no bias; `precision` as in `dwslm.ops.mlp`."""

    def __init__(self, width: int, hidden: int, precision: str, dtype: torch.dtype):
        super().__init__()
        self.precision = precision
        self.up = Projection(width, OutputBlock("", hidden), dtype=dtype)
        self.down = Projection(hidden, OutputBlock("", width), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] to [T, width]."""
        return squared_relu_mlp(x, self.up.weight, self.down.weight, self.precision)
