"""Causal softmax attention inside segments, global or over a sliding window, with grouped key-value heads.

o_t = sum_s softmax_s(scale * q_t . k_s) v_s     over s <= t in t's segment, and s > t - window where a window is set
"""

from collections.abc import Callable

from torch import Tensor

from dwslm.ops.attention.blocked import attention_blocked
from dwslm.ops.segments import Segments

ENGINES: dict[str, Callable[..., Tensor]] = {"torch": attention_blocked}


def resolve(engine: str) -> str:
    """Name of the engine that `engine` stands for; `auto` is the fastest one that is installed.

    Raises:
        ValueError: for a name that is not an engine.
    """
    name = "torch" if engine == "auto" else engine
    if name not in ENGINES:
        raise ValueError(f"unknown attention engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")
    return name


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
    """
    return ENGINES[resolve(engine)](q, k, v, segments, scale=scale, window=window)
