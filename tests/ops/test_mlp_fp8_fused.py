"""The delayed recipe's products that round for themselves: what they ask for, and on a GPU their gates."""

import time

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from dwslm.ops.fp8 import new_peaks, quantize
from dwslm.ops.fp8.formats import FP8
from dwslm.ops.fp8.product import product
from dwslm.ops.mlp import PEAKS, fp8_fit, fp8_products, squared_relu_mlp
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from tests.ops.helpers import output_and_gradients, relative_error

HOPPER = torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = [(128, 256, 256), (640, 1024, 4096), (17024, 512, 768), (4096, 2048, 512)]
INDEX = 1


def skip_where_it_does_not_fit(tokens: int, width: int, hidden: int) -> None:
    if reason := fp8_fit.misfit(HOPPER, tokens, width, hidden):
        pytest.skip(reason)


def test_what_does_not_fit_is_named(monkeypatch):
    monkeypatch.setattr(fp8_fit.choice, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8_fit.choice, "TRITON", "3.6.0")
    assert fp8_fit.misfit(HOPPER, 4096, 1024, 4096) is None
    for device, *sizes, word in (
        (torch.device("cpu"), 4096, 1024, 4096, "needs a GPU"),
        (HOPPER, 4000, 1024, 4096, "multiples of 128"),
        (HOPPER, 0, 1024, 4096, "multiples of 128"),
        (HOPPER, 4096, 128, 4096, "from 256 on"),
        (HOPPER, 4096, 320, 4096, "multiples of 128 from"),
        (HOPPER, 4096, 1024, 4224, "multiples of 256"),
    ):
        assert word in (fp8_fit.misfit(device, *sizes) or "")
    monkeypatch.setattr(fp8_fit.choice, "TRITON", "3.60.0")
    assert "3.60.0 is installed" in (fp8_fit.misfit(HOPPER, 4096, 1024, 4096) or "")


def test_auto_takes_them_where_they_fit_and_by_name_they_are_refused_elsewhere(monkeypatch):
    with monkeypatch.context() as here:
        here.setattr(fp8_fit, "misfit", lambda device, *sizes: None if sizes[0] == 4096 else "takes other sizes")
        assert (
            fp8_fit.resolve("auto", HOPPER, 4096, 1024, 4096) == fp8_fit.resolve("fused", HOPPER, 4096, 1, 1) == "fused"
        )
        assert fp8_fit.resolve("auto", HOPPER, 4000, 1024, 4096) == "torch"
        assert fp8_fit.resolve("torch", HOPPER, 4096, 1024, 4096) == "torch"
    assert fp8_fit.resolve("auto", torch.device("cpu"), 4096, 1024, 4096) == "torch"
    x, up, down = torch.randn(128, 256), torch.randn(256, 256) / 16, torch.randn(256, 256) / 16
    with pytest.raises(ValueError, match="MLP engine 'fused' needs a GPU and Triton .* choose auto or torch"):
        squared_relu_mlp(x, up, down, "fp8_delayed", new_peaks(len(PEAKS)), engine="fused")


