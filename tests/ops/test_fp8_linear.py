"""The linear map with delayed scales: against float32, by hand, and its state."""

import pytest
import torch
import torch.nn.functional as F

from dwslm.ops.fp8 import PEAKS, delayed_linear, misfit, new_peaks, remember, rounding
from dwslm.ops.fp8.formats import FP8_MAX, MARGIN
from dwslm.ops.fp8.reference import linear_reference
from dwslm.ops.fp8.rounded import rounded
from tests.ops.helpers import output_and_gradients, relative_error

FACTORS = [1.0, 0.4]
SHAPES = [(128, 64, 96), (16, 32, 16), (48, 80, 27)]  # tokens, k, m; 27 rows become 32
DTYPES = [torch.float32, torch.bfloat16]
BOUND = 0.05  # two operands, each rounded by 2.6 % of its root mean square


def draw(tokens: int = 128, k: int = 64, m: int = 96) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, k), torch.randn(m, k) / k**0.5], torch.randn(tokens, m)


def padded(dy: torch.Tensor) -> torch.Tensor:
    """With a gradient of what is past the rows, which nobody should see."""
    return F.pad(dy, (0, -dy.shape[1] % 16), value=7.0)


def linear(factor: float = 1.0, device: str = "cpu", peaks: torch.Tensor | None = None):
    """The map as a function of x and weight; delayed scales are those of the tensors at hand."""
    peaks = new_peaks(len(PEAKS), torch.device(device)) if peaks is None else peaks
    return lambda x, weight: delayed_linear(x, weight, peaks, factor)


