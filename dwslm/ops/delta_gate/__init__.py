"""The gates of Kimi Delta Attention (arXiv 2510.26692): how fast each key channel decays, and how far a step overwrites.

log decay = bound * sigmoid(exp(A_log) * (f + dt_bias))        beta = sigmoid(logits)
"""

import importlib.util

import torch
from torch import Tensor

ENGINES = ("fused", "torch")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # looked up once: a compiler cannot trace the look-up
HEAD_DIMS = (16, 32, 64, 128, 256)  # of the fused kernels


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"unknown gate engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")


def misfit(device: torch.device, head_dim: int) -> str | None:
    """Why "fused" cannot take this case, and the way out; None where it can."""
    if not (device.type == "cuda" and HAS_TRITON):
        return f"needs a GPU and Triton (it comes with torch there), not {device}: choose auto or torch"
    if head_dim not in HEAD_DIMS:
        return f"takes heads of 16, 32, 64, 128 or 256, and head_dim is {head_dim}: choose auto or torch"
    return None


def resolve(engine: str, device: torch.device, head_dim: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    check_name(engine)
    if engine == "torch":
        return engine
    reason = misfit(device, head_dim)
    if reason and engine == "fused":
        raise ValueError(f"gate engine 'fused' {reason}")
    return "torch" if reason else "fused"


def delta_gate(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float, engine: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log decay and beta of every token.

    Args:
        f: [T, heads * head_dim], the decay's logits.
        a_log: float32 [heads]; dt_bias: float32 [heads * head_dim].
        logits: [T, heads], of beta; only its last dimension has to be dense.
        bound: the least log decay, below 0.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        log decay, float32 [T, heads, head_dim] in (bound, 0); beta, float32 [T, heads] in (0, 1).

    Raises:
        ValueError: as `resolve` does.
    """
    heads = len(a_log)
    if resolve(engine, f.device, f.shape[1] // heads) == "fused":
        from dwslm.ops.delta_gate.fused import delta_gate_fused  # Triton is there on GPU machines only

        return delta_gate_fused(f, a_log, dt_bias, logits, bound)
    u = a_log.exp()[:, None] * (f.float() + dt_bias).unflatten(-1, (heads, -1))
    return bound * torch.sigmoid(u), torch.sigmoid(logits.float())
