import math

import pytest
import torch

from dwslm.ops.loss_head import IGNORE, chunked, compiled, resolve, token_nats, total_nats
from dwslm.ops.loss_head.reference import token_nats_reference
from tests.ops.helpers import relative_error


def draw(dtype: torch.dtype = torch.float32, size: float = 1.0):
    torch.manual_seed(0)
    hidden = (size * torch.randn(100, 32)).to(dtype).requires_grad_()
    weight = torch.randn(500, 32).to(dtype).requires_grad_()
    targets = torch.randint(0, 500, (100,))
    targets[::7] = IGNORE
    return hidden, weight, targets


@pytest.fixture(autouse=True)
def uncompiled(request, monkeypatch):
    """The compiled engine's function as it is: what the compiler makes of it is for the GPU's tests."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(compiled, "_compiled", lambda: compiled.loss_and_gradient)


@pytest.mark.parametrize("engine", ["torch", "compiled"])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_value_and_gradients_meet_the_reference(engine, size, chunk, monkeypatch):
    monkeypatch.setattr(compiled, "CHUNK_BYTES", chunk * 4 * 500)
    monkeypatch.setattr(chunked, "_chunks", lambda h, w: [slice(i, i + chunk) for i in range(0, len(h), chunk)])
    hidden, weight, targets = draw(size=size)
    want = token_nats_reference(hidden, weight, targets, 20.0, IGNORE)
    want_grads = torch.autograd.grad(want.sum() / 86, (hidden, weight))
    total = total_nats(hidden, weight, targets, 20.0, engine=engine)
    grads = torch.autograd.grad(total / 86, (hidden, weight))
    assert relative_error(total, want.sum()) < 1e-6
    assert max(relative_error(g, w) for g, w in zip(grads, want_grads, strict=True)) < 1e-5
    assert torch.allclose(token_nats(hidden, weight, targets, 20.0), want.detach(), atol=1e-5)


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_bfloat16_is_within_one_percent(engine):
    hidden, weight, targets = draw(torch.bfloat16)
    want = token_nats_reference(hidden.detach(), weight.detach(), targets, 20.0, IGNORE)
    h, w = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    want_grads = torch.autograd.grad(token_nats_reference(h, w, targets, 20.0, IGNORE).sum(), (h, w))
    total = total_nats(hidden, weight, targets, 20.0, engine=engine)
    assert relative_error(total, want.sum()) < 0.01
    for g, w in zip(torch.autograd.grad(total, (hidden, weight)), want_grads, strict=True):
        assert relative_error(g, w) < 0.01


def test_equal_logits_cost_the_log_of_the_vocabulary():
    nats = token_nats(torch.zeros(3, 4), torch.randn(50, 4), torch.tensor([1, IGNORE, 2]), 20.0)
    assert nats.tolist() == pytest.approx([math.log(50), 0.0, math.log(50)])


def test_the_cap_bounds_what_a_token_can_cost():
    """Logits of +-1e6 become +-20: the wrong one of two entries costs ln(1 + e^40) = 40."""
    nats = token_nats(torch.tensor([[1e6]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([1]), 20.0)
    assert nats.item() == pytest.approx(40.0)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, targets = draw()
    total_nats(hidden, weight.detach(), targets, 20.0).backward()
    assert hidden.grad is not None and weight.grad is None


def test_auto_compiles_on_a_gpu_only_and_an_unknown_engine_is_named():
    assert resolve("auto", torch.device("cpu")) == "torch" and resolve("auto", torch.device("cuda")) == "compiled"
    with pytest.raises(ValueError, match="unknown head engine 'cut'"):
        resolve("cut", torch.device("cpu"))


@pytest.mark.gpu
def test_the_compiled_engine_on_a_gpu_is_within_one_percent():
    hidden, weight = (torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) for n in (1000, 32768))
    hidden, weight = hidden.requires_grad_(), (weight / 8).detach().requires_grad_()
    targets = torch.randint(0, 32768, (1000,), device="cuda")
    targets[::7] = IGNORE
    want_inputs = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    want = token_nats_reference(*want_inputs, targets, 20.0, IGNORE).sum()
    total = total_nats(hidden, weight, targets, 20.0, engine="compiled")
    assert relative_error(total, want) < 1e-3
    grads, want_grads = torch.autograd.grad(total, (hidden, weight)), torch.autograd.grad(want, want_inputs)
    assert max(relative_error(g, w) for g, w in zip(grads, want_grads, strict=True)) < 0.01
