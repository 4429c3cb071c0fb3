import pytest
import torch

from dwslm.model.mlp import MLP
from dwslm.ops.mlp import PRECISIONS
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from tests.ops.helpers import relative_error


def filled(precision: str, factor: float) -> MLP:
    torch.manual_seed(0)
    mlp = MLP(32, 64, precision, torch.float32, factor)
    for weight in (mlp.up.weight, mlp.down.weight):
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return mlp


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_output_and_its_gradients_come_times_the_factor(precision):
    """All that is learnt, and x: against the reference, and with a power of two to the bit."""
    x, dy = torch.randn(48, 32), torch.randn(48, 32)
    passes = []
    for factor in (1.0, 0.25):
        mlp, at = filled(precision, factor), x.clone().requires_grad_()
        y = mlp(at)
        y.backward(dy)
        passes.append((y.detach(), at.grad, mlp.up.weight.grad, mlp.down.weight.grad))
    assert all(torch.equal(scaled, 0.25 * plain) for plain, scaled in zip(*passes, strict=True))
    want = squared_relu_mlp_reference(x, mlp.up.weight, mlp.down.weight, 0.25)
    assert relative_error(passes[1][0], want) < (1e-5 if precision == "model" else 0.08)


def test_peaks_are_kept_where_scales_are_delayed_and_stay_float32():
    assert filled("fp8", 1.0).peaks is None and "peaks" not in filled("model", 1.0).state_dict()
    mlp = filled("fp8_delayed", 1.0).to(torch.bfloat16)
    assert mlp.up.weight.dtype == torch.bfloat16
    assert mlp.peaks.dtype == torch.float32 and mlp.peaks.is_leaf and mlp.peaks.requires_grad
    assert mlp.state_dict()["peaks"].tolist() == [0.0] * 6
