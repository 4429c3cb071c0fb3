import math

import pytest
import torch

from dwslm.ops import choice
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


@pytest.mark.parametrize("engine", ["torch", "compiled"])
@pytest.mark.parametrize("factor", [1.0, -0.25])
def test_any_upstream_gradient(engine, factor):
    """Both gradients are scaled where they lie, in float32 as in bfloat16: -0.25 is exact in either."""
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, targets = draw(dtype)
        once = torch.autograd.grad(total_nats(hidden, weight, targets, 20.0, engine=engine), (hidden, weight))
        total = total_nats(hidden, weight, targets, 20.0, engine=engine)
        scaled = torch.autograd.grad(factor * total, (hidden, weight))
        assert all(torch.equal(factor * a, b) and b.dtype == dtype for a, b in zip(once, scaled, strict=True))


def test_gradients_are_handed_out_once():
    hidden, weight, targets = draw()
    total = total_nats(hidden, weight, targets, 20.0)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        total.backward()


def test_auto_is_fused_on_a_gpu_only_and_what_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setattr(choice, "HAS_TRITON", True)
    assert resolve("auto", torch.device("cpu")) == "torch" and resolve("auto", torch.device("cuda")) == "fused"
    with pytest.raises(ValueError, match="unknown head engine 'cut'"):
        resolve("cut", torch.device("cpu"))
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["fused", "compiled"])
def test_engines_on_a_gpu_are_within_one_percent(engine):
    hidden, weight = (torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) for n in (1000, 32768))
    hidden, weight = hidden.requires_grad_(), (weight / 8).detach().requires_grad_()
    targets = torch.randint(0, 32768, (1000,), device="cuda")
    targets[::7] = IGNORE
    want_inputs = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    want = token_nats_reference(*want_inputs, targets, 20.0, IGNORE).sum()
    total = total_nats(hidden, weight, targets, 20.0, engine=engine)
    assert relative_error(total, want) < 1e-3
    grads, want_grads = torch.autograd.grad(total, (hidden, weight)), torch.autograd.grad(want, want_inputs)
    assert max(relative_error(g, w) for g, w in zip(grads, want_grads, strict=True)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [500, 4096, 5003])
@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.01)])
def test_fused_meets_the_reference(vocab, chunk, size, dtype, bound, monkeypatch):
    """Vocabularies that are and are not whole tiles, one chunk and many, a last one that is smaller."""
    from dwslm.ops.loss_head import fused

    monkeypatch.setattr(fused, "CHUNK_BYTES", chunk * dtype.itemsize * vocab)
    torch.manual_seed(0)
    hidden = (size * torch.randn(100, 64, device="cuda")).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 64, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (100,), device="cuda")
    targets[::7] = IGNORE
    # Truth from the logits as they are stored: how bfloat16 rounds large ones is the format's doing, not the engine's.
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    logits = (wide[0] @ wide[1].T).to(dtype).float()
    capped = 20 * torch.tanh((wide[0] @ wide[1].T + (logits - wide[0] @ wide[1].T).detach()) / 20)
    want = torch.nn.functional.cross_entropy(capped, targets, ignore_index=IGNORE, reduction="sum")
    want_grads = torch.autograd.grad(want / 86, wide)
    total = total_nats(hidden, weight, targets, 20.0, engine="fused")
    grads = torch.autograd.grad(total / 86, (hidden, weight))
    assert relative_error(total, want) < 1e-4
    assert max(relative_error(g, w) for g, w in zip(grads, want_grads, strict=True)) < bound
    again = total_nats(hidden, weight, targets, 20.0, engine="fused")
    assert torch.equal(total, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(again / 86, (hidden, weight)), strict=True))
    alone = total_nats(hidden.detach(), weight, targets, 20.0, engine="fused")
    assert torch.equal(torch.autograd.grad(alone / 86, weight)[0], grads[1])


@pytest.mark.gpu
def test_fused_in_a_recorded_graph_honours_new_targets():
    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(4096, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 4096, (64,), device="cuda")

    def run():
        total = total_nats(hidden, weight, targets, 20.0, engine="fused")
        return total.detach(), *torch.autograd.grad(total / 64, (hidden, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    targets.copy_(torch.randint(0, 4096, (64,), device="cuda"))
    targets[::5] = IGNORE
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(recorded, run(), strict=True))
