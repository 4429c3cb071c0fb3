import pytest
import torch

from dwslm.ops.segments import segments
from dwslm.ops.short_conv import short_conv
from dwslm.ops.short_conv.reference import short_conv_reference
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error


@pytest.mark.parametrize("offsets", [UNEVEN, [0, 200], list(range(201))])
def test_engine_meets_the_reference(offsets):
    torch.manual_seed(0)
    cu, total = boundaries(offsets), offsets[-1]
    inputs, weight = [torch.randn(total, 12), torch.randn(12, 4)], torch.randn(total, 12)
    got = output_and_gradients(lambda x, w: short_conv(x, w, segments(cu, total, total)), inputs, weight)
    want = output_and_gradients(lambda x, w: short_conv_reference(x, w, cu), inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5


def test_taps_by_hand():
    """Weights 1, 10, 100, 1000 from oldest to current; the fourth token opens a new segment and sees only itself."""
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    out = short_conv(x, torch.tensor([[1.0, 10.0, 100.0, 1000.0]]), segments(boundaries([0, 3, 5]), 5, 5))
    assert out.flatten().tolist() == pytest.approx([1000, 2100, 3210, 4000, 5400])  # silu(y) = y for large y
