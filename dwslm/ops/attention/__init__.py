"""Causal softmax attention inside segments, global or over a sliding window, with grouped key-value heads.

o_t = sum_s softmax_s(scale * q_t . k_s) v_s     over s <= t in t's segment, and s > t - window where a window is set
"""

import torch
from torch import Tensor

from dwslm.ops.attention.blocked import attention_blocked
from dwslm.ops.segments import Segments

ENGINES = ("cudnn", "flash", "flash4", "flash_attn", "flex", "torch")


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"unknown attention engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")


def resolve(engine: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Name of the engine that `engine` stands for.

    `auto` is "cudnn" where that fits: a Hopper GPU with nvidia-cudnn-frontend, bfloat16 or float16, no deterministic mode.
    Else it is "flash" where that fits: an NVIDIA GPU of the Ampere generation or newer, bfloat16 or float16. Else it is
    "torch". A named engine is never replaced by another.

    Raises:
        ValueError: for a name that is not an engine, and for an engine that is not installed or does not fit.
    """
    check_name(engine)
    if engine == "torch" or (engine == "auto" and device.type != "cuda"):
        return "torch"
    # Not at the top: it imports PyTorch's compiler, a second that a run on a CPU need not pay.
    from dwslm.ops.attention import gpu

    return gpu.choose(engine, device, dtype, head_dim)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    engine: str = "auto",
) -> Tensor:
    """Attention over a packed batch.

    Args:
        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], where kv_heads divides heads.
        segments: boundaries; nothing crosses them.
        scale: factor on the logits.
        window: tokens that a query sees, itself included; None for all before it.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        [T, heads, head_dim] in q's dtype.

    Raises:
        ValueError: as `resolve` does.
    """
    name = resolve(engine, q.device, q.dtype, q.shape[-1])
    if name == "torch":
        return attention_blocked(q, k, v, segments, scale=scale, window=window)
    from dwslm.ops.attention import gpu

    return gpu.ENGINES[name](q, k, v, segments, scale=scale, window=window)