@pytest.mark.parametrize("factor", [1.0, 0.4])
def test_the_layer_takes_them_and_compiles(monkeypatch, factor):
    """On a CPU, by their formulas: in float32 those of the operators apart, to the bit."""
    torch.manual_seed(0)
    x, up, down = torch.randn(128, 256), torch.randn(256, 256) / 16, torch.randn(256, 256) / 16
    peaks = new_peaks(len(PEAKS), x.device)
    monkeypatch.setattr(fp8_fit, "misfit", lambda device, *sizes: None)
    called: set[str] = set()

    def look(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph

    def layer(*t: torch.Tensor, engine: str = "fused") -> torch.Tensor:
        return squared_relu_mlp(*t[:3], "fp8_delayed", t[3], factor, engine)

    want = output_and_gradients(lambda *t: layer(*t, engine="torch"), [x, up, down, peaks], x)
    traced = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=look))
    for f in (layer, traced):
        got = output_and_gradients(f, [x, up, down, peaks], x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert {"dwslm.fp8_squared_relu_up.default", "dwslm.fp8_squared_relu_down_gradient.default"} <= called


def whole(shape: tuple[int, int], low: int, high: int, seed: int) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(low, high + 1, shape, device="cuda", generator=g).float().to(FP8)


def number(value: float) -> torch.Tensor:
    return torch.full((1, 1), value, device="cuda")


def forward(fused: bool, x, x_scale, up, up_scale, peaks):
    if fused:
        return fp8_products.squared_relu_up(x, x_scale, up, up_scale, peaks, INDEX)
    return quantize.both(product(x, x_scale, up, up_scale, BF16, True), None, True, peaks, INDEX)


def backward(fused: bool, dy, dy_scale, down_t, down_scale, a, a_scale, peaks, factor=0.5):
    if fused:
        return fp8_products.squared_relu_down_gradient(
            dy, dy_scale, down_t, down_scale, a, a_scale, peaks, INDEX, factor
        )
    da = product(dy, dy_scale, down_t, down_scale, BF16, True)
    return quantize.both(da, a, False, peaks, INDEX, factor, a_scale)


def same(got, want) -> bool:
    """Bits of both roundings and of the scale, and the peak."""
    bits = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got[:3], want[:3], strict=True)]
    return all(bits) and got[3].max().item() == pytest.approx(want[3].max().item(), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("peak", [0.0, 3.0, 1e-3, 1e4])
@pytest.mark.parametrize(("tokens", "width", "hidden"), SHAPES)
def test_the_bits_of_the_operators_apart_where_all_sums_are_exact(tokens, width, hidden, peak):
    """Whole numbers below 256, scales that are powers of two and squares of such: bfloat16 and float32 round none of them but
    at the end. A peak that is not known, one that leaves room, one that saturates, and one under which most vanishes."""
    skip_where_it_does_not_fit(tokens, width, hidden)
    x, w = whole((tokens, width), -1, 1, 0), whole((hidden, width), -1, 1, 1)
    a = (whole((tokens, hidden), 0, 4, 2).float() ** 2).to(FP8)
    peaks = torch.tensor([7.0, peak], device="cuda")
    for step, *given in (
        (forward, x, number(2**-3), w, number(2**-4)),
        (backward, x, number(2**-9), w, number(2**-4), a, number(2**-6)),
    ):
        want, got = step(False, *given, peaks), step(True, *given, peaks)
        assert same(got, want)
        for _ in range(3):  # a race would move
            assert same(step(True, *given, peaks), got)


def rounded(rows: int, columns: int, size: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = (torch.randn(rows, columns, device="cuda", generator=g) * size).to(BF16)
    values, _, scale, _ = quantize.both(x, None, False, torch.zeros(1, device="cuda"), 0)
    return values, scale


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "width", "hidden"), SHAPES)
def test_close_to_the_operators_apart_on_what_a_layer_has(tokens, width, hidden):
    """Apart h and da are rounded to bfloat16: a few percent of the values fall on the next float8."""
    skip_where_it_does_not_fit(tokens, width, hidden)
    x, up = rounded(tokens, width, 1.0, 0), rounded(hidden, width, width**-0.5, 1)
    dy, down_t = rounded(tokens, width, 1e-3, 2), rounded(hidden, width, hidden**-0.5, 3)
    peaks = torch.zeros(2, device="cuda")
    a, _, a_scale, _ = forward(True, *x, *up, peaks)
    for step, given in ((forward, (*x, *up)), (backward, (*dy, *down_t, a, a_scale))):
        got, want = step(True, *given, peaks), step(False, *given, peaks)
        assert got[2].item() == pytest.approx(want[2].item(), rel=0.01)
        assert torch.equal(got[0].t().contiguous().view(torch.uint8), got[1].view(torch.uint8))
        values = [r[0].float() * r[2] for r in (got, want)]
        assert 0 < relative_error(*values) < 0.04
        full = [(values[0] - values[1]).abs(), values[1].abs() * 0.13 + 1e-3 * values[1].abs().max()]
        assert (full[0] <= full[1]).all()


