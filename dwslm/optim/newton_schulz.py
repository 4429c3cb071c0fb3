"""Newton-Schulz iterations: nearly the orthogonal polar factor of a matrix, by matrix products alone."""

import torch
from torch import Tensor

Step = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Step, ...]] = {
    # One optimal quintic per step (Polar Express, arXiv 2505.16932). The list belongs together: a shorter
    # schedule is another set of numbers, not a prefix of this one.
    "polar_express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
    # One quintic for every step (Keller Jordan's Muon): singular values end between about 0.7 and 1.2.
    "quintic": ((3.4445, -4.7750, 2.0315),) * 5,
}

# Polar Express' first polynomial turns downwards just above 1, where rounding could push the largest singular
# value.
SAFETY = 1.01

# Squares of entries below about 1e-19 leave float32. Dividing by less than this could blow up what the norm
# lost.
SMALLEST_NORM = 1e-18


def newton_schulz(matrices: Tensor, coefficients: str = "polar_express", dtype: torch.dtype = torch.float32) -> Tensor:
    """About U V^T for each matrix U S V^T of a stack; zero for a zero matrix.

    matrices: [..., m, n], any float dtype. coefficients: a name in COEFFICIENTS.
    dtype: of the matrix products; the norm is taken in the dtype of `matrices` (at least float32).
    Returns [..., m, n] in the dtype of `matrices`. Scaling a matrix by a positive number changes nothing but
    rounding.
    Sources: Muon (Jordan et al. 2024), Polar Express (arXiv 2505.16932).
    """
    *batch, m, n = matrices.shape
    x = matrices.reshape(-1, m, n)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = x.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    x = (x / (norm * SAFETY).clamp_min(SMALLEST_NORM)).to(dtype)
    if m > n:  # the Gram matrix below then has the smaller side
        x = x.mT
    for a, b, c in COEFFICIENTS[coefficients]:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G G
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a X + (b G + c G G) X
    if m > n:
        x = x.mT
    return x.reshape(*batch, m, n).to(matrices.dtype)
