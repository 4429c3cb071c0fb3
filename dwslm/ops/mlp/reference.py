"""The float32 truth of the squared-ReLU layer."""

import torch
from torch import Tensor


def squared_relu_mlp_reference(x: Tensor, up: Tensor, down: Tensor, factor: float = 1.0) -> Tensor:
    """Arguments as in `squared_relu_mlp`; float32 throughout."""
    hidden = torch.clamp(x.float() @ up.float().T, min=0.0)
    return factor * (hidden * hidden) @ down.float().T
