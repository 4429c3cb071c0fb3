import pytest
import torch

from dwslm.model.block import PlainStream
from dwslm.model.projection import Norm
from dwslm.ops.add_norm import add_norm, last_norm, resolve
from dwslm.ops.add_norm.reference import add_norm_reference
from dwslm.ops.norm import rms_norm
from tests.model.small import packed, small_model
from tests.ops.helpers import relative_error

EPS = 1e-6
WAYS = ("both", "sum without gradient", "norm without gradient", "nothing to add", "last")
"""What a reader may see: which result is used, and whether there is something to add."""


def draw(total, width, dtype, device="cpu"):
    """x, y, gain, and what is said of the sum and of the norm."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    inputs = [normal(total, width).to(dtype), normal(total, width).to(dtype), 1 + 0.3 * normal(width)]
    return [x.to(device) for x in inputs], [normal(total, width).to(device) for _ in range(2)]


def results(f, last, inputs, weights, way):
    """Outputs and gradients in one of `WAYS`. f: to both results, last: to the norm alone. What arrives backward is strided."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    x, y, gain = inputs
    if way == "nothing to add":
        inputs, y = [x, gain], None
    outputs = [last(x, y, gain)] if way == "last" else list(f(x, y, gain))
    used = {"sum without gradient": outputs[1:], "norm without gradient": outputs[:1]}.get(way, outputs)
    says = {"norm without gradient": weights[:1], "last": weights[1:], "sum without gradient": weights[1:]}
    strided = [w.to(out.dtype).t().contiguous().t() for w, out in zip(says.get(way, weights), used, strict=True)]
    gradients = torch.autograd.grad(used, inputs, strided, allow_unused=True)
    return [out.detach() for out in outputs] + [x.new_zeros(1) if g is None else g for g in gradients]


def engine(name):
    return (
        lambda x, y, gain: add_norm(x, y, gain, EPS, name),
        lambda x, y, gain: last_norm(x, y, gain, EPS, name),
    )


REFERENCE = (
    lambda x, y, gain: add_norm_reference(x, y, gain, EPS),
    lambda x, y, gain: add_norm_reference(x, y, gain, EPS)[1],
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.006)])
def test_the_torch_form_meets_the_reference(way, dtype, bound):
    inputs, weights = draw(60, 48, dtype)
    got, want = (results(*f, inputs, weights, way) for f in (engine("torch"), REFERENCE))
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < bound


def test_values_by_hand():
    """(1, 4) + (2, 0) = (3, 4) has a mean square of 12.5."""
    added, normed = add_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([1.0, 10.0]), 0.0)
    assert added.tolist() == [[3.0, 4.0]] and normed.tolist() == [pytest.approx([3 / 12.5**0.5, 40 / 12.5**0.5])]


def test_engine_names_and_what_cannot_be_had():
    assert resolve("auto", torch.device("cpu"), 64) == "torch"
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"), 64)
    with pytest.raises(ValueError, match="unknown norm engine 'deep'"):
        resolve("deep", torch.device("cpu"), 64)


@pytest.mark.gpu
def test_rows_that_are_too_long_are_refused():
    assert resolve("auto", torch.device("cuda"), 8192) == "fused"
    assert resolve("auto", torch.device("cuda"), 16384) == "torch"
    with pytest.raises(ValueError, match="up to 8192"):
        resolve("fused", torch.device("cuda"), 16384)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_is_the_running_sum(dtype):
    """To the bit: x += f(norm(x)), read once more at the end. A reader that adds what is pending changes no rounding."""
    torch.manual_seed(0)
    x, mixers = torch.randn(20, 16).to(dtype), torch.randn(3, 16, 16).to(dtype)
    norms = [Norm(16, EPS) for _ in range(4)]
    for norm in norms:
        torch.nn.init.normal_(norm.gain)

    def by_formula(x, *mixers):
        for norm, mixer in zip(norms, mixers, strict=False):
            x = x + torch.tanh(rms_norm(x, norm.gain, EPS) @ mixer)
        return rms_norm(x, norms[-1].gain, EPS)

    def by_stream(x, *mixers):
        stream = PlainStream(x, "torch")
        for norm, mixer in zip(norms, mixers, strict=False):
            h, stream = stream.read(None, norm)
            stream = stream.add(torch.tanh(h @ mixer))
        return stream.last(None, norms[-1])

    found = []
    for f in (by_formula, by_stream):
        inputs = [t.clone().requires_grad_() for t in (x, *mixers)]
        out = f(*inputs)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [*inputs, *(n.gain for n in norms)])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# One row, a row for some programs alone, and more than a turn for all of them; rows with spare columns, and long ones.
@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("total", "width"), [(1, 1024), (300, 256), (2501, 1024), (1700, 2048), (300, 96), (100, 1536), (40, 8192)]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.006)])
def test_fused_meets_the_reference(total, width, way, dtype, bound):
    inputs, weights = draw(total, width, dtype, "cuda")
    got, want = (results(*f, inputs, weights, way) for f in (engine("fused"), REFERENCE))
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < bound
    again = results(*engine("fused"), inputs, weights, way)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
def test_fused_keeps_the_rules_of_custom_operators():
    (x, y, gain), _ = draw(100, 48, torch.float32, "cuda")
    add_norm(x, y, gain, EPS, "fused")  # loads the operator
    for dsum in (None, y):
        torch.library.opcheck(torch.ops.dwslm.add_norm_backward.default, (x, dsum, y, gain, EPS))


@pytest.mark.gpu
def test_fused_compiled_with_a_model_is_one_graph():
    losses, gradients = [], []
    for name in ("torch", "fused"):
        model = small_model(depth_block=0, norm_engine=name).cuda()
        hidden = torch.compile(model.hidden, fullgraph=True, dynamic=False) if name == "fused" else model.hidden
        tokens, targets, cu_seqlens = (t.cuda() for t in packed([10, 50, 4]))
        loss = model.loss(hidden(tokens, cu_seqlens, 64), targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert max(relative_error(g, gradients[0][name]) for name, g in gradients[1].items()) < 1e-3
