import pytest
import torch

from dwslm.ops.fp8 import PEAKS, delayed_linear, new_peaks, rounding
from dwslm.ops.fp8.reference import linear_reference
from dwslm.ops.fp8.rounded import rounded
from dwslm.ops.segments import segments
from dwslm.ops.short_conv import projected_short_conv, resolve, rounds, short_conv
from dwslm.ops.short_conv.reference import short_conv_reference
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error

LAYOUTS = [UNEVEN, [0, 200], list(range(201)), [0, 0, 3, 128, 131, 256, 256, 259]]  # the last: at the edges of a span


def joined(f):
    """The results side by side, so that one weight meets them all."""
    return lambda *args: torch.cat([y.flatten(1) for y in f(*args)], dim=1)


def truth(x, weight, cu_seqlens, heads):
    """The reference, with the columns that pass through."""
    return *short_conv_reference(x, weight, cu_seqlens, heads), x[:, len(weight) :]


@pytest.mark.parametrize("offsets", LAYOUTS)
def test_engine_meets_the_reference(offsets):
    torch.manual_seed(0)
    cu, total, heads = boundaries(offsets), offsets[-1], 2
    inputs, weight = [torch.randn(total, 31), torch.randn(24, 4)], torch.randn(total, 31)
    got = output_and_gradients(joined(lambda x, w: short_conv(x, w, segments(cu, total, total), heads)), inputs, weight)
    want = output_and_gradients(joined(lambda x, w: truth(x, w, cu, heads)), inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5


def test_taps_by_hand():
    """Weights 1, 10, 100, 1000 from oldest to current; the fourth token opens a new segment and sees only itself."""
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]]).expand(5, 3)
    taps = torch.tensor([[1.0, 10.0, 100.0, 1000.0]]).expand(3, 4)
    q, k, v, _ = short_conv(x, taps, segments(boundaries([0, 3, 5]), 5, 5), heads=1)
    assert v.flatten().tolist() == pytest.approx([1000, 2100, 3210, 4000, 5400])  # silu(y) = y for large y
    assert q.flatten().tolist() == k.flatten().tolist() == pytest.approx([1] * 5)  # heads of one channel


def test_each_head_of_queries_and_keys_has_length_one():
    torch.manual_seed(0)
    q, k, v, _ = short_conv(torch.randn(9, 24), torch.randn(24, 4), segments(boundaries([0, 9]), 9, 9), heads=2)
    assert q.shape == k.shape == v.shape == (9, 2, 4)
    for y in (q, k):
        torch.testing.assert_close(y.square().sum(-1), torch.ones(9, 2), atol=1e-3, rtol=0)


def test_auto_is_torch_on_a_cpu_and_what_cannot_be_had_is_refused():
    assert resolve("auto", torch.device("cpu"), 128) == "torch" and not rounds("auto", torch.device("cpu"), 128)
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"), 128)
    with pytest.raises(ValueError, match="unknown convolution engine 'conv9'"):
        resolve("conv9", torch.device("cpu"), 128)


@pytest.mark.gpu
def test_fused_refuses_what_it_cannot_take():
    gpu = torch.device("cuda")
    assert resolve("auto", gpu, 128) == resolve("fused", gpu, 16) == "fused" and resolve("auto", gpu, 96) == "torch"
    assert rounds("auto", gpu, 128) and not rounds("auto", gpu, 64) and not rounds("torch", gpu, 128)
    with pytest.raises(ValueError, match="head_dim is 96"):
        resolve("fused", gpu, 96)
    with pytest.raises(ValueError, match="takes 4 taps, not 3"):
        resolve("fused", gpu, 128, width=3)


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.005)])
@pytest.mark.parametrize(("head_dim", "more"), [(16, 0), (16, 11), (128, 264)])
def test_fused_meets_the_reference(offsets, dtype, bound, head_dim, more):
    torch.manual_seed(0)
    heads, channels = 2, 6 * head_dim
    cu, total = boundaries(offsets), offsets[-1]
    inputs = [torch.randn(total, channels + more).to(dtype), torch.randn(channels, 4)]
    weight = torch.randn(total, channels + more)
    want = output_and_gradients(joined(lambda x, w: truth(x, w, cu, heads)), inputs, weight)
    seg = segments(cu.cuda(), total, total)
    fused = joined(lambda x, w: short_conv(x, w, seg, heads, "fused"))
    got = output_and_gradients(fused, [x.cuda() for x in inputs], weight.cuda())
    assert max(relative_error(g.cpu(), w) for g, w in zip(got, want, strict=True)) < bound
    again = output_and_gradients(fused, [x.cuda() for x in inputs], weight.cuda())
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "row"), [(0, 112), (2, 114), (1, 112), (0, 113)])
def test_fused_reads_a_view_wherever_it_lies(first, row):
    """Two bfloat16 channels make a word where the view begins at one and rows are whole words, and only there."""
    torch.manual_seed(0)
    cu = boundaries([0, 5, 131])
    inputs, weight = [torch.randn(131, row).bfloat16(), torch.randn(96, 4)], torch.randn(131, 107)

    def run(f, device):
        return output_and_gradients(
            joined(lambda x, w: f(x[:, first : first + 107], w)), [x.to(device) for x in inputs], weight.to(device)
        )

    seg = segments(cu.cuda(), 131, 131)
    got = run(lambda x, w: short_conv(x, w, seg, 2, "fused"), "cuda")
    want = run(lambda x, w: truth(x, w, cu, 2), "cpu")
    assert max(relative_error(g.cpu(), w) for g, w in zip(got, want, strict=True)) < 0.005


