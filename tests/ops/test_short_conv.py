import pytest
import torch

from dwslm.ops.segments import segments
from dwslm.ops.short_conv import resolve, short_conv
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


def test_auto_is_torch_on_a_cpu_and_what_cannot_be_had_is_refused():
    assert resolve("auto", torch.device("cpu")) == "torch"
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"))
    with pytest.raises(ValueError, match="unknown convolution engine 'conv9'"):
        resolve("conv9", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [UNEVEN, [0, 200], list(range(201))])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.005)])
def test_fused_meets_the_reference_on_columns_of_a_wider_tensor(offsets, dtype, bound):
    torch.manual_seed(0)
    cu, total = boundaries(offsets), offsets[-1]
    inputs, weight = [torch.randn(total, 300).to(dtype), torch.randn(200, 4)], torch.randn(total, 200)
    want = output_and_gradients(lambda x, w: short_conv_reference(x[:, 50:250], w, cu), inputs, weight)
    seg = segments(cu.cuda(), total, total)

    def fused(x, w):
        return short_conv(x[:, 50:250], w, seg, "fused")

    got = output_and_gradients(fused, [x.cuda() for x in inputs], weight.cuda())
    assert max(relative_error(g.cpu(), w) for g, w in zip(got, want, strict=True)) < bound
    again = output_and_gradients(fused, [x.cuda() for x in inputs], weight.cuda())
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    opcheck_inputs = (inputs[0].cuda()[:, 50:250], inputs[1].cuda(), seg.positions)
    torch.library.opcheck(torch.ops.dwslm.short_conv.default, opcheck_inputs)
