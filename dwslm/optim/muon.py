"""Plain Muon (Jordan et al. 2024): an orthogonalised step in absolute units, with decoupled weight decay."""

from collections.abc import Callable

import torch
from torch import Tensor


def muon(
    weight: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    rate: Tensor,
    finite: Tensor,
    orthogonal: Callable[[Tensor], Tensor],
    *,
    mu: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """m = mu m + g;  u = NewtonSchulz(g + mu m);  W = (1 - rate weight_decay) W - rate sqrt(max(1, m/n)) u.

    weight, momentum, gradient: float32 [N, m, n], m outputs and n inputs. rate: 0-D tensor, the spectral norm
    of a square matrix's step; it has nothing to do with MuonH's relative rate. finite: 0-D bool. orthogonal:
    `newton_schulz` with its coefficients and dtype chosen. Returns weight and momentum, bit for bit the given
    ones where `finite` is false.
    """
    m, n = weight.shape[-2:]
    momentum = torch.where(finite, mu * momentum + gradient, momentum)
    direction = orthogonal(gradient + mu * momentum)
    moved = weight * (1 - rate * weight_decay) - direction * (rate * max(1.0, m / n) ** 0.5)
    return torch.where(finite, moved, weight), momentum
