"""Addition and norm before a product in FP8 that reads the norm alone: rounded by the norm's kernel where that fits."""

import pytest
import torch
from torch import Tensor

from dwslm.model.block import PlainStream
from dwslm.model.mlp import MLP
from dwslm.model.projection import Norm, OutputBlock, Projection
from dwslm.ops import fp8, mlp
from dwslm.ops.add_norm import add_norm, add_norm_rounded, rounds
from dwslm.ops.add_norm.reference import add_norm_reference
from dwslm.ops.fp8 import PEAKS, Rounded, delayed_linear, new_peaks
from dwslm.ops.fp8.reference import linear_reference
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from dwslm.train.compiling import prepare_compiler
from tests.model.small import packed, small_model
from tests.ops.helpers import relative_error

EPS, FACTOR = 1e-6, 0.4
PRODUCTS = ("linear", "mlp")
BOUNDS = {"linear": 0.08, "mlp": 0.1}


def draw(total: int, width: int, product: str, dtype: torch.dtype, device: str = "cpu"):
    """x, y, gain and weights, and what is said of the sum and of the product."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    inputs = [normal(total, width).to(dtype), normal(total, width).to(dtype), 1 + 0.3 * normal(width)]
    inputs.append((normal(48, width) / width**0.5).to(dtype))
    if product == "mlp":
        inputs.append((normal(width, 48) / width**0.5).to(dtype))
    return inputs, [normal(total, width).to(dtype), normal(total, 48 if product == "linear" else width).to(dtype)]


def both(product: str, peaks: Tensor, engine: str, adds: bool = True):
    """Sum and product as a function of x, y, gain and weights; the sum is x where nothing is to be added."""

    def f(x: Tensor, y: Tensor, gain: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        how = fp8.rounding(peaks, FACTOR) if product == "linear" else mlp.rounding(peaks)
        added, normed = add_norm_rounded(x, y if adds else None, gain, EPS, how, engine)
        if product == "linear":
            return added, delayed_linear(normed, *weights, peaks, FACTOR)
        return added, mlp.squared_relu_mlp(normed, *weights, "fp8_delayed", peaks, FACTOR)

    return f


def truth(product: str, adds: bool = True):
    def f(x: Tensor, y: Tensor, gain: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        added, normed = add_norm_reference(x, y if adds else None, gain, EPS)
        if product == "linear":
            return added, linear_reference(normed, *weights, FACTOR)
        return added, squared_relu_mlp_reference(normed, *weights, FACTOR)

    return f


def results(f, inputs: list[Tensor], says: list[Tensor]) -> list[Tensor]:
    """Both outputs, and gradients that come from both: what is said of the sum comes from later readers."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = f(*inputs)
    total = sum((out * said).sum() for out, said in zip(outputs, says, strict=True))
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return [out.detach() for out in outputs] + [g for g in gradients if g is not None]


