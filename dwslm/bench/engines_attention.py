"""An attention engine that training does not use: FlashAttention-3. Imported when asked for."""

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


def _function(module: str) -> Callable[..., Any]:
    try:
        return importlib.import_module(module).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{module} cannot be used ({error})") from error
