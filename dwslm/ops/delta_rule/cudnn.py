"""Kimi Delta Attention on Hopper: the fused CUDA kernels of NVIDIA's cuDNN frontend (`cudnn.linear_attention`).

The library has several implementations of this operation. The plan is pinned to the only one with a backward for Hopper, so
that it refuses what it cannot do instead of taking another. Its kernels are compiled by the first call of a process and kept on
disk; scratch is allocated by the first call of a shape, so that call must come before a CUDA graph is recorded.

Boundaries are read on the device, and what is launched depends on T and the number of slots alone. Each slot, empty or not,
costs a zeroed float32 state of heads x 128 x 128 forward and two backward. No kernel adds atomically.
"""

import atexit
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from dwslm.ops.delta_rule import hopper
from dwslm.ops.segments import Segments

SCALE = hopper.HEAD_DIM**-0.5
PLAN = "kda_hopper_cuda"


def misfit(device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> str | None:
    """Why the engine cannot take this case, and the way out; None where it can."""
    return hopper.misfit(device, dtype, head_dim, bounded) or unavailable()


@functools.cache
def unavailable() -> str | None:
    """Why the library cannot be used, or None."""
    try:
        _library()
    except (ImportError, OSError) as error:
        return f"needs nvidia-cudnn-frontend, which cannot be imported ({error}): pip install 'dwslm[gpu]'"
    return None


@functools.cache
def _library() -> Any:
    # What compiles the kernels: the library would miss it only at the first call.
    importlib.import_module("cuda.bindings.nvrtc")
    import cudnn.linear_attention.ops  # noqa: F401  registers the operators

    atexit.register(_drop_plans)
    return torch.ops.cudnn


def _drop_plans() -> None:
    """PyTorch never lets go of an operator, nor that of the library's plans; its bindings would call them leaks at exit."""
    from cudnn.linear_attention.ops import kda

    kda.fprop_cache.clear()
    kda.bprop_cache.clear()


def _refusals() -> tuple[type[Exception], ...]:
    import cudnn

    return NotImplementedError, cudnn.cudnnGraphNotSupportedError


def delta_rule_cudnn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, *, scale: float
) -> Tensor:
    """See `delta_rule`. bfloat16 q, k, v; log decays in [-5, 0].

    Raises:
        ValueError: for another scale than 128 ** -0.5, which the backward kernel has built in; or with the library's own
            words where it refuses (no CUDA headers to compile its kernels with, for instance).
    """
    if abs(scale - SCALE) > 1e-9:
        raise ValueError(f"delta-rule engine 'cudnn' takes scale {hopper.HEAD_DIM} ** -0.5 only, not {scale}")
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    return _forward(q, k, v, g, beta, segments.cu_seqlens)


# Operators of our own around the library's: they see to contiguous gradients and the pinned plan, and torch.compile never
# looks inside the library.


@torch.library.custom_op("dwslm::kda_cudnn", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    try:
        out, *_ = _library().kimi_delta_attention_fwd(q, k, v, g, beta, cu_seqlens, SCALE, plan_name=PLAN)
    except _refusals() as error:
        raise ValueError(f"delta-rule engine 'cudnn' was refused by cuDNN frontend: {error}") from error
    return out


@torch.library.custom_op("dwslm::kda_cudnn_backward", mutates_args=())
def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    try:
        dq, dk, dv, dg, dbeta, *_ = _library().kimi_delta_attention_bwd(
            do, q, k, v, g, beta, cu_seqlens, SCALE, plan_name=PLAN
        )
    except _refusals() as error:
        raise ValueError(f"delta-rule engine 'cudnn' was refused by cuDNN frontend: {error}") from error
    return dq, dk, dv, dg, dbeta


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.empty_like(v)


@_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, v, g, beta))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(do.contiguous(), *ctx.saved_tensors), None


_forward.register_autograd(_differentiate, setup_context=_save)
