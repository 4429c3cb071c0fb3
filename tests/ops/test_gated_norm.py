import pytest
import torch

from dwslm.ops.gated_norm import gated_norm
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
