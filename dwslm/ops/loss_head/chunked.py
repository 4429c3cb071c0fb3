"""The loss head a chunk of tokens at a time, with gradients made in the same pass so that no logits are kept.

The soft cap bounds every logit by `softcap`, so exp(z - softcap) can neither overflow nor lose its row: no maximum is needed.
"""

import torch
from torch import Tensor


def total_nats(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int = -100) -> Tensor:
    """Sum of -ln p(target) over positions whose target is not `ignore`; differentiable in `hidden` and `weight`.

    Args:
        hidden: [T, width], the final norm's output.
        weight: [vocabulary, width].
        targets: int64 [T].
        softcap: bound on the logits, positive.
        ignore: target value of positions that are not scored.

    Returns:
        float32 scalar. Divide it by the global number of scored tokens before the backward pass.
    """
    return _TotalNats.apply(hidden, weight, targets, softcap, ignore)


@torch.no_grad()
def token_nats(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int = -100) -> Tensor:
    """float32 [T]: -ln p(target) at each position, 0 where the target is `ignore`. Arguments as in `total_nats`."""
    out = []
    for rows in _chunks(hidden, weight):
        z, normaliser, scored, picked = _capped(hidden[rows] @ weight.T, targets[rows], softcap, ignore)
        out.append(torch.where(scored, softcap + normaliser.log()[:, 0] - softcap * picked, 0.0))
    return torch.cat(out)


class _TotalNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap, ignore):  # type: ignore[no-untyped-def]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        for rows in _chunks(hidden, weight):
            z, normaliser, scored, picked = _capped(hidden[rows] @ weight.T, targets[rows], softcap, ignore)
            nats = softcap + normaliser.log()[:, 0] - softcap * picked
            total += torch.where(scored, nats, 0.0).sum()
            if not (need_hidden or need_weight):
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
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = None if d_hidden is None else (d_hidden * grad).to(d_hidden.dtype)
        d_weight = None if d_weight is None else (d_weight * grad).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


def _capped(logits: Tensor, targets: Tensor, softcap: float, ignore: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tanh(logits / softcap) in float32, the sum of exp(softcap * (tanh - 1)) by row, which rows count, tanh at the target."""
    z = logits.float().div_(softcap).tanh_()
    normaliser = (z * softcap).sub_(softcap).exp_().sum(-1, keepdim=True)
    scored = targets != ignore
    picked = z.gather(1, targets.where(scored, 0)[:, None])[:, 0]
    return z, normaliser, scored, picked


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Token ranges whose float32 logits take about 1 GiB on an accelerator, or stay in a CPU's cache."""
    budget = 2**23 if hidden.device.type == "cpu" else 2**30
    size = max(1, budget // (4 * weight.shape[0]))
    return [slice(i, i + size) for i in range(0, hidden.shape[0], size)]
