"""The loss head in plain PyTorch, in place where it can be: chunks small enough for a CPU's cache.

The soft cap bounds every logit, so exp(z - softcap) can neither overflow nor lose its row: no maximum is needed.
"""

import torch
from torch import Tensor

CPU_BUDGET = 2**23  # bytes of float32 logits in a chunk
GPU_BUDGET = 2**30


def value_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int, needs_grad: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Total nats, and its gradients for hidden (in hidden's dtype) and weight (float32), None where not needed."""
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad[1] else None
    for rows in _chunks(hidden, weight):
        z, normaliser, scored, picked = _capped(hidden[rows] @ weight.T, targets[rows], softcap, ignore)
        total += torch.where(scored, softcap + normaliser.log()[:, 0] - softcap * picked, 0.0).sum()
        if not any(needs_grad):
            continue
        # d nats / d logit = (softmax - onehot) * (1 - tanh^2)
        p = (z * softcap).sub_(softcap).exp_().div_(normaliser)
        p.scatter_add_(1, targets[rows].where(scored, 0)[:, None], p.new_full((p.shape[0], 1), -1.0))
        p.addcmul_(p * z, z, value=-1.0).mul_(scored[:, None])
        d_logits = p.to(hidden.dtype)
        if d_hidden is not None:
            d_hidden[rows] = d_logits @ weight
        if d_weight is not None:
            d_weight += d_logits.T @ hidden[rows]
    return total, d_hidden, d_weight


@torch.no_grad()
def token_nats(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int = -100) -> Tensor:
    """float32 [T]: -ln p(target) at each position, 0 where the target is `ignore`. Arguments as in `total_nats`."""
    out = []
    for rows in _chunks(hidden, weight):
        _, normaliser, scored, picked = _capped(hidden[rows] @ weight.T, targets[rows], softcap, ignore)
        out.append(torch.where(scored, softcap + normaliser.log()[:, 0] - softcap * picked, 0.0))
    return torch.cat(out)


def _capped(logits: Tensor, targets: Tensor, softcap: float, ignore: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tanh(logits / softcap) in float32, sum of exp(softcap (tanh - 1)) by row, which rows count, tanh at the target."""
    z = logits.float().div_(softcap).tanh_()
    normaliser = (z * softcap).sub_(softcap).exp_().sum(-1, keepdim=True)
    scored = targets != ignore
    picked = z.gather(1, targets.where(scored, 0)[:, None])[:, 0]
    return z, normaliser, scored, picked


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Ranges of tokens whose float32 logits stay in a CPU's cache, or take about 1 GiB on a GPU."""
    budget = CPU_BUDGET if hidden.device.type == "cpu" else GPU_BUDGET
    size = max(1, budget // (4 * weight.shape[0]))
    return [slice(i, i + size) for i in range(0, hidden.shape[0], size)]