def state(product: str, device: str = "cpu") -> Tensor:
    return new_peaks(len(PEAKS) if product == "linear" else len(mlp.PEAKS), torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", PRODUCTS)
def test_on_a_cpu_it_is_what_the_two_are_one_after_the_other(product, dtype):
    inputs, says = draw(48, 128, product, dtype)
    got = results(both(product, state(product), "auto"), inputs, says)

    def apart(x: Tensor, y: Tensor, gain: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        added, normed = add_norm(x, y, gain, EPS)
        if product == "linear":
            return added, delayed_linear(normed, *weights, state(product), FACTOR)
        return added, mlp.squared_relu_mlp(normed, *weights, "fp8_delayed", state(product), FACTOR)

    assert all(torch.equal(g, w) for g, w in zip(got, results(apart, inputs, says), strict=True))
    want = results(truth(product), [x.float() for x in inputs], [s.float() for s in says])
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < BOUNDS[product]
    assert not rounds("auto", torch.device("cpu"), 1024)
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        results(both(product, state(product), "fused"), inputs, says)


def test_sublayers_say_how_their_input_is_rounded_and_a_stream_asks_for_it(monkeypatch):
    """The scale of x is that of its own peak, times the root of the projection's factor; other precisions want a tensor."""
    block = OutputBlock("", 32)
    projection = Projection(64, block, dtype=torch.float32, precision="fp8_delayed", factor=0.25)
    layer = MLP(64, 96, "fp8_delayed", torch.float32, 0.25)
    for how, keeper, factor in ((projection.rounding(), projection, 0.5), (layer.rounding(), layer, 1.0)):
        assert how is not None and how.peaks is keeper.peaks and (how.which, how.factor) == (0, factor)
    assert Projection(64, block, dtype=torch.float32).rounding() is None
    assert all(MLP(64, 96, name, torch.float32).rounding() is None for name in ("model", "fp8"))
    asked = []
    for name, answer in (("add_norm", (1, 2)), ("add_norm_rounded", (3, 4))):
        monkeypatch.setattr(f"dwslm.model.block.{name}", lambda *a, answer=answer: asked.append(a) or answer)
    norm = Norm(64, EPS)
    assert PlainStream(torch.zeros(1), "auto").read(None, norm) == (2, PlainStream(1, "auto"))
    how = layer.rounding()
    assert PlainStream(5, "auto", pending=6).read(None, norm, how) == (4, PlainStream(3, "auto"))
    assert asked[1] == (5, 6, norm.gain, EPS, how, "auto")


# A program's rows and a part of them, one and several steps along the width; with and without what is added.
@pytest.mark.gpu
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("total", "width"), [(16, 128), (272, 384), (1024, 1024), (2512, 1024)])
def test_fused_before_a_product(total, width, compiled, adds, product):
    """Against float32, with scales of the tensors at hand and known ones; the same bits twice; the peaks that were seen."""
    inputs, says = draw(total, width, product, torch.bfloat16, "cuda")
    want = results(truth(product, adds), [x.float() for x in inputs], [s.float() for s in says])
    added = inputs[0] + inputs[1] if adds else inputs[0]  # of which the norm is taken, rounded as it is
    largest = add_norm_reference(added, None, inputs[2], EPS)[1].abs().max().item()
    torch._dynamo.reset()
    peaks = state(product, "cuda")
    f = both(product, peaks, "fused", adds)
    f = torch.compile(f, fullgraph=True, dynamic=False) if compiled else f
    for _ in range(2):
        first, second = (results(f, inputs, says) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert max(relative_error(g, w) for g, w in zip(first, want, strict=True)) < BOUNDS[product]
        torch.autograd.backward(f(*(x.detach().requires_grad_() for x in inputs)), says)
        assert peaks.grad[:2].tolist() == pytest.approx([largest, inputs[3].abs().max().item()], rel=1e-4)
        fp8.remember([peaks])


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("peak", [8.0, 0.0])
@pytest.mark.parametrize(("total", "width"), [(16, 128), (272, 384), (20_000, 1024), (65_536, 1024)])
def test_fused_rounds_to_the_bits_of_the_formula(total, width, peak, adds):
    """All but a value in ten thousand, since the inverse root is another one in its last bits; the sum to the bit. By a known
    peak, and by that of the tensor at hand."""
    (x, y, gain, _), _ = draw(total, width, "linear", torch.bfloat16, "cuda")
    peaks = torch.full((len(PEAKS),), peak, device="cuda", requires_grad=True)
    added, made = add_norm_rounded(x, y if adds else None, gain, EPS, fp8.rounding(peaks, FACTOR), "fused")
    assert isinstance(made, Rounded) and made.path.shape == x.shape and made.path.isnan().all()
    want = x + y if adds else x
    assert torch.equal(added, want)
    values, transposed, scale, seen = fp8.quantize.both(
        add_norm_reference(want.cpu(), None, gain.cpu(), EPS)[1], None, False, peaks.cpu(), 0, FACTOR**0.5
    )
    assert torch.equal(made.transposed.view(torch.uint8), made.values.view(torch.uint8).t())
    different = made.values.cpu().view(torch.uint8) != values.view(torch.uint8)
    assert different.float().mean() < 1e-4 and transposed.shape == made.transposed.shape
    assert made.scale.item() == pytest.approx(scale.item(), rel=1e-5)
    assert made.seen.max().item() == pytest.approx(seen.item(), rel=1e-5)


@pytest.mark.gpu
def test_what_does_not_fit_comes_as_a_tensor():
    assert rounds("auto", torch.device("cuda"), 1024)
    assert not any(rounds(name, torch.device("cuda"), w) for name, w in (("auto", 96), ("auto", 2048), ("torch", 1024)))
    how = fp8.rounding(new_peaks(len(PEAKS), torch.device("cuda")), 1.0)
    for total, width, engine in ((24, 128, "fused"), (32, 96, "fused"), (32, 128, "torch")):
        x = torch.randn(total, width, device="cuda", dtype=torch.bfloat16)
        assert isinstance(add_norm_rounded(x, x, torch.ones(width, device="cuda"), EPS, how, engine)[1], Tensor)
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert isinstance(add_norm_rounded(x, x, torch.ones(128, device="cuda"), EPS, how, "fused")[1], Tensor)


@pytest.mark.gpu
def test_fused_hands_on_what_is_not_finite():
    (x, y, gain, weight), _ = draw(256, 128, "linear", torch.bfloat16, "cuda")
    x[200, 7] = torch.nan
    _, out = both("linear", state("linear", "cuda"), "fused")(x, y, gain, weight)
    assert not out[200].isfinite().any() and out[:200].isfinite().all() and out[201:].isfinite().all()


@pytest.mark.gpu
def test_fused_compiled_with_a_model_is_one_graph():
    """Three micro-batches, so that scales are known; the two forms round x once and twice, a few per cent of its values apart."""
    shape = {"width": 256, "heads": 2, "kv_heads": 1, "head_dim": 128, "delta_head_dim": 128, "mlp_hidden": 512}
    precision = {"dtype": "bfloat16", "mlp_precision": "fp8_delayed", "projection_precision": "fp8_delayed"}
    prepare_compiler()  # or PyTorch before 2.13 writes down what each operator was made from, for minutes
    losses, gradients = [], []
    for name in ("torch", "fused"):
        torch._dynamo.reset()
        model = small_model(depth_block=0, norm_engine=name, **shape, **precision).cuda()
        hidden = torch.compile(model.hidden, fullgraph=True, dynamic=False) if name == "fused" else model.hidden
        tokens, targets, cu_seqlens = (t.cuda() for t in packed([10, 50, 4]))
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            loss = model.loss(hidden(tokens, cu_seqlens, 64), targets)
            loss.backward()
            model.note_peaks()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert relative_error(gradients[1], gradients[0]) < 0.15
