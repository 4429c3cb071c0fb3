"""Weights that know what they are: fused linear maps made of named blocks, lookup tables, normalisation gains."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwslm.model.peaks import KeepsPeaks
from dwslm.ops import fp8
from dwslm.ops.fp8 import PEAKS, Operand, Rounding, delayed_linear
from dwslm.ops.fp8.product import filled
from dwslm.ops.norm import rms_norm
from dwslm.ops.scaled_product import scaled_product


@dataclass(frozen=True)
class OutputBlock:
    """Rows of a fused projection that form one logical matrix.

    Attributes:
        name: unique inside the projection, "" where it has one block.
        rows: output features.
        role: what the optimizer takes it for: "matrix", "head", or "vector" (thin gates).
        init: "normal" (scaled by fan-in) or "zero".
    """

    name: str
    rows: int
    role: str = "matrix"
    init: str = "normal"


class Projection(KeepsPeaks):
    """y = factor x W^T without bias, W [sum of rows, in_features] in the compute dtype; one product for all its blocks.

    Args:
        precision: `model` multiplies in the compute dtype, `fp8_delayed` in float8_e4m3 (`dwslm.ops.fp8`).
        align: y has a multiple of so many columns, in FP8 of 16. What is past the rows is zero.
    """

    def __init__(
        self,
        in_features: int,
        *blocks: OutputBlock,
        dtype: torch.dtype,
        precision: str = "model",
        factor: float = 1.0,
        align: int = 1,
    ):
        super().__init__()
        self.blocks = blocks
        self.rows = [block.rows for block in blocks]
        self.weight = nn.Parameter(torch.empty(sum(self.rows), in_features, dtype=dtype))
        self.precision, self.factor, self.align = precision, factor, align
        self.keep_peaks(0 if precision == "model" else len(PEAKS))

    def rounding(self) -> Rounding | None:
        """How x may come rounded; None where it may not."""
        return None if self.peaks is None else fp8.rounding(self.peaks, self.factor)

    def forward(self, x: Operand) -> Tensor:
        """[T, in_features] to [T, sum of rows, and columns of zeros up to `align`]."""
        if self.precision != "model":
            return delayed_linear(x, self.weight, self.peaks, self.factor)
        assert isinstance(x, Tensor), "rounded for nobody"
        return scaled_product(x, filled(self.weight, self.align), self.factor)


class Table(nn.Module):
    """Lookup table [entries, width], kept in float32: a gather reads few rows, and their gradients add up exactly.

    `role` is "embedding" or "value_table".
    """

    def __init__(self, entries: int, width: int, role: str):
        super().__init__()
        self.role = role
        self.weight = nn.Parameter(torch.empty(entries, width))

    def forward(self, index: Tensor) -> Tensor:
        """int64 [T] to float32 [T, width]."""
        return F.embedding(index, self.weight)


class Norm(nn.Module):
    """RMSNorm with a learned gain [width] in float32, 1 at the start.

    MuonH fixes the size of every matrix, so the model's freedom of scale lives in these gains.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain, self.eps)
