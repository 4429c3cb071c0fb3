"""Root-mean-square and Euclidean normalisation, computed in float32 and returned in the input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, times `gain` [x.shape[-1]] where given (arXiv 1910.07467)."""
    y = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return (y if gain is None else y * gain.float()).to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
