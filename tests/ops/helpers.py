"""Shared by the op tests: boundaries of every awkward kind, and relative errors."""

import torch
from torch import Tensor

# Uneven, single-token and empty segments, in the middle and at the end.
UNEVEN = [0, 1, 1, 40, 64, 65, 100, 163, 200, 200, 200]


def boundaries(offsets: list[int]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth|; where the truth is zero (a gradient that cannot exist) the error is taken as it is."""
    size = truth.double().norm()
    return ((value.double() - truth.double()).norm() / (size if size > 1e-9 else 1.0)).item()


def output_and_gradients(f, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """f(*inputs) and the gradients of (f * weight).sum() for each input."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*inputs)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]
