"""MuonH and AdamH (arXiv 2606.16899): steps of a fixed length on the sphere of a matrix's initial norm.

The functions are pure and work on stacks of same-shaped matrices [N, m, n]. `rate` is a 0-D tensor and
`finite` a 0-D bool tensor: where it is false, what comes back is what was given, bit for bit. There is no
host read and no branch on data, so that they can be compiled and recorded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .adam import adam_direction

SMALLEST = torch.finfo(torch.float32).tiny


def frobenius(matrices: Tensor) -> Tensor:
    """Norm of each matrix [..., m, n] -> [..., 1, 1].

    Not torch.linalg.vector_norm: on a CPU it adds float32 squares one after another and is off by 1e-5 at a
    million elements, as much as the radius may drift in a whole run; `sum` adds pairwise.
    """
    return matrices.square().sum(dim=(-2, -1), keepdim=True).sqrt()


def sphere_step(weight: Tensor, direction: Tensor, radius: Tensor, rate: Tensor, finite: Tensor) -> Tensor:
    """W' = W - rate R u / ||u||;  R W' / ||W'||. A matrix whose direction is zero comes back as it is.

    weight, direction: float32 [N, m, n]; radius R: float32 [N]. `rate` is relative: about the angle turned,
    in radians. Returns the weight.
    """
    radius = radius[:, None, None]
    length = frobenius(direction)
    step = rate * radius / length.clamp_min(SMALLEST)
    # ||W - step u||^2 from three sums of one pass: the moved matrix would be written and read twice more for its norm.
    along = (weight * direction).sum(dim=(-2, -1), keepdim=True)
    moved = (frobenius(weight).square() - 2 * step * along + (rate * radius).square()).clamp_min(0).sqrt()
    scale = radius / moved.clamp_min(SMALLEST)
    return torch.where(finite & (length > 0), (weight - direction * step) * scale, weight)


def muonh(
    weight: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    radius: Tensor,
    rate: Tensor,
    finite: Tensor,
    orthogonal: Callable[[Tensor], Tensor],
    *,
    mu: float,
) -> tuple[Tensor, Tensor]:
    """m = mu m + g;  u = NewtonSchulz(g + mu m);  then a sphere step along u.

    weight, momentum, gradient: float32 [N, m, n]; radius: float32 [N]. orthogonal: `newton_schulz` with its
    coefficients and dtype chosen. Returns weight and momentum.
    """
    momentum = torch.where(finite, mu * momentum + gradient, momentum)
    direction = orthogonal(gradient + mu * momentum)
    return sphere_step(weight, direction, radius, rate, finite), momentum


def adamh(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    radius: Tensor,
    rate: Tensor,
    finite: Tensor,
    step: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sphere step along Adam's bias-corrected direction.

    weight, exp_avg, exp_avg_sq, gradient: float32 [N, m, n]; radius: float32 [N]; step, betas, eps: as in
    `adam_direction`. Returns weight, exp_avg and exp_avg_sq.
    """
    direction, exp_avg, exp_avg_sq = adam_direction(exp_avg, exp_avg_sq, gradient, finite, step, betas=betas, eps=eps)
    return sphere_step(weight, direction, radius, rate, finite), exp_avg, exp_avg_sq
