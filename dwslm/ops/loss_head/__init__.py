"""Output head and loss: cross-entropy of soft-capped logits, cap * tanh(head(h) / cap) (soft cap: arXiv 2408.00118).

The head's product and the loss are one op, because its gradients are made in the forward pass, a chunk of tokens at a time:
no chunk's logits outlive it, and nothing is computed twice.
"""

import torch
from torch import Tensor

from dwslm.ops.loss_head import chunked, compiled
from dwslm.ops.loss_head.chunked import token_nats

IGNORE = -100
ENGINES = {"torch": chunked.value_and_gradients, "compiled": compiled.value_and_gradients}

__all__ = ["ENGINES", "IGNORE", "check_name", "resolve", "token_nats", "total_nats"]


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"unknown head engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")


def resolve(engine: str, device: torch.device) -> str:
    """Name of the engine that `engine` stands for: `auto` is "compiled" on a GPU and "torch" on a CPU."""
    check_name(engine)
    return ("compiled" if device.type == "cuda" else "torch") if engine == "auto" else engine


def total_nats(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, *, ignore: int = IGNORE, engine: str = "auto"
) -> Tensor:
    """Sum of -ln p(target) over positions whose target is not `ignore`; differentiable in `hidden` and `weight`.

    Args:
        hidden: [T, width], the final norm's output.
        weight: [vocabulary, width].
        targets: int64 [T].
        softcap: bound on the logits, positive.
        ignore: target value of positions that are not scored.
        engine: a name out of `ENGINES`, or `auto`.

    Returns:
        float32 scalar. Divide it by the global number of scored tokens before the backward pass.
    """
    return _TotalNats.apply(hidden, weight, targets, softcap, ignore, resolve(engine, hidden.device))


class _TotalNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap, ignore, engine):  # type: ignore[no-untyped-def]
        total, d_hidden, d_weight = ENGINES[engine](hidden, weight, targets, softcap, ignore, ctx.needs_input_grad[:2])
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = None if d_hidden is None else (d_hidden * grad).to(d_hidden.dtype)
        d_weight = None if d_weight is None else (d_weight * grad).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None
