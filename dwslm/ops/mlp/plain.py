"""The layer in the dtype of its input, which a compiler fuses where it can."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.ops.scaled_product import scaled_product


class SquaredRelu(torch.autograd.Function):
    """relu(h)^2. Its derivative 2 relu(h) is twice the root of its value, which the next product keeps anyway: h is not kept."""

    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        a = h.relu().square()
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx, da: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (a,) = ctx.saved_tensors
        return (da.float() * (2 * a.float().sqrt())).to(da.dtype)


def plain_mlp(x: Tensor, up: Tensor, down: Tensor, factor: float) -> Tensor:
    """`squared_relu_mlp` in plain PyTorch."""
    a: Tensor = SquaredRelu.apply(F.linear(x, up))
    return scaled_product(a, down, factor)
