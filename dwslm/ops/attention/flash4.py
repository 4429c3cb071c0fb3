"""FlashAttention-4 on packed segments: kernels of the package flash-attn-4 in NVIDIA's CuTe DSL, for Hopper and newer GPUs.

The package's inner functions are called, as custom operators with gradients, so that a compiled or recorded step takes them as
they are: its public function is an autograd function, which a compiler would trace into. Boundaries are read on the device in
each call, and nothing waits for the host. Blocks of threads are launched for T / 128 tiles a head and at most one more a slot.
q, k and v are read where they lie; where rows or addresses are no multiple of 16 bytes, the package copies them.

Kernels are compiled at a first call, seconds each: for a dtype, a head size, a number of query heads a key-value head, with a
window or without, for more than 256 slots or fewer, for segments of more than one tile or not. Other T, other numbers of slots
and other windows compile nothing. So a first call must come before a CUDA graph is recorded.

The backward pass adds into dq by atomics, and with fewer key-value heads into dk and dv too, unless it is told not to.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from dwslm.ops.segments import Segments

RESULTS = {"out", "lse"}
GRADIENTS = {"deterministic", "dq", "dk", "dv"}
"""What forward and backward are handed by name besides what `_told` says. Results are allocated here and handed in: what the
package returns has changed from release to release."""


HEADS = (64, 128)
"""Sizes whose gradients were held to float32 on a Hopper GPU, in bfloat16. Those of 16 in float16 were wrong (4.0.0b36)."""


def misfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the engine cannot take such heads on an NVIDIA GPU, and the way out; None where it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return (
            "needs a GPU of the Hopper generation or newer (compute capability 9.0), and this one has "
            f"{capability[0]}.{capability[1]}: choose auto or flash"
        )
    if dtype != torch.bfloat16 or head_dim not in HEADS:
        return (
            "was held to float32 in bfloat16 with heads of 64 and 128 alone, and these are "
            f"{str(dtype).removeprefix('torch.')} of {head_dim}: choose auto or flash"
        )
    if capability[0] == 12 and torch.are_deterministic_algorithms_enabled():
        return "has no deterministic backward pass for this GPU: set train.deterministic=false, or choose auto or flash"
    return unavailable()


@functools.cache
def unavailable() -> str | None:
    """Why the library cannot be used, or None."""
    try:
        _library()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"needs the package flash-attn-4, which cannot be imported ({error}): pip install 'dwslm[flash4]'"
    return None


@functools.cache
def _library() -> tuple[Any, Any]:
    """Forward and backward of the package. Neither is public: the public function brings an autograd function of its own."""
    from flash_attn.cute import interface

    forward, backward = interface._flash_attn_fwd, interface._flash_attn_bwd
    told = set(_told(torch.empty(0), 0, 0.0, 0))
    # Not public, so they change without notice.
    for function, names in ((forward, told | RESULTS), (backward, told | GRADIENTS)):
        if missing := names - set(inspect.signature(function).parameters):
            raise ImportError(f"another version: {function.__name__} takes no {', '.join(sorted(missing))}")
    return forward, backward


def attention_flash4(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """See `attention`. bfloat16, heads of 64 or 128."""
    seen = 0 if window is None or window >= segments.context else window
    return _forward(q, k, v, segments.cu_seqlens, segments.context, scale, seen)[0]


def _told(cu_seqlens: Tensor, context: int, scale: float, window: int) -> dict[str, Any]:
    """What both passes are told besides their tensors. `window` 0 is none; the package counts keys before the query's own."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": context,
        "max_seqlen_k": context,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0,
    }


@torch.library.custom_op("dwslm::attention_flash4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, context: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output [T, heads, head_dim] and log-sum-exps, float32 [heads, T]."""
    out, stats = _shapes(q, k, v, cu_seqlens, context, scale, window)
    with torch.cuda.device_of(q):
        _library()[0](q, k, v, **_told(cu_seqlens, context, scale, window), out=out, lse=stats)
    return out, stats


@torch.library.custom_op("dwslm::attention_flash4_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    context: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    with torch.cuda.device_of(q):
        _library()[1](
            q,
            k,
            v,
            out,
            do,
            stats,
            **_told(cu_seqlens, context, scale, window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
        )
    return dq, dk, dv


@_forward.register_fake
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, context: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, tokens), dtype=torch.float32)


@_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    context: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 7
    return *_backward(do.contiguous(), *ctx.saved_tensors, *ctx.settings), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
