"""Products in float8_e4m3: rounding to it, scales and their state, and the linear map of the mixers' projections.

`ops/mlp` is made of the same parts.
"""

import torch

from dwslm.ops.fp8 import product
from dwslm.ops.fp8.linear import PEAKS, SETTING, delayed_linear, rounding
from dwslm.ops.fp8.peaks import new_peaks, remember
from dwslm.ops.fp8.rounded import Operand, Rounded, Rounding, outline

__all__ = [
    "PEAKS",
    "PRECISIONS",
    "Operand",
    "Rounded",
    "Rounding",
    "delayed_linear",
    "misfit",
    "new_peaks",
    "outline",
    "remember",
    "rounding",
]

PRECISIONS = ("model", "fp8_delayed")


def misfit(precision: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why a precision cannot be had for linear maps between such sizes, and the way out; None where it can."""
    return None if precision == "model" else product.misfit(SETTING, device, dtype, *sizes)