def backward(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    y = delayed_linear(x.requires_grad_(), weight, peaks)
    y.backward(dy)
    return y.detach()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_its_bounds_and_really_fp8(shape, dtype, factor):
    inputs, dy = draw(*shape)
    y, *got = output_and_gradients(
        linear(factor), [x.to(dtype) for x in inputs], F.pad(dy, (0, -shape[2] % 16)).to(dtype)
    )
    want = output_and_gradients(lambda *x: linear_reference(*x, factor), inputs, dy)
    assert y.shape == (shape[0], -(-shape[2] // 16) * 16) and not y[:, shape[2] :].any()
    for g, w in zip([y[:, : shape[2]], *got], want, strict=True):
        assert g.dtype == dtype and g.shape == w.shape and 0.01 < relative_error(g, w) < BOUND


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_past_the_rows_have_no_weight_whatever_their_gradient(dtype):
    inputs, dy = draw(48, 80, 27)
    inputs, peaks = [x.to(dtype) for x in inputs], torch.full((3,), 8.0)
    zero = output_and_gradients(linear(peaks=peaks.clone().requires_grad_()), inputs, F.pad(dy, (0, 5)).to(dtype))
    other = output_and_gradients(linear(peaks=peaks.clone().requires_grad_()), inputs, padded(dy).to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(zero, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_factor_by_hand(dtype):
    """x and dy of ones, a weight of twice one's diagonal: y = 2 f, dx = 2 f, dW = 16 f. Float8 holds all of them."""
    one, eye, factor = torch.ones(16, 16, dtype=dtype), torch.eye(16, dtype=dtype), 0.4
    peaks = torch.full((3,), FP8_MAX / MARGIN / 64, requires_grad=True)  # scales of 1/64
    exact = 1e-6 if dtype == torch.float32 else 2**-8
    made = output_and_gradients(linear(factor, peaks=peaks), [one, 2 * eye], one)
    for value, want in zip(made, (2 * factor, 2 * factor, 16 * factor), strict=True):
        assert value.dtype == dtype and torch.allclose(value.float(), torch.full((16, 16), want), rtol=exact, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_rounds_nothing_of_its_own_and_peaks_do_not_see_it(dtype):
    """A power of four is what a multiplication afterwards gives, to the bit."""
    inputs, dy = draw()
    inputs, seen = [x.to(dtype) for x in inputs], []
    passes = []
    for factor in (1.0, 0.25):
        peaks = new_peaks(len(PEAKS))
        x, weight = (t.clone().requires_grad_() for t in inputs)
        y = delayed_linear(x, weight, peaks, factor)
        y.backward(dy.to(dtype))
        passes.append((y.detach(), x.grad, weight.grad))
        seen.append(peaks.grad)
    assert all(torch.equal(scaled, 0.25 * plain) for plain, scaled in zip(*passes, strict=True))
    assert torch.equal(*seen)


@pytest.mark.parametrize("compiled", [False, True])
def test_peaks_are_those_of_the_micro_batch_before(compiled):
    (x, weight), dy = draw(128, 64, 40)
    dy, peaks, f = padded(dy), new_peaks(len(PEAKS)), delayed_linear
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(delayed_linear, fullgraph=True, dynamic=False, backend="aot_eager")
    f(x.requires_grad_(), weight.requires_grad_(), peaks).backward(dy)
    assert peaks.tolist() == [0.0] * 3 and weight.grad.shape == weight.shape  # nothing moves before it is told to
    remember([peaks])
    assert dict(zip(PEAKS, peaks.tolist(), strict=True)) == {
        name: tensor.abs().max().item() for name, tensor in (("x", x), ("weight", weight), ("dy", dy))
    }
    assert peaks.grad is None


def test_an_input_that_comes_rounded_gives_the_same_bits():
    """Its gradient takes the way of its path, which nobody reads; without gradients no such input is taken."""
    inputs, dy = draw()
    peaks = new_peaks(len(PEAKS))
    how = rounding(peaks, 0.4)

    def apart(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = rounded(x, how)
        assert given is rounded(given, how) and given.path.shape == x.shape and given.path.isnan().all()
        assert [field.requires_grad for field in given] == [True] + [False] * 4
        return delayed_linear(given, weight, peaks, 0.4)

    got, want = (output_and_gradients(f, inputs, dy) for f in (apart, linear(0.4)))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    given = rounded(inputs[0], how)
    with torch.no_grad(), pytest.raises(AssertionError, match="for training"):
        delayed_linear(given, inputs[1], peaks)


def test_states_of_several_sizes_are_remembered_together():
    states = [torch.tensor(before, requires_grad=True) for before in ([1.0, 2.0, 3.0], [4.0] * 6, [5.0])]
    for state, seen in zip(states, ([7.0, 0.0, torch.inf], [1.0, 2, 3, 4, torch.nan, 6], [0.0]), strict=True):
        state.grad = torch.tensor(seen)
    remember(states)
    assert [s.tolist() for s in states] == [[7.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 4.0, 6.0], [5.0]]
    with pytest.raises(RuntimeError, match="no backward pass"):
        remember(states)


def test_a_peak_that_grows_saturates_once_and_has_room_the_next_time():
    (x, weight), dy = draw()
    peaks = new_peaks(len(PEAKS))
    backward(x.clone(), weight, dy, peaks)
    remember([peaks])
    truth = linear_reference(4 * x, weight)
    first = relative_error(backward(4 * x, weight, dy, peaks), truth)
    remember([peaks])
    second = relative_error(backward(4 * x, weight, dy, peaks), truth)
    assert first > 0.2 and second < BOUND


def test_what_is_not_finite_shows_and_leaves_the_peaks():
    (x, weight), dy = draw()
    peaks = new_peaks(len(PEAKS))
    backward(x.clone(), weight, dy, peaks)
    remember([peaks])
    before = peaks.tolist()
    for bad in (float("inf"), float("nan")):
        spoilt, spoilt_dy = x.clone(), dy.clone()
        spoilt[5, 3] = spoilt_dy[7, 2] = bad
        y = backward(spoilt, weight, spoilt_dy, peaks)
        assert not y[5].isfinite().any() and y[:5].isfinite().all()
        assert not spoilt.grad[7].isfinite().any() and spoilt.grad[:7].isfinite().all()
        remember([peaks])
        assert peaks.tolist() == before


def test_without_gradients_delayed_scales_are_neither_read_nor_asked_for():
    (x, weight), _ = draw(48, 80, 27)
    with torch.no_grad():
        alone = delayed_linear(x[:16], weight, None, 0.4)
        among = delayed_linear(x, weight, torch.full((3,), 1e-9), 0.4)
    assert torch.equal(alone, among[:16]) and not among[:, 27:].any()
    assert relative_error(among[:, :27], linear_reference(x, weight, 0.4)) < BOUND
    with pytest.raises(ValueError, match="new_peaks"):
        delayed_linear(x, weight, None)


def test_what_cannot_be_multiplied_is_named():
    (x, weight), _ = draw()
    peaks = new_peaks(len(PEAKS))
    with pytest.raises(ValueError, match=r"multiples of 16, not \(60,\): set model\.projection_precision=model"):
        delayed_linear(x[:, :60], weight[:, :60], peaks)
    cpu = torch.device("cpu")
    assert misfit("model", cpu, torch.float32, 60) is None
    assert misfit("fp8_delayed", cpu, torch.float32, 64) is None


@pytest.mark.parametrize("grad", [True, False])
def test_any_number_of_tokens(grad):
    """Rows that were filled up are seen nowhere: outputs, gradients and peaks are those of the first rows of a whole batch whose
    others are zero."""
    (x, weight), dy = draw(112, 80, 27)
    x, dy = x.detach(), padded(dy)
    whole, d_whole = x.clone(), dy.clone()
    whole[100:], d_whole[100:] = 0, 0
    known = torch.tensor([3.0, 0.0, 2.0])
    with torch.set_grad_enabled(grad):
        results = []
        for given, gradient in ((x[:100], dy[:100]), (whole, d_whole)):
            leaves = [given.clone().requires_grad_(grad), weight.detach().clone().requires_grad_(grad)]
            peaks = known.clone().requires_grad_(grad)
            y = delayed_linear(*leaves, peaks, 0.4)
            results.append([y[:100].detach()])
            if grad:
                y.backward(gradient)
                results[-1] += [leaves[0].grad[:100], leaves[1].grad, peaks.grad]
    assert len(results[0][0]) == 100
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_an_older_gpu_or_another_dtype_is_refused(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9 or later, and Old has 8.0: set model.projection_precision=model" in misfit(
        "fp8_delayed", gpu, torch.bfloat16, 64
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "set model.dtype=bfloat16" in misfit("fp8_delayed", gpu, torch.float32, 64)
    assert misfit("fp8_delayed", gpu, torch.bfloat16, 64) is None


@pytest.mark.gpu
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("shape", [(4096, 512, 1544), (272, 80, 88), (4096, 1024, 3336), (64, 256, 48)], ids=str)
def test_on_a_gpu_it_is_what_a_cpu_gives_called_and_compiled(shape, factor):
    """The same float8 values and scales, so the same up to the order of sums and one rounding; twice the same bits."""
    inputs, dy = draw(*shape)
    inputs, dy = [x.bfloat16() for x in inputs], padded(dy).bfloat16()
    known = torch.tensor([3.0, 0.0, 2.0])  # of x and dy something saturates
    want = output_and_gradients(linear(factor, peaks=known.clone().requires_grad_()), inputs, dy)
    moved = [x.cuda() for x in inputs]
    for compiled in (False, True):
        torch._dynamo.reset()
        peaks = known.cuda().requires_grad_()
        f = linear(factor, peaks=peaks)
        f = torch.compile(f, fullgraph=True, dynamic=False) if compiled else f
        first, second = (output_and_gradients(f, moved, dy.cuda()) for _ in range(2))
        for a, b, w in zip(first, second, want, strict=True):
            assert torch.equal(a, b) and a.shape == w.shape and relative_error(a.cpu(), w) < 0.005
        assert not first[0][:, shape[2] :].any()
        delayed_linear(moved[0], moved[1], peaks, factor).backward(dy.cuda())
        assert peaks.grad.tolist() == [t.abs().max().item() for t in (*inputs, dy)]
