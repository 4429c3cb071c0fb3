"""What the two engines for Hopper GPUs alone ask for."""

import torch
from torch import Tensor

from dwslm.ops import choice

HEAD_DIM = 128


def misfit(device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> str | None:
    """Why the engine cannot take this case, and the way out; None where it can."""
    if device.type != "cuda" or torch.version.hip:
        return f"needs a Hopper GPU (compute capability 9.0), and the device is {device}: choose auto"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return (
            "needs a Hopper GPU (compute capability 9.0), and this one has "
            f"{capability[0]}.{capability[1]}: choose auto or fla"
        )
    if dtype != torch.bfloat16:
        return f"computes in bfloat16, not in {str(dtype).removeprefix('torch.')}: choose auto"
    if head_dim != HEAD_DIM:
        return f"takes heads of {HEAD_DIM}, and head_dim is {head_dim}: choose auto or fla"
    if not bounded:
        return "needs log decays of -5 or more: set model.delta_gate=bounded, or choose auto"
    return None


def fused_misfit(device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> str | None:
    """The same for our own kernels, which are in Gluon and have been held to float32 with one version of Triton."""
    if reason := misfit(device, dtype, head_dim, bounded):
        return reason
    if reason := choice.untried_triton():
        return f"{reason}: choose auto, cudnn or fla"
    return None


def unreadable(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> str | None:
    """What the engine `fused` would read wrongly, beyond what `fused_misfit` is told; None where it reads all."""
    if v.shape[-1] != HEAD_DIM:
        return f"takes values of {HEAD_DIM} a head, and v has {v.shape[-1]}"
    gates = (torch.bfloat16, torch.float32)
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16 or g.dtype not in gates or beta.dtype != torch.float32:
        names = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v, g, beta))
        return f"takes q, k, v in bfloat16, g in bfloat16 or float32 and beta in float32, not {names}"
    return None
