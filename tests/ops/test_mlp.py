import pytest
import torch

from dwslm.ops.fp8 import new_peaks, remember
from dwslm.ops.fp8.formats import FP8_MAX, MARGIN
from dwslm.ops.mlp import PEAKS, PRECISIONS, squared_relu_mlp
from dwslm.ops.mlp.plain import SquaredRelu
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from tests.ops.helpers import output_and_gradients, relative_error

FP8 = ("fp8", "fp8_delayed")
FACTORS = [1.0, 0.4]


def draw() -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(128, 64), torch.randn(256, 64) / 8, torch.randn(64, 256) / 16], torch.randn(128, 64)


def layer(precision: str, device: str = "cpu", factor: float = 1.0, engine: str = "auto"):
    """The layer as a function of x, up and down; delayed scales are those of the tensors at hand."""
    peaks = new_peaks(len(PEAKS), torch.device(device))
    return lambda *x: squared_relu_mlp(*x, precision=precision, peaks=peaks, factor=factor, engine=engine)


def reference(factor: float):
    return lambda *x: squared_relu_mlp_reference(*x, factor=factor)


def errors(precision: str, dtype: torch.dtype, factor: float = 1.0) -> list[float]:
    inputs, weight = draw()
    got = output_and_gradients(layer(precision, factor=factor), [x.to(dtype) for x in inputs], weight.to(dtype))
    want = output_and_gradients(reference(factor), inputs, weight)
    return [relative_error(g, w) for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("factor", FACTORS)
def test_float32_meets_the_reference(factor):
    assert max(errors("model", torch.float32, factor)) < 1e-5


@pytest.mark.parametrize("factor", FACTORS)
def test_bfloat16_is_within_one_percent(factor):
    assert max(errors("model", torch.bfloat16, factor)) < 0.01


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", FP8)
def test_fp8_is_within_its_bounds_and_is_really_fp8(precision, dtype, factor):
    out, *gradients = errors(precision, dtype, factor)
    assert 0.01 < out < 0.08
    assert min(gradients) > 0.01 and max(gradients) < 0.10


def test_the_gradients_of_the_weights_see_no_rounding_of_their_own_with_scales_per_row():
    """Whose error is that of h, dy W and the input alone: a product in FP8 would add about 4 %."""
    inputs, weight = draw()
    x, up, down = inputs
    *_, ddown = output_and_gradients(layer("fp8"), inputs, weight)
    hidden = (x @ up.T).relu().square()
    assert relative_error(ddown, weight.T @ hidden) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_factor_by_hand(precision, dtype):
    """x, dy of ones and up of one's diagonal: h = 1, da = 2 f, dh = 4 f. All are powers of two, which every format here holds."""
    one, eye, factor = torch.ones(16, 16, dtype=dtype), torch.eye(16, dtype=dtype), 0.4
    peaks = torch.full((6,), FP8_MAX / MARGIN / 64, requires_grad=True)  # scales of 1/64
    y, dx, dup, ddown = output_and_gradients(
        lambda *x: squared_relu_mlp(*x, precision=precision, peaks=peaks, factor=factor), [one, eye, 2 * eye], one
    )
    exact = 1e-6 if dtype == torch.float32 else 2**-8
    for value, want in (
        (y, 2 * factor * one),
        (dx, 4 * factor * one),
        (dup, 64 * factor * one),
        (ddown, 16 * factor * one),
    ):
        assert value.dtype == dtype and torch.allclose(value.float(), want.float(), rtol=exact, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_factor_rounds_nothing_of_its_own(precision, dtype):
    """A power of two is what a multiplication afterwards gives, to the bit: of the output, and of all gradients."""
    inputs, weight = draw()
    inputs = [x.to(dtype) for x in inputs]
    plain = output_and_gradients(layer(precision), inputs, weight.to(dtype))
    for got, want in zip(
        output_and_gradients(layer(precision, factor=0.25), inputs, weight.to(dtype)), plain, strict=True
    ):
        assert torch.equal(got, 0.25 * want)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_traced_in_one_graph_with_its_gradients(precision):
    """The compiler's front half; what is behind it changes no operator."""
    inputs, weight = draw()
    torch._dynamo.reset()
    f = layer(precision, factor=0.4)
    traced = torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager")
    got = output_and_gradients(traced, inputs, weight)
    want = output_and_gradients(f, inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-6


def backward(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, dy: torch.Tensor, peaks: torch.Tensor
) -> torch.Tensor:
    y = squared_relu_mlp(x.requires_grad_(), up, down, "fp8_delayed", peaks)
    y.backward(dy)
    return y.detach()


@pytest.mark.parametrize("compiled", [False, True])
def test_peaks_are_those_of_the_micro_batch_before(compiled):
    """Against magnitudes counted here; dh and dy of the layer as it is computed, a of its own h."""
    (x, up, down), dy = draw()
    peaks = new_peaks(len(PEAKS))
    f = backward
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(squared_relu_mlp, fullgraph=True, dynamic=False, backend="aot_eager")
        f(x.requires_grad_(), up, down, "fp8_delayed", peaks).backward(dy)
    else:
        f(x, up, down, dy, peaks)
    assert peaks.tolist() == [0.0] * len(PEAKS)  # a function: nothing moves before it is told to
    remember([peaks])
    found = dict(zip(PEAKS, peaks.tolist(), strict=True))
    for name, tensor in {"x": x, "up": up, "down": down, "dy": dy}.items():
        assert found[name] == tensor.abs().max().item()
    hidden = (x @ up.T).detach().relu()
    assert found["a"] == pytest.approx(hidden.square().max().item(), rel=0.15)
    assert found["dh"] == pytest.approx((dy @ down * 2 * hidden).abs().max().item(), rel=0.15)
    assert peaks.grad is None


def test_peaks_do_not_see_the_factor():
    (x, up, down), dy = draw()
    seen = []
    for factor in (1.0, 0.4):
        peaks = new_peaks(len(PEAKS))
        squared_relu_mlp(x.requires_grad_(), up, down, "fp8_delayed", peaks, factor).backward(dy)
        seen.append(peaks.grad)
    assert torch.equal(*seen)


def test_a_peak_that_grows_saturates_once_and_has_room_the_next_time():
    (x, up, down), dy = draw()
    peaks = new_peaks(len(PEAKS))
    backward(x.clone(), up, down, dy, peaks)
    remember([peaks])
    large = 4 * x
    truth = squared_relu_mlp_reference(large, up, down)
    first = relative_error(backward(large.clone(), up, down, dy, peaks), truth)
    remember([peaks])
    second = relative_error(backward(large.clone(), up, down, dy, peaks), truth)
    assert first > 0.3 and second < 0.08


def test_what_is_not_finite_shows_and_leaves_the_peaks():
    (x, up, down), dy = draw()
    peaks = new_peaks(len(PEAKS))
    backward(x.clone(), up, down, dy, peaks)
    remember([peaks])
    before = peaks.tolist()
    for bad in (float("inf"), float("nan")):
        spoilt, spoilt_dy = x.clone(), dy.clone()
        spoilt[5, 3] = bad
        spoilt_dy[7, 2] = bad
        y = backward(spoilt, up, down, spoilt_dy, peaks)
        assert not y.isfinite().all() and not spoilt.grad.isfinite().all()
        assert y[:5].isfinite().all()
        remember([peaks])
        after = dict(zip(PEAKS, peaks.tolist(), strict=True))
        assert after["x"] == before[0] and after["dy"] == before[4] and torch.isfinite(peaks).all()


def test_without_gradients_delayed_scales_are_neither_read_nor_asked_for():
    (x, up, down), _ = draw()
    with torch.no_grad():
        alone = squared_relu_mlp(x[:16], up, down, "fp8_delayed")
        among = squared_relu_mlp(x, up, down, "fp8_delayed", torch.full((6,), 1e-9))
    assert torch.equal(alone, among[:16])
    with pytest.raises(ValueError, match="new_peaks"):
        squared_relu_mlp(x.requires_grad_(), up, down, "fp8_delayed")


def test_a_layer_that_saw_no_backward_pass_is_named():
    with pytest.raises(RuntimeError, match="no backward pass"):
        remember([new_peaks(len(PEAKS))])


@pytest.mark.gpu
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_gpu_within_its_bounds_called_and_compiled(precision, factor):
    """Products apart; those with the squared ReLU inside have files of their own."""
    torch.manual_seed(0)
    sizes = [(4096, 512), (2048, 512), (512, 2048), (4096, 512)]
    *inputs, weight = (
        torch.randn(*size, device="cuda") / size[1] ** (0.5 * (0 < i < 3)) for i, size in enumerate(sizes)
    )
    want = output_and_gradients(reference(factor), inputs, weight)
    half = [x.bfloat16() for x in inputs]
    own = [layer(precision, "cuda", factor, "torch") for _ in range(2)]
    for f in (own[0], torch.compile(own[1], fullgraph=True, dynamic=False)):
        got = output_and_gradients(f, half, weight.bfloat16())
        out, *gradients = (relative_error(g, w) for g, w in zip(got, want, strict=True))
        assert out < (0.08 if precision in FP8 else 0.01) and max(gradients) < (0.10 if precision in FP8 else 0.01)


def test_bad_precision_and_bad_sizes_are_named():
    (x, up, down), _ = draw()
    with pytest.raises(ValueError, match="unknown MLP precision 'int3'"):
        squared_relu_mlp(x, up, down, "int3")
    for precision in FP8:
        with pytest.raises(ValueError, match="multiples of 16, not "):
            squared_relu_mlp(x, up[:100], down[:, :100], precision)


@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("grad", [True, False])
def test_fp8_takes_any_number_of_tokens(precision, grad):
    """Filled up with zeros, which leave no trace."""
    (x, up, down), dy = draw()
    whole = x.detach().clone()
    whole[100:] = 0
    results = []
    with torch.set_grad_enabled(grad):
        for given in (x.detach()[:100].clone(), whole):
            leaves = [t.detach().clone().requires_grad_(grad) for t in (given, up, down)]
            peaks = new_peaks(len(PEAKS)) if precision == "fp8_delayed" else None
            y = squared_relu_mlp(*leaves, precision, peaks, 0.5)
            results.append([y[:100].detach()])
            if grad:
                y[:100].backward(dy.detach()[:100])
                results[-1] += [leaves[0].grad[:100], leaves[1].grad, leaves[2].grad]
                results[-1] += [] if peaks is None else [peaks.grad]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_relu_takes_its_derivative_from_its_value(dtype):
    """relu(h)^2 and 2 relu(h) by hand; what is not a number stays so."""
    h = torch.tensor([-2.0, -0.0, 0.0, 0.5, 3.0, torch.nan, torch.inf, -torch.inf], dtype=dtype, requires_grad=True)
    a = SquaredRelu.apply(h)
    (dh,) = torch.autograd.grad(a, h, torch.full_like(a, 2.0))
    inf, nan = torch.inf, torch.nan
    torch.testing.assert_close(a.float(), torch.tensor([0, 0, 0, 0.25, 9, nan, inf, 0]), equal_nan=True)
    torch.testing.assert_close(dh.float(), torch.tensor([0, 0, 0, 2, 12, nan, inf, 0]), equal_nan=True)
