"""The update rules one by one, against references in float64 and against torch's own optimizers."""

from functools import partial

import pytest
import torch
from torch import Tensor

from dwslm.optim.adam import adam, adam_direction
from dwslm.optim.hyperball import adamh, frobenius, muonh, sphere_step
from dwslm.optim.muon import muon
from dwslm.optim.newton_schulz import newton_schulz

YES = torch.tensor(True)
NO = torch.tensor(False)


def rate(value: float) -> Tensor:
    return torch.tensor(value)


def test_frobenius_of_a_large_matrix() -> None:
    matrix = torch.randn(2, 1024, 2048)
    exact = matrix.double().square().sum((-2, -1)).sqrt()
    torch.testing.assert_close(frobenius(matrix).flatten().double(), exact, rtol=3e-7, atol=0)


def test_sphere_stepby_hand() -> None:
    """W = (3, 0; 0, 4), R = 5, u along the first entry: W' = (3 - 5/2, 0; 0, 4) at rate 1/2, then back to
    R."""
    weight = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    direction = torch.tensor([[[7.0, 0.0], [0.0, 0.0]]])
    weight = sphere_step(weight, direction, torch.tensor([5.0]), rate(0.5), YES)
    length = (0.5**2 + 4**2) ** 0.5
    torch.testing.assert_close(weight, torch.tensor([[[2.5 / length, 0.0], [0.0, 20 / length]]]))


@pytest.mark.parametrize("value", [1e-3, 3.7e-3, 0.1])
def test_step_has_length_rate_times_radius_before_projection(value: float) -> None:
    """Recovered from the result: W is along W0 - lr R u, u of length 1, so the triangle gives lr exactly."""
    before = torch.randn(3, 16, 24, dtype=torch.float64)
    radius = frobenius(before).flatten()
    direction = torch.randn(3, 16, 24, dtype=torch.float64)
    weight = sphere_step(before, direction, radius, torch.tensor(value, dtype=torch.float64), YES)
    for w, w0, u in zip(weight, before, direction, strict=True):
        # w c = w0 - s u_hat, two unknowns; least squares over all entries
        unit = u / u.norm()
        solution = torch.linalg.lstsq(torch.stack([w.flatten(), unit.flatten()], dim=1), w0.flatten()[:, None]).solution
        torch.testing.assert_close(solution[1].item() / w0.norm().item(), value, rtol=1e-9, atol=0)


def reference_muonh(weight: Tensor, gradients: list[Tensor], lr: float, mu: float) -> Tensor:  # float64, one matrix
    radius, momentum = weight.norm(), torch.zeros_like(weight)
    for gradient in gradients:
        momentum = mu * momentum + gradient
        u = newton_schulz(gradient + mu * momentum, dtype=torch.float64)
        weight = weight - lr * radius * u / u.norm()
        weight = radius * weight / weight.norm()
    return weight


