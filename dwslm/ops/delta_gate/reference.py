"""The float32 truth of the delta rule's gates: the logistic function written out, in float64 inside."""

import torch
from torch import Tensor


def delta_gate_reference(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, logits: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """See `delta_gate`."""
    decays = []
    for head, rate in enumerate(torch.exp(a_log.double())):
        own = slice(head * len(dt_bias) // len(a_log), (head + 1) * len(dt_bias) // len(a_log))
        u = rate * (f[:, own].double() + dt_bias[own].double())
        decays.append(bound / (1 + torch.exp(-u)))
    beta = 1 / (1 + torch.exp(-logits.double()))
    return torch.stack(decays, dim=1).float(), beta.float()
