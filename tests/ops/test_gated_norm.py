import pytest
import torch

from dwslm.ops.fp8 import PEAKS, delayed_linear, new_peaks
from dwslm.ops.fp8.reference import linear_reference
from dwslm.ops.gated_norm import gated_norm, gated_norm_linear
from dwslm.ops.gated_norm.reference import gated_norm_reference
from tests.ops.helpers import output_and_gradients, relative_error

EPS = 1e-6


def draw(total, heads, head_dim, dtype, device="cpu"):
    """o, as small as it is at the half init scale, gate, gain, bias, and what is said of the output."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    inputs = [
        (2.5e-3 * normal(total, heads, head_dim)).to(dtype),
        normal(total, heads * head_dim).to(dtype),
        1 + 0.3 * normal(head_dim),
        normal(heads * head_dim),
    ]
    return [x.to(device) for x in inputs], normal(total, heads * head_dim).to(device)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.005)])
def test_the_torch_form_meets_the_reference(dtype, bound):
    inputs, weight = draw(60, 3, 16, dtype)
    got = output_and_gradients(lambda *x: gated_norm(*x, EPS), inputs, weight)
    want = output_and_gradients(lambda *x: gated_norm_reference(*x, EPS), inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < bound


def test_values_by_hand():
    """Two heads of two: (3, 4) and (0, 2) have mean squares 12.5 and 2; gates of 0 and ln 3 open to 1/2 and 3/4."""
    o, ln3 = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), float(torch.tensor(3.0).log())
    gate, bias = torch.tensor([[0.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, -1.0, 0.0, 1 + ln3])
    y = gated_norm(o, gate, torch.tensor([1.0, 10.0]), bias, 0.0)
    assert y.tolist() == [pytest.approx([1.5 / 12.5**0.5, 20 / 12.5**0.5, 0.0, 15 / 2**0.5])]
    without = gated_norm(o, gate + bias, torch.tensor([1.0, 10.0]), None, 0.0)
    assert torch.equal(y, without)


def test_fused_without_a_bias_is_refused():
    inputs, _ = draw(5, 1, 16, torch.float32)
    with pytest.raises(ValueError, match="with a bias only"):
        gated_norm(*inputs[:3], None, EPS, "fused")


@pytest.mark.gpu
@pytest.mark.parametrize("total", [1, 300, 5000])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (8, 128)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.005)])
def test_fused_meets_the_reference(total, heads, head_dim, dtype, bound):
    inputs, weight = draw(total, heads, head_dim, dtype, "cuda")

    def fused(*x):
        return gated_norm(*x, EPS, "fused")

    got = output_and_gradients(fused, inputs, weight)
    want = output_and_gradients(lambda *x: gated_norm_reference(*x, EPS), inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < bound
    assert all(torch.equal(a, b) for a, b in zip(got, output_and_gradients(fused, inputs, weight), strict=True))


@pytest.mark.gpu
def test_fused_keeps_the_rules_of_custom_operators():
    inputs, _ = draw(100, 2, 16, torch.float32, "cuda")
    inputs = [x.requires_grad_() for x in inputs]
    gated_norm(*inputs, EPS, "fused")  # loads the operator
    torch.library.opcheck(torch.ops.dwslm.gated_norm.default, (*inputs, EPS))


def before_a_linear_map(total, heads, head_dim, dtype, device="cpu"):
    """The inputs of `draw` and a weight, and what is said of the output."""
    inputs, _ = draw(total, heads, head_dim, dtype, device)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, heads * head_dim, generator=generator) / (heads * head_dim) ** 0.5
    dy = torch.randn(total, 48, generator=generator)
    return [*inputs, weight.to(device, dtype)], dy.to(device, dtype)


def linear_truth(o, gate, gain, bias, weight):
    return linear_reference(gated_norm_reference(o, gate, gain, bias, EPS), weight, 0.4)


def linear(peaks, engine="auto"):
    return lambda o, gate, gain, bias, weight: gated_norm_linear(o, gate, gain, bias, EPS, weight, peaks, 0.4, engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_a_linear_map_in_fp8(dtype):
    """Within its bounds of float32, and what the two are one after the other."""
    inputs, dy = before_a_linear_map(64, 2, 16, dtype)
    got = output_and_gradients(linear(new_peaks(len(PEAKS))), inputs, dy)
    want = output_and_gradients(linear_truth, [x.float() for x in inputs], dy.float())
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 0.08
    with torch.no_grad():
        apart = delayed_linear(gated_norm(*inputs[:4], EPS), inputs[4], None, 0.4)
        assert torch.equal(linear(None)(*inputs), apart)
    with pytest.raises(ValueError, match="new_peaks"):
        linear(None)(*(x.requires_grad_() for x in inputs))
    without_bias = gated_norm_linear(*inputs[:3], None, EPS, inputs[4], new_peaks(len(PEAKS)))
    assert torch.equal(
        without_bias, delayed_linear(gated_norm(*inputs[:3], None, EPS), inputs[4], new_peaks(len(PEAKS)))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("known", [0.0, 8.0])
@pytest.mark.parametrize(("total", "heads", "head_dim"), [(16, 1, 32), (272, 3, 16), (4096, 8, 128), (400, 2, 256)])
def test_fused_before_a_linear_map_called_and_compiled(total, heads, head_dim, known):
    """Scales of the tensors at hand, and scales that are known; the same bits twice; the peaks that were seen."""
    inputs, dy = before_a_linear_map(total, heads, head_dim, torch.bfloat16, "cuda")
    want = output_and_gradients(linear_truth, [x.float() for x in inputs], dy.float())
    gated = gated_norm_reference(*(x.float() for x in inputs[:4]), EPS)
    seen = [x.abs().max().item() for x in (gated, inputs[4], dy)]
    for compiled in (False, True):
        torch._dynamo.reset()
        peaks = torch.full((len(PEAKS),), known, device="cuda", requires_grad=True)
        f = linear(peaks, "fused")
        f = torch.compile(f, fullgraph=True, dynamic=False) if compiled else f
        first, second = (output_and_gradients(f, inputs, dy) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert max(relative_error(g, w) for g, w in zip(first, want, strict=True)) < 0.08
        f(*(x.detach().requires_grad_() for x in inputs)).backward(dy)
        assert peaks.grad.tolist() == pytest.approx(seen, rel=1e-4)


@pytest.mark.gpu
def test_fused_before_a_linear_map_hands_on_what_is_not_finite():
    inputs, _ = before_a_linear_map(256, 2, 128, torch.bfloat16, "cuda")
    inputs[1][200, 7] = torch.nan
    y = linear(new_peaks(len(PEAKS), torch.device("cuda")), "fused")(*inputs)
    assert not y[200].isfinite().any() and y[:200].isfinite().all() and y[201:].isfinite().all()
