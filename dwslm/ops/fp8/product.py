"""The product of two matrices in float8_e4m3, and where it can be had."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

MULTIPLE = 16
"""Every side of a product is a multiple of this."""


def filled(x: Tensor, multiple: int = MULTIPLE) -> Tensor:
    """[n, k] with rows of zeros up to a multiple; x itself where none is missing."""
    spare = -len(x) % multiple
    return F.pad(x, (0, 0, 0, spare)) if spare else x


def first_rows(y: Tensor, count: int) -> Tensor:
    """Without what `filled` has added; y itself where that is nothing, since a view of all has a derivative that copies."""
    return y if len(y) == count else y[:count]


@torch.library.custom_op("dwslm::fp8_product", mutates_args=())
def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [n, k] times b^T for b [m, k], float8 with scales [n, 1] and [m, 1], or [1, 1] both; [n, m] in `dtype`.

    fast: let the tensor cores keep sums in their own registers, which have 14 bits (arXiv 2412.19437, section 3.5.2); else
    sums move to float32 registers every few products. An operator of our own, since the compiler cannot trace torch's in 2.11.
    """
    if not a.is_cuda:  # the products of float8 values are exact in float32
        return (a.float() @ b.float().t() * (a_scale * b_scale.t())).to(dtype)
    how = ScalingType.TensorWise if a_scale.numel() == b_scale.numel() == 1 else ScalingType.RowWise
    return F.scaled_mm(a, b.t(), a_scale, how, b_scale.t(), how, output_dtype=dtype, use_fast_accum=fast)


@product.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def misfit(setting: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why products by matrices of such sides cannot run in FP8, and the way out; None where they can.

    setting: what asks for them, and is to be `model` otherwise.
    """
    cuda = device.type == "cuda"
    if cuda and torch.cuda.get_device_capability(device) < (8, 9):
        return (
            f"FP8 products need compute capability 8.9 or later, and {torch.cuda.get_device_name(device)} has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}: set {setting}=model, or compute on a CPU"
        )
    if cuda and dtype != torch.bfloat16:
        return f"FP8 products on a GPU give bfloat16, not {str(dtype).removeprefix('torch.')}: set model.dtype=bfloat16"
    if any(size < 1 or size % MULTIPLE for size in sizes):
        return f"FP8 products need widths that are multiples of {MULTIPLE}, not {sizes}: set {setting}=model"
    return None
