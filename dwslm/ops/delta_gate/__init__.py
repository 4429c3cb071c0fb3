"""The gates of Kimi Delta Attention (arXiv 2510.26692): how fast each key channel decays, and how far a step overwrites.

log decay = bound * sigmoid(exp(A_log) * (f + dt_bias))        beta = sigmoid(logits)
"""

import torch
from torch import Tensor

from dwslm.ops import choice

ENGINES = choice.ENGINES


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("gate", engine)


def resolve(engine: str, device: torch.device, head_dim: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    return choice.resolve("gate", engine, choice.misfit(device, head_dim))


def delta_gate(
    f: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    logits: Tensor,
    bound: float,
    engine: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Log decay and beta of every token.

    Args:
        f: [T, heads * head_dim], the decay's logits.
        a_log: float32 [heads]; dt_bias: float32 [heads * head_dim].
        logits: [T, heads], of beta; only its last dimension has to be dense.
        bound: the least log decay, below 0.
        engine: a name out of `ENGINES`, or `auto`.
        dtype: of the log decay.

    Returns:
        log decay, `dtype` [T, heads, head_dim] in (bound, 0); beta, float32 [T, heads] in (0, 1).

    Raises:
        ValueError: as `resolve` does.
    """
    heads = len(a_log)
    if resolve(engine, f.device, f.shape[1] // heads) == "fused":
        from dwslm.ops.delta_gate.fused import delta_gate_fused  # Triton is there on GPU machines only

        return delta_gate_fused(f, a_log, dt_bias, logits, bound, dtype)
    u = a_log.exp()[:, None] * (f.float() + dt_bias).unflatten(-1, (heads, -1))
    return (bound * torch.sigmoid(u)).to(dtype), torch.sigmoid(logits.float())
