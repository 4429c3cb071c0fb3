"""Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019), masked on the device."""

import torch
from torch import Tensor


def adam_direction(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    finite: Tensor,
    step: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bias-corrected direction m^ / (sqrt(v^) + eps), and both moments after this gradient.

    exp_avg, exp_avg_sq, gradient: float32, one shape. step: 0-D int64, this update included (1 at the first).
    finite: 0-D bool; where false the moments come back bit for bit and the direction means nothing.
    """
    beta1, beta2 = betas
    exp_avg = torch.where(finite, beta1 * exp_avg + (1 - beta1) * gradient, exp_avg)
    exp_avg_sq = torch.where(finite, beta2 * exp_avg_sq + (1 - beta2) * gradient.square(), exp_avg_sq)
    # float64: 1 - beta2^step loses two digits in float32 during the first steps
    correction1 = (1 - beta1 ** step.double()).float()
    correction2 = (1 - beta2 ** step.double()).float()
    direction = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + eps)
    return direction, exp_avg, exp_avg_sq


def adam(
    weights: list[Tensor],
    directions: list[Tensor],
    rate: Tensor,
    finite: Tensor,
    *,
    weight_decay: float,
) -> list[Tensor]:
    """W - rate (weight_decay W + direction) for each pair; W bit for bit where `finite` is false."""
    keep = 1 - rate * weight_decay
    return [
        torch.where(finite, weight * keep - rate * direction, weight)
        for weight, direction in zip(weights, directions, strict=True)
    ]
