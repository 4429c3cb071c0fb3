"""Output head and loss: cross-entropy of soft-capped logits, cap * tanh(head(h) / cap) (soft cap: arXiv 2408.00118).

The head's product and the loss are one op, because its gradients are made in the forward pass, a chunk of tokens at a time:
no chunk's logits outlive it, and nothing is computed twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dwslm.ops import choice
from dwslm.ops.loss_head import chunked, compiled
from dwslm.ops.loss_head.chunked import token_nats
from dwslm.ops.loss_head.fp8 import PEAKS, PRECISIONS, misfit, total_nats_delayed

IGNORE = -100


def _fused(*args: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    from dwslm.ops.loss_head.fused import value_and_gradients  # Triton is there on GPU machines only

    return value_and_gradients(*args)


ENGINES = {"fused": _fused, "compiled": compiled.value_and_gradients, "torch": chunked.value_and_gradients}

__all__ = [
    "ENGINES",
    "IGNORE",
    "PEAKS",
    "PRECISIONS",
    "check_name",
    "misfit",
    "resolve",
    "token_nats",
    "total_nats",
    "total_nats_delayed",
]


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("head", engine, ENGINES)


def resolve(engine: str, device: torch.device) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" on a GPU with Triton and "torch" elsewhere.

    Raises:
        ValueError: where a named engine cannot be had.
    """
    return choice.resolve("head", engine, choice.misfit(device), ENGINES)


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
        total, *ctx.made = ENGINES[engine](hidden, weight, targets, softcap, ignore, ctx.needs_input_grad[:2])
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        if ctx.made is None:
            raise RuntimeError("the loss head's gradients have been handed out already: call total_nats again")
        # Scaled where they lie, one pass each; and let go of, or autograd would copy what it is to add up.
        (d_hidden, d_weight, *factors), ctx.made = ctx.made, None
        if d_hidden is not None and factors:
            from dwslm.ops.loss_head.fused import scale_rows

            scale_rows(d_hidden, factors[0], grad)
        elif d_hidden is not None:
            torch.mul(d_hidden, grad, out=d_hidden)
        if d_weight is not None:
            same = d_weight.dtype == ctx.weight_dtype
            out = d_weight if same else torch.empty_like(d_weight, dtype=ctx.weight_dtype)
            d_weight = torch.mul(d_weight, grad, out=out)
        return d_hidden, d_weight, None, None, None, None
