"""A linear map whose three matrix products run in float8_e4m3, one scale per row of each operand.

A row is what shares one output coordinate: tokens and output channels forward (x, W), tokens and input channels for the
input's gradient (dy, W^T), output and input channels for the weight's (dy^T, x^T). Every product thus quantises its operands
along its own sum, which is what torch's row-wise scaled matmul takes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds [n, k] to float8_e4m3 with the row's largest magnitude at the format's largest value.

    Returns:
        The float8 values [n, k] and the float32 scales [n, 1] that multiply them back.
    """
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    return (x.float() / scale).to(FP8), scale


def scaled_product(a: Tensor, b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [n, k] times b^T for b [m, k], both quantised by rows; [n, m] in `dtype`.

    fast: let the tensor cores keep sums in their own registers, which have 14 bits (arXiv 2412.19437, section 3.5.2); else
    sums move to float32 registers every few products, which takes a fifth longer on Hopper.
    """
    return _product(*quantize_rows(a), *quantize_rows(b), dtype, fast)


# An operator of our own, since the compiler cannot trace torch's function in 2.11. Rounding stays outside, where it is fused.
@torch.library.custom_op("dwslm::fp8_product", mutates_args=())
def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    rows = ScalingType.RowWise
    return F.scaled_mm(a, b.t(), a_scale, rows, b_scale.t(), rows, output_dtype=dtype, use_fast_accum=fast)


@_product.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        dx = scaled_product(grad, weight.t().contiguous(), x.dtype, fast=True)
        # A sum over all tokens of the micro-batch is too long for short registers.
        dw = scaled_product(grad.t().contiguous(), x.t().contiguous(), weight.dtype, fast=False)
        return dx, dw


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[T, in] by [out, in] to [T, out] in x's dtype.

    Raises:
        ValueError: on a GPU older than Ada or Hopper (compute capability 8.9), or for sizes that are no multiples of 16.
    """
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise ValueError(
            f"FP8 products need compute capability 8.9 or later, and {torch.cuda.get_device_name(x.device)} has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(x.device)))}: set model.mlp_precision=model"
        )
    if x.shape[0] % 16 or x.shape[1] % 16 or weight.shape[0] % 16:
        raise ValueError(
            f"FP8 products need multiples of 16, not {x.shape[0]} tokens by {tuple(weight.shape)}: set model.mlp_precision=model"
        )
    return _Fp8Linear.apply(x, weight)
