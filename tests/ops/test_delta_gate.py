import pytest
import torch

from dwslm.ops.delta_gate import delta_gate, resolve
from dwslm.ops.delta_gate.reference import delta_gate_reference
from tests.ops.helpers import output_and_gradients, relative_error

BOUND = -5.0


def joined(f):
    """Log decay and beta side by side, so that one weight meets both."""
    return lambda *args: torch.cat([y.flatten(1) for y in f(*args)], dim=1)


def draw(total, heads, head_dim, dtype, device="cpu"):
    """f, A_log, dt_bias, logits, and what is said of the outputs; gates from wide open to nearly shut."""
    generator = torch.Generator().manual_seed(0)
    f, logits = (torch.randn(total, n, generator=generator).to(dtype) for n in (heads * head_dim, heads))
    a_log = 0.5 * torch.randn(heads, generator=generator)
    dt_bias = torch.linspace(-7, 2, heads * head_dim)
    weight = torch.randn(total, heads * head_dim + heads, generator=generator)
    return [x.to(device) for x in (f, a_log, dt_bias, logits)], weight.to(device)


def test_the_torch_form_meets_the_reference():
    inputs, weight = draw(60, 3, 16, torch.float32)
    got = output_and_gradients(joined(lambda *x: delta_gate(*x, BOUND)), inputs, weight)
    want = output_and_gradients(joined(lambda *x: delta_gate_reference(*x, BOUND)), inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5


def test_decays_in_bfloat16_are_rounded_once():
    inputs, weight = draw(60, 3, 16, torch.float32)
    g, beta = delta_gate(*inputs, BOUND, "torch", torch.bfloat16)
    want, rates = delta_gate(*inputs, BOUND, "torch")
    assert torch.equal(g, want.bfloat16()) and torch.equal(beta, rates) and want.dtype == torch.float32


def test_values_by_hand():
    """sigmoid(0) is a half; with exp(A_log) = 2, f + dt_bias = ln 3 / 2 gives sigmoid(ln 3) = 3/4."""
    ln3 = float(torch.tensor(3.0).log())
    f, dt_bias = torch.tensor([[0.0, ln3 / 2 - 1]]), torch.tensor([0.0, 1.0])
    g, beta = delta_gate(f, torch.tensor([2.0]).log(), dt_bias, torch.tensor([[-ln3]]), BOUND)
    assert g.shape == (1, 1, 2) and g.flatten().tolist() == pytest.approx([-2.5, -3.75])
    assert beta.tolist() == [[pytest.approx(0.25)]]


def test_auto_is_torch_on_a_cpu_and_what_cannot_be_had_is_refused():
    assert resolve("auto", torch.device("cpu"), 128) == "torch"
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"), 128)
    with pytest.raises(ValueError, match="unknown gate engine 'open'"):
        resolve("open", torch.device("cpu"), 128)


@pytest.mark.gpu
def test_fused_refuses_heads_that_it_cannot_take():
    gpu = torch.device("cuda")
    assert resolve("auto", gpu, 128) == resolve("fused", gpu, 16) == "fused" and resolve("auto", gpu, 96) == "torch"
    with pytest.raises(ValueError, match="head_dim is 96"):
        resolve("fused", gpu, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("total", [1, 300, 5000])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (8, 128), (1, 256)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-5), (torch.bfloat16, 0.005)])
@pytest.mark.parametrize("decays", [torch.float32, torch.bfloat16])
def test_fused_meets_the_reference(total, heads, head_dim, dtype, bound, decays):
    inputs, weight = draw(total, heads, head_dim, dtype, "cuda")

    def fused(f, a_log, dt_bias, logits):
        wide = torch.cat([f[:, :3], logits, f[:, :2]], dim=1)  # logits are columns of a projection
        return delta_gate(f, a_log, dt_bias, wide[:, 3:-2], BOUND, "fused", decays)

    def reference(f, a_log, dt_bias, logits):
        return delta_gate_reference(f, a_log, dt_bias, logits, BOUND)

    got = output_and_gradients(joined(fused), inputs, weight)
    want = output_and_gradients(joined(reference), inputs, weight)
    # A decay's last digits count, however small: an error of g itself is relative to each value.
    rounded = decays == torch.bfloat16  # to 8 bits, and so is the gradient that comes back
    assert ((got[0] - want[0]) / want[0]).abs().max() < (2**-8 if rounded else 5e-5)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < (0.005 if rounded else bound)
    again = output_and_gradients(joined(fused), inputs, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
def test_fused_keeps_the_rules_of_custom_operators():
    inputs, _ = draw(100, 2, 16, torch.float32, "cuda")
    inputs = [x.requires_grad_() for x in inputs]
    delta_gate(*inputs, BOUND, "fused")  # loads the operator
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(torch.ops.dwslm.delta_gate.default, (*inputs, BOUND, dtype))
