import pytest
import torch
import torch.nn.functional as F

from dwslm.ops.scaled_product import scaled_product
from tests.ops.helpers import output_and_gradients, relative_error


def reference(x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * (x.float() @ weight.float().T)


def draw(device: str = "cpu") -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(96, 64, device=device), torch.randn(48, 64, device=device)], torch.randn(96, 48, device=device)


def run(factor: float, inputs: list[torch.Tensor], dy: torch.Tensor, f=scaled_product) -> list[torch.Tensor]:
    return output_and_gradients(lambda x, weight: f(x, weight, factor), inputs, dy)


def test_by_hand():
    x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    y, dx, dweight = run(0.5, [x, weight], torch.tensor([[1.0], [10.0]]))
    assert y.tolist() == [[8.5], [19.5]]  # 17 and 39
    assert dx.tolist() == [[2.5, 3.0], [25.0, 30.0]] and dweight.tolist() == [[15.5, 21.0]]


@pytest.mark.parametrize("factor", [1.0, 0.4, -3.0])
def test_float32_meets_the_reference(factor):
    inputs, dy = draw()
    for got, want in zip(run(factor, inputs, dy), run(factor, inputs, dy, reference), strict=True):
        assert relative_error(got, want) < 1e-6


def test_bfloat16_is_rounded_once():
    """To the float32 product's own rounding, but for sums that end within an ulp of the middle between two values."""
    inputs, dy = ([x.bfloat16() for x in some] for some in (draw()[0], [draw()[1]]))
    got, want = run(0.4, inputs, dy[0]), run(0.4, [x.float() for x in inputs], dy[0].float(), reference)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.bfloat16
        assert (g != w.bfloat16()).float().mean() < 0.01
    twice = (0.4 * F.linear(*inputs)).float()
    assert (
        twice != want[0].bfloat16().float()
    ).float().mean() > 0.1  # what a multiplication after the product would give


def test_a_factor_of_one_is_the_linear_map():
    inputs, dy = draw()
    half = [x.bfloat16() for x in inputs]
    want = output_and_gradients(F.linear, half, dy.bfloat16())
    assert all(torch.equal(g, w) for g, w in zip(run(1.0, half, dy.bfloat16()), want, strict=True))


def test_gradients_that_nobody_asks_for_are_left_out():
    (x, weight), dy = draw()
    for first, second in ((x, weight.clone().requires_grad_()), (x.clone().requires_grad_(), weight)):
        out = scaled_product(first, second, 0.4)
        out.backward(dy)
        assert (first.grad is None) == (not first.requires_grad) and (second.grad is None) == (not second.requires_grad)


def test_a_gradient_without_memory_of_its_own():
    """That of a sum is one number, expanded."""
    inputs, _ = draw()
    ones = torch.ones(96, 48)
    x, weight = (value.clone().requires_grad_() for value in inputs)
    scaled_product(x, weight, 0.4).sum().backward()
    _, dx, dweight = run(0.4, inputs, ones, reference)
    assert relative_error(x.grad, dx) < 1e-6 and relative_error(weight.grad, dweight) < 1e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_traced_in_one_graph_with_its_gradients(device):
    """Between pointwise operations, which the compiler may fuse with each other but not into a product of its own."""
    inputs, dy = draw(device)

    def layer(x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
        return 1 + scaled_product(x.sin(), weight, factor)

    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    traced = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
    for got, want in zip(run(0.4, inputs, dy, traced), run(0.4, inputs, dy, layer), strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.gpu
def test_recorded_and_replayed_it_gives_the_same_bits():
    inputs, dy = draw("cuda")
    half, dy = [x.bfloat16() for x in inputs], dy.bfloat16()
    want = run(0.4, half, dy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0.4, half, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(0.4, half, dy)
    for _ in range(2):
        for tensor in got:
            tensor.zero_()
        graph.replay()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
