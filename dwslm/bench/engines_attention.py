"""Attention engines that training does not use: cuDNN through its frontend, FlashAttention-3 and -4. Imported when asked for."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dwslm.bench.case import Run
from dwslm.ops.segments import Segments

Attend = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


def as_run(attend: Attend) -> Run:
    return lambda inputs, segments: (attend(inputs[0], inputs[1], inputs[2], segments),)


def cudnn(scale: float, window: int | None) -> Run:
    """cuDNN's attention over packed segments ("THD"), by the operator of nvidia-cudnn-frontend that has a gradient.

    Its graph is built for a number of slots, and built again for another. The backward pass wants the log-sum-exp padded to
    slots x heads x context.

    Raises:
        ValueError: where the frontend cannot be imported or knows no such operator.
    """
    try:
        importlib.import_module("cudnn.sdpa.fwd.torch_op")  # registers the operator
    except (ImportError, OSError, AttributeError) as error:
        raise ValueError(f"cuDNN frontend's attention cannot be imported ({error})") from error
    sdpa = torch.ops.cudnn.sdpa_fwd

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        cu_seqlens, context = segments.cu_seqlens, segments.context
        out, _ = sdpa(
            q,
            k,
            v,
            scale,
            is_causal=True,
            window_left=-1 if window is None else window,  # keys that a query sees, itself included
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=context,
            max_seqlen_kv=context,
            return_lse=True,
        )
        return out

    return as_run(attend)


def flash_attention_3(scale: float, window: int | None) -> Run:
    """FlashAttention-3 (arXiv 2407.08608), module `flash_attn_interface`.

    Raises:
        ValueError: where it cannot be imported.
    """
    call = _function("flash_attn_interface")

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        cu_seqlens, context = segments.cu_seqlens, segments.context
        out = call(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            context,
            context,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if window is None else window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return out[0] if isinstance(out, tuple) else out

    return as_run(attend)


def flash_attention_4(scale: float, window: int | None) -> Run:
    """FlashAttention-4, package flash-attn-4, module `flash_attn.cute`.

    Raises:
        ValueError: where it cannot be imported.
    """
    call = _function("flash_attn.cute.interface")

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        cu_seqlens, context = segments.cu_seqlens, segments.context
        out = call(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=context,
            max_seqlen_k=context,
            softmax_scale=scale,
            causal=True,
            window_size=(None if window is None else window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return out[0] if isinstance(out, tuple) else out

    return as_run(attend)


def _function(module: str) -> Callable[..., Any]:
    try:
        return importlib.import_module(module).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{module} cannot be used ({error})") from error
