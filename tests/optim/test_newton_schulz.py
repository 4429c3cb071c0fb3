"""Newton-Schulz against the exact polar factor, U V^T of a float64 SVD."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dwslm.optim import newton_schulz as module
from dwslm.optim.newton_schulz import COEFFICIENTS, misfit, newton_schulz, resolve
from tests.ops.helpers import relative_error

GPU = torch.device("cuda")
BF16 = torch.bfloat16


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
    matrix, expected = with_known_result(coefficients)
    result = newton_schulz(matrix, coefficients, torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def with_known_result(coefficients: str) -> tuple[Tensor, Tensor]:
    """A matrix [4, 7] of known singular values: the iteration is a polynomial of each, worked out one scalar at a time."""
    values = [0.9, 0.5, 0.1, 0.01]
    u, _, vt = torch.linalg.svd(torch.randn(4, 7, dtype=torch.float64), full_matrices=False)
    norm = 1.01 * sum(v * v for v in values) ** 0.5
    expected = []
    for value in values:
        x = value / norm
        for a, b, c in COEFFICIENTS[coefficients]:
            x = a * x + b * x**3 + c * x**5
        expected.append(x)
    return (u * torch.tensor(values)) @ vt, (u * torch.tensor(expected, dtype=torch.float64)) @ vt


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


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("coefficients", list(COEFFICIENTS))
def test_symmetric_multiplies_by_the_right_polynomial_on_the_right_side(
    monkeypatch: pytest.MonkeyPatch, coefficients: str, tall: bool
) -> None:
    """With the kernel's two products replaced by what they stand for."""
    products = SimpleNamespace(
        gram=lambda x, tall: x.mT @ x if tall else x @ x.mT,
        gram_polynomial=lambda g, a, b, c: a * torch.eye(g.shape[-1]) + b * g + c * (g @ g),
    )
    monkeypatch.setitem(sys.modules, "dwslm.optim.symmetric", products)
    monkeypatch.setattr(module, "resolve", lambda *case: "symmetric")
    matrix, expected = with_known_result(coefficients)
    if tall:
        matrix, expected = matrix.mT, expected.mT
    torch.testing.assert_close(newton_schulz(matrix, coefficients, torch.float64), expected, rtol=1e-5, atol=1e-5)


def test_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert resolve("auto", cpu, BF16, 1024, 1024) == resolve("plain", GPU, BF16, 1024, 1024) == "plain"
    with pytest.raises(ValueError, match="needs a GPU and Triton .* not cpu: choose auto or plain"):
        newton_schulz(torch.randn(256, 256), dtype=BF16, engine="symmetric")
    with pytest.raises(ValueError, match="'fast': choose one of auto, symmetric, plain"):
        newton_schulz(torch.randn(4, 4), engine="fast")
    monkeypatch.setattr(module.choice, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert resolve("auto", GPU, BF16, 1024, 1024) == "plain"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve("auto", GPU, BF16, 1024, 4096) == resolve("symmetric", GPU, BF16, 256, 640) == "symmetric"
    assert "not float32" in (misfit(GPU, torch.float32, 1024, 1024) or "")
    for m, n in [(128, 1024), (1024, 128), (320, 1024), (1024, 1000)]:
        assert resolve("auto", GPU, BF16, m, n) == "plain"
        with pytest.raises(ValueError, match=f"from 256 on, not {m} x {n}"):
            resolve("symmetric", GPU, BF16, m, n)


@pytest.mark.gpu
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("count", "side", "inner"), [(1, 256, 256), (3, 384, 640), (2, 1024, 4096)])
def test_symmetric_products_meet_float64(count: int, side: int, inner: int, tall: bool) -> None:
    from dwslm.optim.symmetric import gram, gram_polynomial

    x = (torch.randn(count, side, inner) * inner**-0.5).to(BF16)
    want = x.double() @ x.double().mT
    x = (x.mT.contiguous() if tall else x).to(GPU)
    g = gram(x, tall)
    assert relative_error(g.cpu(), want) < 0.003  # one rounding: 2^-9 at most, an entry
    exact = g.cpu().double()
    want = 4.0429 * torch.eye(side) - 2.8089 * exact + 0.5 * exact @ exact
    p = gram_polynomial(g, 4.0429, -2.8089, 0.5)
    assert relative_error(p.cpu(), want) < 0.003
    for y, again in ((g, gram(x, tall)), (p, gram_polynomial(g, 4.0429, -2.8089, 0.5))):
        assert torch.equal(y, y.mT) and torch.equal(y, again)
    assert torch.equal(gram(x[-1:].clone(), tall), g[-1:])  # matrices of a stack do not see one another


@pytest.mark.gpu
def test_symmetric_products_keep_the_rules_of_custom_operators() -> None:
    from dwslm.optim.symmetric import gram, gram_polynomial

    x = torch.randn(2, 256, 384, device=GPU, dtype=BF16)
    torch.library.opcheck(gram, (x, False))
    torch.library.opcheck(gram, (x, True))
    torch.library.opcheck(gram_polynomial, (gram(x, False), 4.0, -3.0, 0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 256), (384, 1024), (4096, 1024)])
@pytest.mark.parametrize("coefficients", list(COEFFICIENTS))
def test_symmetric_meets_float32(shape: tuple[int, int], coefficients: str) -> None:
    stack = torch.randn(3, *shape, device=GPU) * torch.tensor([1e-3, 1.0, 0.0], device=GPU)[:, None, None]
    want = newton_schulz(stack, coefficients, engine="plain")
    got = newton_schulz(stack, coefficients, BF16, engine="symmetric")
    assert relative_error(got, want) < 0.02 and not got[2].any()
    plain = newton_schulz(stack, coefficients, BF16, engine="plain")
    assert relative_error(got, want) < 1.3 * relative_error(plain, want)  # a is rounded with the polynomial's diagonal
    assert torch.equal(got, newton_schulz(stack, coefficients, BF16, engine="symmetric"))
    compiled = torch.compile(newton_schulz, fullgraph=True)
    assert relative_error(compiled(stack, coefficients, BF16), want) < 0.02