@pytest.mark.gpu
def test_what_is_not_finite_becomes_nan():
    skip_where_it_does_not_fit(256, 256, 512)
    x, w = whole((256, 256), -1, 1, 0), whole((512, 256), -1, 1, 1)
    a = whole((256, 512), 0, 4, 2)
    x.view(torch.uint8)[200, 7] = 0x7F
    a.view(torch.uint8)[100, 300] = 0x7F
    peaks = torch.tensor([0.0, 9.0], device="cuda")
    one = number(1.0)
    values, transposed, _, seen = forward(True, x, one, w, one, peaks)
    bad = values.float().isnan()
    assert bad[200].all() and bad.sum() == 512 and torch.equal(transposed.float().isnan(), bad.t())
    assert seen.isfinite().all() and (seen >= 0).all()
    values, transposed, *_ = backward(True, x, one, w, one, a, one, peaks)
    bad = values.float().isnan()
    assert bad[200].all() and bad[100, 300] and bad.sum() == 513 and torch.equal(transposed.float().isnan(), bad.t())
    assert forward(True, x, number(float("inf")), w, one, peaks)[0].float().isnan().all()
    assert backward(True, x, number(float("nan")), w, one, a, one, peaks)[0].float().isnan().all()


@pytest.mark.gpu
def test_recorded_they_go_by_the_peak_of_the_moment():
    """Recorded with a peak that is known, replayed with none and with others: no decision is left to the host."""
    skip_where_it_does_not_fit(1280, 512, 1024)
    x, up = rounded(1280, 512, 1.0, 0), rounded(1024, 512, 512**-0.5, 1)
    dy, down_t = rounded(1280, 512, 1e-3, 2), rounded(1024, 512, 0.03, 3)
    peaks = torch.tensor([0.0, 5.0], device="cuda")

    def both_ways() -> list[torch.Tensor]:
        a, a_t, a_scale, a_seen = forward(True, *x, *up, peaks)
        return [a, a_t, a_scale, a_seen, *backward(True, *dy, *down_t, a, a_scale, peaks)]

    both_ways()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = both_ways()
    scales = set()
    for peak in (0.0, 5.0, 0.0, 0.25):
        peaks[INDEX] = peak
        want = both_ways()
        for result in recorded:
            result.view(torch.uint8).zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(recorded, want, strict=True))
        scales.add(recorded[2].item())
    assert len(scales) == 3


@pytest.mark.gpu
def test_launches_that_have_nothing_to_do_end_each_time():
    """One in some tens of thousands did not where a peak was known: its parts were at odds about the number of tiles."""
    tokens, width, hidden = 512, 256, 512
    skip_where_it_does_not_fit(tokens, width, hidden)
    x, up = (torch.randn(n, width, device="cuda").to(FP8) for n in (tokens, hidden))
    scale, peaks = torch.ones(1, 1, device="cuda"), torch.full((6,), 1000.0, device="cuda")
    fp8_products.squared_relu_up(x, scale, up, scale, peaks, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(500):
            made = fp8_products.squared_relu_up(x, scale, up, scale, peaks, 3)
    for _ in range(200):
        graph.replay()
    ended = torch.cuda.Event()
    ended.record()
    deadline = time.monotonic() + 60
    while not ended.query():
        assert time.monotonic() < deadline, "a launch does not end"
        time.sleep(0.1)
    assert made[3].max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 0.4])
@pytest.mark.parametrize(("tokens", "width", "hidden"), SHAPES[1:])
def test_the_layer_meets_the_reference_and_itself_compiled(tokens, width, hidden, factor):
    skip_where_it_does_not_fit(tokens, width, hidden)
    g = torch.Generator("cuda").manual_seed(tokens)
    x, up, down, weight = (
        (torch.randn(shape, device="cuda", generator=g) * size).to(BF16)
        for shape, size in (
            ((tokens, width), 1.0),
            ((hidden, width), width**-0.5),
            ((width, hidden), hidden**-0.5),
            ((tokens, width), 1.0),
        )
    )
    peaks = new_peaks(len(PEAKS), HOPPER)

    inputs = [x, up, down, peaks]

    def layer(*t: torch.Tensor) -> torch.Tensor:
        return squared_relu_mlp(*t[:3], "fp8_delayed", t[3], factor, "fused")

    got = output_and_gradients(layer, inputs, weight)
    want = output_and_gradients(
        lambda *t: squared_relu_mlp_reference(*t, factor), [t.float() for t in inputs[:3]], weight.float()
    )
    errors = [relative_error(a, b) for a, b in zip(got[:4], want, strict=True)]
    assert 0.01 < errors[0] < 0.08 and max(errors[1:]) < 0.10
    apart = output_and_gradients(
        lambda *t: squared_relu_mlp(*t[:3], "fp8_delayed", t[3], factor, "torch"), inputs, weight
    )
    assert max(relative_error(a, b) for a, b in zip(got, apart, strict=True)) < 0.05
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    again = output_and_gradients(compiled, inputs, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
