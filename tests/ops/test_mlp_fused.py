"""The layer with its squared ReLU inside the products: what it asks for, and on a GPU its gate."""

from dataclasses import replace

import pytest
import torch

from dwslm.ops.mlp import fit, squared_relu_mlp
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from tests.model.small import SMALL
from tests.ops.helpers import output_and_gradients, relative_error

HOPPER = torch.device("cuda")
BF16 = torch.bfloat16


def draw(tokens: int, width: int, hidden: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(tokens + width)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, device="cuda", generator=g) * scale).to(BF16)

    return [
        normal(tokens, width, 1.0),
        normal(hidden, width, width**-0.5),
        normal(width, hidden, hidden**-0.5),
    ], normal(tokens, width, 1.0)


def test_what_does_not_fit_is_refused_by_name_and_left_by_auto(monkeypatch):
    monkeypatch.setattr(fit.choice, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fit.choice, "TRITON", "3.6.0")
    good = (HOPPER, BF16, 4096, 1024, 4096)
    assert (
        fit.resolve("auto", *good) == fit.resolve("fused", *good) == "fused" and fit.resolve("torch", *good) == "torch"
    )
    for wrong, word in (
        ((torch.device("cpu"), *good[1:]), "needs a GPU"),
        ((HOPPER, torch.float32, *good[2:]), "bfloat16"),
        ((HOPPER, BF16, 4000, 1024, 4096), "multiples of 128"),
        ((HOPPER, BF16, 4096, 256, 4096), "above 256"),
        ((HOPPER, BF16, 4096, 1024, 4224), "multiples of 256"),
    ):
        assert fit.resolve("auto", *wrong) == "torch"
        with pytest.raises(ValueError, match=word):
            fit.resolve("fused", *wrong)
    monkeypatch.setattr(fit.choice, "TRITON", "3.60.0")
    with pytest.raises(ValueError, match=r"Triton 3\.6, .* 3\.60\.0 is installed"):
        fit.resolve("fused", *good)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert fit.resolve("auto", *good) == "torch"


def test_float8_has_kernels_of_its_own():
    with pytest.raises(
        ValueError, match="model.mlp_engine=fused is for model.mlp_precision=model or fp8_delayed, not for fp8"
    ):
        replace(SMALL, mlp_engine="fused", mlp_precision="fp8").check()
    with pytest.raises(ValueError, match="unknown MLP engine"):
        replace(SMALL, mlp_engine="fast").check()


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 0.4])
@pytest.mark.parametrize(
    ("tokens", "width", "hidden"), [(128, 320, 256), (640, 1024, 4096), (17024, 512, 768), (4096, 2048, 512)]
)
def test_fused_meets_the_reference(tokens, width, hidden, factor):
    """Tiles fewer and more than programs, so that stages and turns go round."""
    if reason := fit.misfit(HOPPER, BF16, tokens, width, hidden):
        pytest.skip(reason)
    inputs, weight = draw(tokens, width, hidden)

    def run() -> list[torch.Tensor]:
        return output_and_gradients(lambda *x: squared_relu_mlp(*x, factor=factor, engine="fused"), inputs, weight)

    got = run()
    want = output_and_gradients(
        lambda *x: squared_relu_mlp_reference(*x, factor=factor), [x.float() for x in inputs], weight.float()
    )
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 0.01
    for _ in range(3):  # a race would move
        assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))


@pytest.mark.gpu
def test_fused_hands_on_what_is_not_finite():
    if reason := fit.misfit(HOPPER, BF16, 256, 320, 256):
        pytest.skip(reason)
    for value in (float("nan"), float("inf")):
        (x, up, down), weight = draw(256, 320, 256)
        x[200, 7] = value
        up[:, 7] = up[:, 7].abs() + 0.1
        y, dx, *_ = output_and_gradients(lambda *x: squared_relu_mlp(*x, engine="fused"), [x, up, down], weight)
        assert not y[200].isfinite().any() and not dx[200].isfinite().any() and y[:200].isfinite().all()


@pytest.mark.gpu
def test_fused_compiled_gives_the_same_bits():
    if reason := fit.misfit(HOPPER, BF16, 1280, 512, 1024):
        pytest.skip(reason)
    inputs, weight = draw(1280, 512, 1024)
    inputs = [x.requires_grad_() for x in inputs]

    def loss(*x: torch.Tensor) -> list[torch.Tensor]:
        y = squared_relu_mlp(*x, factor=0.4, engine="fused")
        return [y, *torch.autograd.grad((y * weight).sum(), x)]

    want = [t.detach() for t in loss(*inputs)]
    traced = torch.compile(lambda *x: squared_relu_mlp(*x, factor=0.4, engine="fused"), fullgraph=True, dynamic=False)
    y = traced(*inputs)
    got = [y, *torch.autograd.grad((y * weight).sum(), inputs)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_both_products_recorded_give_the_same_bits():
    if reason := fit.misfit(HOPPER, BF16, 1280, 512, 1024):
        pytest.skip(reason)
    from dwslm.ops.mlp.fused import squared_relu_down_gradient, squared_relu_up

    (x, up, down), dy = draw(1280, 512, 1024)
    a = squared_relu_up(x, up)
    dh = squared_relu_down_gradient(dy, down, a, 0.4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = squared_relu_up(x, up)
        gradient = squared_relu_down_gradient(dy, down, recorded, 0.4)
    for _ in range(3):
        recorded.zero_()
        gradient.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded, a) and torch.equal(gradient, dh)
