"""The gated delta rule with one decay per key channel: Kimi Delta Attention (arXiv 2510.26692).

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T          S in R^{key_dim x value_dim}
    o_t = scale * S_t^T q_t                                                          S = 0 before each segment

Gated DeltaNet (arXiv 2412.06464) is the same recurrence with one decay a head: hand over g of that head broadcast over its
channels.
"""

from collections.abc import Callable

from torch import Tensor

from dwslm.ops.delta_rule.chunked import delta_rule_chunked
from dwslm.ops.segments import Segments

ENGINES: dict[str, Callable[..., Tensor]] = {"torch": delta_rule_chunked}


def resolve(engine: str) -> str:
    """Name of the engine that `engine` stands for; `auto` is the fastest one that is installed.

    Raises:
        ValueError: for a name that is not an engine.
    """
    name = "torch" if engine == "auto" else engine
    if name not in ENGINES:
        raise ValueError(f"unknown delta-rule engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")
    return name


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    *,
    scale: float,
    engine: str = "auto",
) -> Tensor:
    """The recurrence above over a packed batch.

    Args:
        q, k: [T, heads, key_dim], already normalised to length 1.
        v: [T, heads, value_dim].
        g: float32 [T, heads, key_dim], log decay, at most 0.
        beta: float32 [T, heads], in (0, 1).
        segments: boundaries; the state is zero at the start of each.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        [T, heads, value_dim] in v's dtype.
    """
    return ENGINES[resolve(engine)](q, k, v, g, beta, segments, scale=scale)
