"""The float32 truth of the loss head: all logits at once, textbook cross-entropy."""

import torch
from torch import Tensor


def token_nats_reference(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int) -> Tensor:
    """float32 [T]: -ln p(target) at each position, 0 where the target is `ignore`."""
    logits = softcap * torch.tanh(hidden.float() @ weight.float().T / softcap)
    log_p = logits - torch.log(torch.exp(logits).sum(-1, keepdim=True))
    scored = targets != ignore
    picked = log_p.gather(1, targets.where(scored, 0)[:, None])[:, 0]
    return torch.where(scored, -picked, 0.0)
