"""The engines that need a GPU: what each one asks for, and the choice among them."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from dwslm.ops.attention import cudnn, flash4
from dwslm.ops.attention.cudnn import attention_cudnn
from dwslm.ops.attention.flash import attention_flash, attention_flash_attn
from dwslm.ops.attention.flash4 import attention_flash4
from dwslm.ops.attention.flex import attention_flex

ENGINES: dict[str, Callable[..., Tensor]] = {
    "cudnn": attention_cudnn,
    "flash": attention_flash,
    "flash4": attention_flash4,
    "flash_attn": attention_flash_attn,
    "flex": attention_flex,
}
AUTO = ("cudnn", "flash")
"""What `auto` tries, the fastest first."""


# The compiler calls this while it traces and keeps the name it returns: what is installed does not change during a run.
@torch.compiler.assume_constant_result
def choose(engine: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """`resolve`, for a GPU or for an engine that needs one."""
    if engine == "auto":
        return next((name for name in AUTO if not misfit(name, device, dtype, head_dim)), "torch")
    if reason := misfit(engine, device, dtype, head_dim):
        raise ValueError(f"attention engine {engine!r} {reason}")
    return engine


def misfit(engine: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `engine` cannot be had for such heads on such a device, and the way out; None where it can."""
    if device.type != "cuda" or torch.version.hip:
        return f"needs an NVIDIA GPU, which {device} is not: choose auto or torch"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            "needs a GPU of the Ampere generation or newer (compute capability 8.0), and this one has "
            f"{capability[0]}.{capability[1]}: choose auto or torch"
        )
    if engine == "flex":
        if head_dim < 16:
            return f"needs heads of 16 or more, and head_dim is {head_dim}: choose auto or torch"
        return None if installed("triton") else "needs the package triton, which is not installed: pip install triton"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}: choose auto or torch"
    if engine == "cudnn":
        return cudnn.misfit(device, head_dim)
    if engine == "flash4":
        return flash4.misfit(device, dtype, head_dim)
    if head_dim % 8 or head_dim > 256:
        return f"needs heads of a multiple of 8 up to 256, and head_dim is {head_dim}: choose auto or torch"
    if engine == "flash":
        available = torch.backends.cuda.is_flash_attention_available()
        return None if available else "is not part of this build of PyTorch: choose auto or torch"
    try:
        # Its compiled part fails to load under another PyTorch than it was built with, and a later generation of the
        # package takes the same name without this function.
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except (ImportError, OSError) as error:
        return f"cannot be imported ({error}): pip install 'dwslm[flash-attn]'"
    return None


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
