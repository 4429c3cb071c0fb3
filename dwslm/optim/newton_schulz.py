"""Newton-Schulz iterations: nearly the orthogonal polar factor of a matrix, by matrix products alone."""

import torch
from torch import Tensor

from dwslm.ops import choice

ENGINES = ("symmetric", "plain")
BLOCK = 128  # side of the blocks that "symmetric" computes and mirrors

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


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("Newton-Schulz", engine, ENGINES)


def misfit(device: torch.device, dtype: torch.dtype, m: int, n: int) -> str | None:
    """Why "symmetric" cannot take m x n matrices with products in `dtype`, and the way out; None where it can."""
    if reason := choice.misfit(device):
        return f"{reason}: choose auto or plain"
    if torch.cuda.get_device_capability(device) < (9, 0):  # its tiles want Hopper's shared memory and matrix units
        return "needs a GPU of compute capability 9.0 or later: choose auto or plain"
    if dtype != torch.bfloat16:
        return f"takes products in bfloat16, not {str(dtype).removeprefix('torch.')}: choose auto or plain"
    if min(m, n) < 2 * BLOCK or m % BLOCK or n % BLOCK:  # one block has no mirror image
        return f"takes sides that are multiples of {BLOCK}, from {2 * BLOCK} on, not {m} x {n}: choose auto or plain"
    return None


def resolve(engine: str, device: torch.device, dtype: torch.dtype, m: int, n: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "symmetric" where that fits, else "plain".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    check_name(engine)
    if engine == "plain":
        return engine
    reason = misfit(device, dtype, m, n)
    if reason and engine == "symmetric":
        raise ValueError(f"Newton-Schulz engine 'symmetric' {reason}")
    return "plain" if reason else "symmetric"


def newton_schulz(
    matrices: Tensor, coefficients: str = "polar_express", dtype: torch.dtype = torch.float32, engine: str = "auto"
) -> Tensor:
    """About U V^T for each matrix U S V^T of a stack; zero for a zero matrix.

    matrices: [..., m, n], any float dtype. coefficients: a name in COEFFICIENTS.
    dtype: of the matrix products; the norm is taken in the dtype of `matrices` (at least float32).
    engine: "symmetric" computes half of each symmetric product, "plain" leaves all to `torch.bmm`; or `auto`.
    Returns [..., m, n] in the dtype of `matrices`. Scaling a matrix by a positive number changes nothing but
    rounding. Raises ValueError as `resolve` does.
    Sources: Muon (Jordan et al. 2024), Polar Express (arXiv 2505.16932).
    """
    *batch, m, n = matrices.shape
    x = matrices.reshape(-1, m, n)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = x.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    x = (x / (norm * SAFETY).clamp_min(SMALLEST_NORM)).to(dtype)
    iterate = _symmetric if resolve(engine, x.device, dtype, m, n) == "symmetric" else _plain
    return iterate(x, COEFFICIENTS[coefficients]).reshape(*batch, m, n).to(matrices.dtype)


def _plain(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    tall = x.shape[1] > x.shape[2]
    if tall:  # the Gram matrix below then has the smaller side
        x = x.mT
    for a, b, c in steps:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G G
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a X + (b G + c G G) X
    return x.mT if tall else x


def _symmetric(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """a joins the polynomial, a I + b G + c G G: `baddbmm` would copy X first and read it once more, 3 of 5 passes over X.

    On its diagonal a is rounded with the rest, by 2^-9 at most: no more than each X is anyway.
    """
    from dwslm.optim.symmetric import gram, gram_polynomial  # Triton is there on GPU machines only

    tall = x.shape[1] > x.shape[2]
    for a, b, c in steps:
        polynomial = gram_polynomial(gram(x, tall), a, b, c)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
    return x