@pytest.mark.gpu
def test_fused_keeps_the_rules_of_custom_operators():
    seg = segments(boundaries(UNEVEN).cuda(), 200, 200)
    x = torch.randn(200, 96, device="cuda", requires_grad=True)
    weight = torch.randn(96, 4, device="cuda", requires_grad=True)
    short_conv(x, weight, seg, 2, "fused")  # loads the operator
    torch.library.opcheck(torch.ops.dwslm.short_conv.default, (x, weight, seg.positions, 2))


@pytest.mark.gpu
def test_fused_neighbours_and_boundaries_refreshed_in_place():
    torch.manual_seed(0)
    cu = boundaries([0, 130, 260, 260]).cuda()
    x = torch.randn(260, 96, device="cuda")
    weight = torch.randn(96, 4, device="cuda")

    def run(cu):
        return joined(lambda *args: short_conv(*args, segments(cu, 260, 260), 2, "fused"))(x, weight)

    first = run(cu)
    x[:130] = torch.randn(130, 96, device="cuda")
    assert torch.equal(run(cu)[130:], first[130:])
    other = boundaries([0, 5, 131, 260]).cuda()
    cu.copy_(other)
    assert torch.equal(run(cu), run(other)) and not torch.equal(run(cu)[130:], first[130:])


def projected(peaks, cu, heads, engine="auto", given=False):
    """given: x comes rounded."""
    seg = segments(cu, int(cu[-1]), int(cu[-1]))

    def run(x, w, taps):
        return projected_short_conv(
            rounded(x, rounding(peaks, 1.0)) if given else x, w, peaks, taps, seg, heads, engine
        )

    return joined(run)


def before_the_convolution(tokens, width, heads, head_dim, more, dtype=torch.bfloat16, device="cpu"):
    """x, the projection's weight, taps, and what is said of the outputs, those past the rows among them."""
    torch.manual_seed(0)
    rows = 3 * heads * head_dim + more
    inputs = [torch.randn(tokens, width).to(dtype), (torch.randn(rows, width) / width**0.5).to(dtype)]
    inputs.append(torch.rand(3 * heads * head_dim, 4) - 0.5)
    return [x.to(device) for x in inputs], torch.randn(tokens, -(-rows // 16) * 16).to(device, dtype)


def test_behind_a_linear_map_in_fp8():
    """Within its bounds of float32, and what the two are one after the other."""
    cu, heads = boundaries([0, 5, 40, 64]), 2
    inputs, dy = before_the_convolution(64, 32, heads, 16, 5, torch.float32)
    got = output_and_gradients(projected(new_peaks(len(PEAKS)), cu, heads), inputs, dy)
    want = output_and_gradients(
        joined(lambda x, w, taps: truth(linear_reference(x, w), taps, cu, heads)), inputs, dy[:, :101]
    )
    got[0] = got[0][:, :101]
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 0.10
    given = output_and_gradients(projected(new_peaks(len(PEAKS)), cu, heads, given=True), inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(given[1:], got[1:], strict=True))
    with torch.no_grad():
        apart = short_conv(delayed_linear(*inputs[:2], None), inputs[2], segments(cu, 64, 64), heads)
        assert torch.equal(projected(None, cu, heads)(*inputs), joined(lambda: apart)())


@pytest.mark.gpu
@pytest.mark.parametrize("known", [0.0, 2.0])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "more"), [(256, 2, 128, 11), (4096, 8, 128, 264), (384, 1, 256, 0)]
)
def test_fused_behind_a_linear_map_is_both_called_and_compiled(tokens, heads, head_dim, more, known):
    """But for the gradient between them, which is rounded once there and twice here, with scales that differ as its peak does."""
    cu = boundaries([0, 5, 131, 131, tokens]).cuda()
    inputs, dy = before_the_convolution(tokens, 256, heads, head_dim, more, device="cuda")
    seg = segments(cu, tokens, tokens)

    def peaks():
        return torch.tensor([known, known, known], device="cuda", requires_grad=True)

    state = peaks()
    apart = output_and_gradients(
        joined(lambda x, w, taps: short_conv(delayed_linear(x, w, state), taps, seg, heads, "fused")), inputs, dy
    )
    for compiled, given in ((False, False), (False, True), (True, False), (True, True)):
        torch._dynamo.reset()
        state = peaks()
        f = projected(state, cu, heads, "fused", given)
        f = torch.compile(f, fullgraph=True, dynamic=False) if compiled else f
        first, second = (output_and_gradients(f, inputs, dy) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(first[0], apart[0]) and relative_error(first[3], apart[3]) < 1e-5  # the taps' gradient
        for a, b in zip(first[1:3], apart[1:3], strict=True):
            assert relative_error(a, b) < 0.04 and not torch.equal(a, b)
        f(*(x.detach().requires_grad_() for x in inputs)).backward(dy)
        x, weight, _ = inputs
        assert state.grad[:2].tolist() == [x.abs().max().item(), weight.abs().max().item()] and state.grad[2] > 0
