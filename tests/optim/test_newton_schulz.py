"""Newton-Schulz against the exact polar factor, U V^T of a float64 SVD."""

import pytest
import torch
from torch import Tensor

from dwslm.optim.newton_schulz import COEFFICIENTS, newton_schulz


def polar_factor(matrix: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vt


def with_spectrum(m: int, n: int, power: float | None) -> Tensor:
    """Gaussian [m, n] if power is None, else random singular vectors with singular values k^-power."""
    gaussian = torch.randn(m, n, dtype=torch.float64)
    if power is None:
        return gaussian.float()
    u, _, vt = torch.linalg.svd(gaussian, full_matrices=False)
    return ((u * torch.arange(1, min(m, n) + 1) ** -power) @ vt).float()


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a * b).sum() / (a.norm() * b.norm())).item()


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (128, 128), (1, 40), (40, 1)])
@pytest.mark.parametrize("power", [None, 1.0])
@pytest.mark.parametrize(("coefficients", "least"), [("polar_express", 0.99), ("quintic", 0.96)])
def test_close_to_the_polar_factor(
    shape: tuple[int, int], power: float | None, coefficients: str, least: float
) -> None:
    matrix = with_spectrum(*shape, power)
    result = newton_schulz(matrix, coefficients)
    assert result.shape == matrix.shape and result.dtype == torch.float32
    assert cosine(result, polar_factor(matrix)) > least


@pytest.mark.parametrize(
    ("power", "polar_express", "quintic", "within"),
    [(None, 0.995, 0.987, 0.002), (1.0, 0.994, 0.963, 0.002), (1.5, 0.629, 0.542, 0.02)],
)
def test_measured_cosines_at_full_size(
    power: float | None, polar_express: float, quintic: float, within: float
) -> None:
    """768 x 2048 in bfloat16, against figures measured with another implementation."""
    matrix = with_spectrum(768, 2048, power)
    exact = polar_factor(matrix)
    result = {name: cosine(newton_schulz(matrix, name, torch.bfloat16), exact) for name in COEFFICIENTS}
    assert result == pytest.approx({"polar_express": polar_express, "quintic": quintic}, abs=within)


@pytest.mark.parametrize("coefficients", list(COEFFICIENTS))
def test_singular_values_follow_the_scalar_polynomials(coefficients: str) -> None:
    """With known singular values the iteration is a polynomial of each: worked out one scalar at a time."""
    values = [0.9, 0.5, 0.1, 0.01]
    u, _, vt = torch.linalg.svd(torch.randn(4, 7, dtype=torch.float64), full_matrices=False)
    norm = 1.01 * sum(v * v for v in values) ** 0.5
    expected = []
    for value in values:
        x = value / norm
        for a, b, c in COEFFICIENTS[coefficients]:
            x = a * x + b * x**3 + c * x**5
        expected.append(x)
    result = newton_schulz((u * torch.tensor(values)) @ vt, coefficients, torch.float64)
    torch.testing.assert_close(result, (u * torch.tensor(expected, dtype=torch.float64)) @ vt, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_each_matrix_of_a_stack_on_its_own(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    alone = torch.stack([newton_schulz(matrix) for matrix in stack])
    torch.testing.assert_close(newton_schulz(stack), alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(newton_schulz(stack[:1]), alone[:1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-16, 1e-6, 1e15])
def test_scale_changes_nothing(scale: float) -> None:
    matrix = torch.randn(32, 48)
    torch.testing.assert_close(newton_schulz(matrix * scale), newton_schulz(matrix), rtol=1e-4, atol=1e-5)


def test_underflowing_matrix_does_not_blow_up() -> None:
    """Entries of 1e-25 have squares below float32's range: the measured norm is 0."""
    assert newton_schulz(torch.randn(16, 16) * 1e-25).norm() < 10


def test_zero_gives_zero() -> None:
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def test_transposing_commutes() -> None:
    matrix = torch.randn(20, 50)
    torch.testing.assert_close(newton_schulz(matrix.mT), newton_schulz(matrix).mT)


def test_bfloat16_products() -> None:
    matrix = torch.randn(64, 96)
    assert cosine(newton_schulz(matrix, dtype=torch.bfloat16), polar_factor(matrix)) > 0.99
