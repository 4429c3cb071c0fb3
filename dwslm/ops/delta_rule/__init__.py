"""The gated delta rule with one decay per key channel: Kimi Delta Attention (arXiv 2510.26692).

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T          S in R^{key_dim x value_dim}
    o_t = scale * S_t^T q_t                                                          S = 0 before each segment

Gated DeltaNet (arXiv 2412.06464) is the same recurrence with one decay a head: `gated_delta_rule`.
"""

import torch
from torch import Tensor

from dwslm.ops.delta_rule.chunked import delta_rule_chunked
from dwslm.ops.segments import Segments

ENGINES = ("fused", "cudnn", "fla", "torch")
# Has kernels for one decay a head only. The others take that too, broadcast over the channels, and `auto` is one of them.
SCALAR_ENGINES = ("fla_gdn",)


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    names = ("auto", *ENGINES, *SCALAR_ENGINES)
    if engine not in names:
        raise ValueError(f"unknown delta-rule engine {engine!r}: choose one of {', '.join(names)}")


def resolve(
    engine: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    bounded: bool,
    scalar_gate: bool = False,
) -> str:
    """Name of the engine that computes: for `auto` the first of `ENGINES` that is installed and fits, else `engine` itself.

    Args:
        engine: a name, or `auto`.
        device, dtype: of the values.
        head_dim: width of a head.
        bounded: whether no log decay is less than -5.
        scalar_gate: whether there is one decay a head instead of one per channel.

    Raises:
        ValueError: for an unknown name, or an engine that is missing or does not fit: with the reason and the way out.
    """
    check_name(engine)
    if engine in SCALAR_ENGINES and not scalar_gate:
        raise ValueError(f"delta-rule engine {engine!r} takes one decay a head (model.local=gdn): use another for kda")
    if engine == "torch" or (engine == "auto" and device.type != "cuda"):
        return "torch"
    # Not at the top: it imports PyTorch's compiler, a second that a run on a CPU need not pay.
    from dwslm.ops.delta_rule import gpu

    return gpu.choose(engine, device, dtype, head_dim, bounded)


def decay_dtype(engine: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> torch.dtype:
    """In which the engine that `engine` comes to reads log decays: made in that, they are not rounded once more. Arguments as
    `resolve` takes them."""
    name = resolve(engine, device=device, dtype=dtype, head_dim=head_dim, bounded=bounded)
    return torch.bfloat16 if name == "fused" else torch.float32


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    *,
    scale: float,
    bounded: bool = False,
    engine: str = "auto",
) -> Tensor:
    """The recurrence above over a packed batch.

    Args:
        q, k: [T, heads, key_dim], already normalised to length 1.
        v: [T, heads, value_dim].
        g: [T, heads, key_dim], log decay, at most 0; float32, or `decay_dtype` of the engine.
        beta: float32 [T, heads], in (0, 1).
        segments: boundaries; the state is zero at the start of each.
        bounded: that no entry of g is less than -5, which the fast engines need.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        [T, heads, value_dim] in v's dtype.

    Raises:
        ValueError: as `resolve` does, and for log decays that the engine does not read.
    """
    name = resolve(engine, device=v.device, dtype=v.dtype, head_dim=q.shape[-1], bounded=bounded)
    return _run(name, q, k, v, g, beta, segments, scale)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    *,
    scale: float,
    bounded: bool = False,
    engine: str = "auto",
) -> Tensor:
    """The recurrence with one decay a head: g is float32 [T, heads]. All else as in `delta_rule`.

    Args:
        engine: a name out of `SCALAR_ENGINES` for kernels of its own; else g is broadcast for one out of `ENGINES`.
    """
    key_dim = q.shape[-1]
    name = resolve(engine, device=v.device, dtype=v.dtype, head_dim=key_dim, bounded=bounded, scalar_gate=True)
    if name not in SCALAR_ENGINES:
        g = g[:, :, None].expand(-1, -1, key_dim)
    return _run(name, q, k, v, g, beta, segments, scale)


def _run(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, scale: float
) -> Tensor:
    if name == "torch":
        return delta_rule_chunked(q, k, v, g, beta, segments, scale=scale)
    from dwslm.ops.delta_rule import gpu

    if name != "fused" and g.dtype != torch.float32:
        raise ValueError(
            f"delta-rule engine {name!r} reads float32 log decays, not {str(g.dtype).removeprefix('torch.')}"
        )
    return gpu.ENGINES[name].run(q, k, v, g, beta, segments, scale=scale)
