"""The loss head with its elementwise part compiled: logits are stored once in the compute dtype, then their gradient.

Between the three matrix products of a chunk there are two passes over its logits: one adds up the exponentials, one writes
the gradient. Everything in them is float32 in registers.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_BYTES = 2**30  # of a chunk's logits; larger chunks gain 2 % in time and cost memory in proportion


def value_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int, needs_grad: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `chunked.value_and_gradients`."""
    size = min(hidden.shape[0], max(1, CHUNK_BYTES // (hidden.element_size() * weight.shape[0])))
    totals = []
    d_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad[1] else None
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        total, d_logits = _compiled()(hidden[rows] @ weight.T, targets[rows], softcap, ignore)
        totals.append(total)
        if d_hidden is not None:
            torch.mm(d_logits, weight, out=d_hidden[rows])
        if d_weight is not None:
            d_weight += d_logits.T @ hidden[rows]
    return torch.stack(totals).sum(), d_hidden, d_weight


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(loss_and_gradient, fullgraph=True, dynamic=False)


def loss_and_gradient(logits: Tensor, targets: Tensor, softcap: float, ignore: int) -> tuple[Tensor, Tensor]:
    """Nats of the scored rows, float32 scalar, and d nats / d logits in the logits' dtype, for logits [n, vocabulary]."""
    z = torch.tanh(logits.float() / softcap)
    e = torch.exp(softcap * z - softcap)  # at most 1: the cap bounds every logit, so no maximum is needed
    normaliser = e.sum(-1, keepdim=True)
    scored = targets != ignore
    target = targets.where(scored, 0)[:, None]
    nats = softcap + normaliser.log() - softcap * z.gather(1, target)
    onehot = torch.arange(logits.shape[1], device=logits.device)[None, :] == target
    d_logits = (e / normaliser - onehot.float()) * (1 - z * z) * scored[:, None]
    return torch.where(scored[:, None], nats, 0.0).sum(), d_logits.to(logits.dtype)