def test_muonh_against_float64() -> None:
    weight = torch.randn(2, 12, 20)
    gradients = [torch.randn(2, 12, 20) for _ in range(10)]
    expected = [reference_muonh(weight[i].double(), [g[i].double() for g in gradients], 0.02, 0.95) for i in range(2)]
    momentum, radius = torch.zeros_like(weight), frobenius(weight).flatten()
    for gradient in gradients:
        weight, momentum = muonh(weight, momentum, gradient, radius, rate(0.02), YES, newton_schulz, mu=0.95)
    torch.testing.assert_close(weight.double(), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_muonh_ignores_the_gradient_scale() -> None:
    results = []
    for scale in (1e-8, 1.0, 1e8):
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(1, 12, 20, generator=generator)
        momentum, radius = torch.zeros_like(weight), frobenius(weight).flatten()
        for _ in range(5):
            gradient = torch.randn(1, 12, 20, generator=generator) * scale
            weight, momentum = muonh(weight, momentum, gradient, radius, rate(0.05), YES, newton_schulz, mu=0.95)
        results.append(weight)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[2], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_muon_against_float64(shape: tuple[int, int]) -> None:
    weight = torch.randn(1, *shape)
    expected, momentum64 = weight[0].double(), torch.zeros(shape, dtype=torch.float64)
    momentum = torch.zeros_like(weight)
    tall = max(1.0, shape[0] / shape[1]) ** 0.5
    for _ in range(10):
        gradient = torch.randn(1, *shape)
        weight, momentum = muon(weight, momentum, gradient, rate(0.02), YES, newton_schulz, mu=0.9, weight_decay=0.1)
        momentum64 = 0.9 * momentum64 + gradient[0].double()
        u = newton_schulz(gradient[0].double() + 0.9 * momentum64, dtype=torch.float64)
        expected = (1 - 0.02 * 0.1) * expected - 0.02 * tall * u
    torch.testing.assert_close(weight[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_muon_against_torch() -> None:
    """torch.optim.Muon averages momentum where we add it up: a factor, which only orthogonalising undoes."""
    weight = torch.randn(24, 16)
    parameter = torch.nn.Parameter(weight.clone())
    theirs = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    ours, momentum = weight[None].clone(), torch.zeros(1, 24, 16)
    orthogonal = partial(newton_schulz, coefficients="quintic", dtype=torch.bfloat16)
    for _ in range(5):
        parameter.grad = torch.randn(24, 16)
        ours, momentum = muon(
            ours, momentum, parameter.grad[None], rate(0.02), YES, orthogonal, mu=0.95, weight_decay=0.1
        )
        theirs.step()
    moved = (parameter.detach() - weight).norm()
    assert (ours[0] - parameter.detach()).norm() / moved < 0.02  # bfloat16 products, and their missing 1.01


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_against_torch(weight_decay: float) -> None:
    weights = [torch.randn(5, 3), torch.randn(7)]
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    theirs = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-10, weight_decay=weight_decay)
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in range(1, 31):
        directions = []
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            direction, *moments[i] = adam_direction(
                *moments[i], parameter.grad, YES, torch.tensor(step), betas=(0.9, 0.95), eps=1e-10
            )
            directions.append(direction)
        weights = adam(weights, directions, rate(1e-2), YES, weight_decay=weight_decay)
        theirs.step()
    for weight, parameter in zip(weights, parameters, strict=True):
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_adamh_is_adam_on_the_sphere() -> None:
    """A step of torch's AdamW gives the direction; its length and the projection are worked out here."""
    weight = torch.randn(1, 9, 4)
    m, v, radius = torch.zeros_like(weight), torch.zeros_like(weight), frobenius(weight).flatten()
    expected = weight[0].double()
    start = torch.zeros(9, 4)
    probe = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([probe], lr=1.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(1, 11):
        probe.grad = torch.randn(9, 4)
        with torch.no_grad():
            probe.zero_()
        theirs.step()
        u = -probe.detach().double()
        expected = expected - 0.01 * radius.double() * u / u.norm()
        expected = radius.double() * expected / expected.norm()
        count = torch.tensor(step)
        weight, m, v = adamh(
            weight, m, v, probe.grad[None], radius, rate(0.01), YES, count, betas=(0.9, 0.95), eps=1e-10
        )
    torch.testing.assert_close(weight[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_zero_gradient_moves_nothing_on_the_sphere() -> None:
    weight, zero = torch.randn(2, 6, 4), torch.zeros(2, 6, 4)
    radius = frobenius(weight).flatten() * (1 + 1e-6)  # within rounding of the sphere, not on it
    after, _ = muonh(weight, zero, zero, radius, rate(0.1), YES, newton_schulz, mu=0.95)
    assert torch.equal(after, weight)
    first = torch.tensor(1)
    after, *_ = adamh(weight, zero, zero, zero, radius, rate(0.1), YES, first, betas=(0.9, 0.95), eps=1e-10)
    assert torch.equal(after, weight)


def test_zero_gradient_in_one_matrix_of_a_stack() -> None:
    weight, zero, gradient = torch.randn(2, 6, 4), torch.zeros(2, 6, 4), torch.randn(2, 6, 4)
    gradient[0] = 0
    radius = frobenius(weight).flatten()
    after, _ = muonh(weight, zero, gradient, radius, rate(0.1), YES, newton_schulz, mu=0.95)
    assert torch.equal(after[0], weight[0])
    assert not torch.equal(after[1], weight[1])


def test_not_finite_changes_nothing() -> None:
    weight, first, second = torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.rand(2, 6, 4)
    bad, radius = torch.full((2, 6, 4), torch.nan), frobenius(weight).flatten()
    step = torch.tensor(0)  # the worst case: the bias correction divides by zero
    adam_settings = {"betas": (0.9, 0.95), "eps": 1e-10}
    results = [
        muonh(weight, first, bad, radius, rate(0.1), NO, newton_schulz, mu=0.95),
        muon(weight, first, bad, rate(0.1), NO, newton_schulz, mu=0.95, weight_decay=0.1),
        adamh(weight, first, second, bad, radius, rate(0.1), NO, step, **adam_settings),
    ]
    direction, *moments = adam_direction(first, second, bad, NO, step, **adam_settings)
    results.append((*adam([weight], [direction], rate(0.1), NO, weight_decay=0.1), *moments))
    for result in results:
        for tensor, given in zip(result, (weight, first, second), strict=False):
            assert torch.equal(tensor, given)
