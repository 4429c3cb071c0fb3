"""FlashAttention-2 (arXiv 2307.08691) on packed segments: PyTorch's own copy, and the flash-attn package.

Both are custom ops with gradients, so a compiled or recorded step takes them as they are. Boundaries are read on the device
at every call. The longest segment is given as `context`, which is an upper bound, constant, and known to the host.

The backward pass adds into dq by atomics unless it is told not to. PyTorch's asks torch.use_deterministic_algorithms by
itself; the package is told here.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from dwslm.ops.segments import Segments

# From 2.12 on PyTorch wants to be told of fewer key-value heads than query heads; before, it just takes them.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """See `attention`. bfloat16 or float16."""
    cu_seqlens, context = segments.cu_seqlens, segments.context
    return varlen_attn(  # type: ignore[return-value]  # a pair only where the log-sum-exp is asked for
        q, k, v, cu_seqlens, cu_seqlens, context, context, scale=scale, window_size=_reach(window), **GROUPED
    )


def attention_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """See `attention`. bfloat16 or float16."""
    from flash_attn import flash_attn_varlen_func

    cu_seqlens, context = segments.cu_seqlens, segments.context
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens.view(-1),  # the compiler refuses to trace a Python autograd function that gets one tensor twice
        context,
        context,
        softmax_scale=scale,
        causal=True,
        window_size=_reach(window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _reach(window: int | None) -> tuple[int, int]:
    """(keys seen to the left, to the right) besides a query's own; -1 is no bound."""
    return (-1 if window is None else window - 1, 0)
