"""A linear map without bias whose output is multiplied by a number, inside the product: no pass over the output, one rounding."""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("dwslm::scaled_matmul", mutates_args=())
def _scaled(a: Tensor, b: Tensor, factor: float) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(out, a, b, beta=0, alpha=factor, out=out)  # beta 0: what is in `out` is not read


@_scaled.register_fake
def _(a: Tensor, b: Tensor, factor: float) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def scaled_matmul(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor * a @ b without a gradient, for a [n, k] and b [k, m] of one dtype, row-major or transposed: [n, m].

    The sum is multiplied before it is rounded, by the alpha of BLAS. To the compiler it is an operator without insides: where
    pointwise operations follow an `addmm`, its patterns would take it apart again. A factor of 1 is the product itself.
    """
    return a @ b if factor == 1 else _scaled(a, b, factor)


class ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, factor: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return scaled_matmul(x, weight.t(), factor)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        dx = scaled_matmul(dy, weight, ctx.factor) if ctx.needs_input_grad[0] else None
        dweight = scaled_matmul(dy.t(), x, ctx.factor) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def scaled_product(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    """factor * x @ weight^T, for x [T, k] and weight [m, k] of one dtype: [T, m] in that dtype.

    Gradients come in the same dtype as without a factor, those of bfloat16 weights in bfloat16: dx = factor * dy @ weight and
    dweight = factor * dy^T x, summed in float32 and rounded once. Same input, same bits. A factor of 1 is `F.linear` itself.
    """
    return F.linear(x, weight) if factor == 1 else ScaledProduct.apply(x, weight, factor)
