import pytest
import torch

from dwslm.model.block import DepthQuery, DepthStream, FusedDepthStream
from dwslm.model.projection import Norm
from dwslm.ops.depth_mix import depth_mix, inverse_rms, keys, resolve
from dwslm.ops.depth_mix.keys import reader_keys
from dwslm.ops.depth_mix.reference import depth_mix_reference
from tests.model.small import small_model
from tests.ops.helpers import output_and_gradients, relative_error


@pytest.mark.parametrize("sources", [1, 2, 6])
def test_meets_the_reference(sources):
    torch.manual_seed(sources)
    inputs = [*(torch.randn(20, 16) * (i + 1) for i in range(sources)), torch.randn(16), torch.rand(16) + 0.5]
    weight = torch.randn(20, 16)

    def engine(*x):
        return depth_mix(list(x[:-2]), [inverse_rms(v, 1e-6) for v in x[:-2]], x[-2], x[-1])

    got = output_and_gradients(engine, inputs, weight)
    want = output_and_gradients(lambda *x: depth_mix_reference(list(x[:-2]), x[-2], x[-1], 1e-6), inputs, weight)
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() < 1e-5 * max(1.0, w.norm())


def test_a_zero_query_averages():
    values = [torch.full((3, 4), 1.0), torch.full((3, 4), 4.0)]
    mixed = depth_mix(values, [inverse_rms(v, 1e-6) for v in values], torch.zeros(4), torch.ones(4))
    assert torch.allclose(mixed, torch.full((3, 4), 2.5))


def test_bfloat16_is_within_half_a_percent():
    torch.manual_seed(0)
    values = [torch.randn(50, 64).bfloat16() for _ in range(4)]
    query, gain = torch.randn(64) / 8, torch.ones(64)
    got = depth_mix(values, [inverse_rms(v, 1e-6) for v in values], query, gain)
    assert relative_error(got, depth_mix_reference(values, query, gain, 1e-6)) < 0.005


def test_engine_names_and_what_cannot_be_had():
    assert resolve("auto", torch.device("cpu")) == "torch"
    with pytest.raises(ValueError, match="'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"))
    with pytest.raises(ValueError, match="unknown depth engine 'deep'"):
        resolve("deep", torch.device("cpu"))


def chain(x, queries, gains, norms, mixers, block, fused):
    """A network of nothing but readers: blocks of `block` sublayers, each a reader that is normed and mixed by a matrix."""
    keys, eps = queries * gains, 1e-6
    readers = [DepthQuery(x.shape[1]) for _ in queries]
    for reader, query, gain in zip(readers, queries, gains, strict=True):
        del reader.query, reader.gain
        reader.query, reader.gain = query, gain
    stream = (FusedDepthStream(block, eps, keys) if fused else DepthStream(block, eps)).with_block(x)
    for reader, norm, mixer in zip(readers, norms, [*mixers, None], strict=True):
        after = Norm(x.shape[1], eps)
        del after.gain
        after.gain = norm
        y, stream = stream.read(reader, after)
        if mixer is not None:
            stream = stream.add(torch.tanh(y @ mixer) * 0.5)
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("width", [48, 1024])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_fused_in_a_chain_of_readers(block, width, dtype, bound):
    """bfloat16 is held to what the plain form does to the same chain, since a chain multiplies every rounding. With blocks of
    four the last reader sees one in progress. A gain of zero hides its input from the backward pass, which divides by it."""
    torch.manual_seed(0)
    total, readers = 200, 7
    inputs = [
        torch.randn(total, width, device="cuda"),
        torch.randn(readers, width, device="cuda") / width**0.5,
        *(1 + 0.1 * torch.randn(2, readers, width, device="cuda")).unbind(),
        torch.randn(readers - 1, width, width, device="cuda") / width**0.5,
    ]
    inputs[3][2, 5] = 0.0
    weight = torch.randn(total, width, device="cuda")

    def run(fused, dtype):
        cast = [x.to(dtype) if i in (0, 4) else x for i, x in enumerate(inputs)]
        return output_and_gradients(lambda *args: chain(*args, block=block, fused=fused), cast, weight)

    truth, got = run(False, torch.float32), run(True, dtype)
    errors = [relative_error(g, w) for g, w in zip(got, truth, strict=True)]
    if dtype == torch.bfloat16:
        plain = [relative_error(g, w) for g, w in zip(run(False, dtype), truth, strict=True)]
        assert all(e < max(bound, 1.5 * p) for e, p in zip(errors, plain, strict=True)), (errors, plain)
    else:
        assert max(errors) < bound
    assert all(torch.equal(a, b) for a, b in zip(got, run(True, dtype), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1536, 4096, 8192])
def test_fused_with_long_rows(width):
    """Longer rows take more threads, up to what a multiprocessor has registers for."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(9, width, device="cuda"),
        torch.randn(3, width, device="cuda") / width**0.5,
        *(1 + 0.1 * torch.randn(2, 3, width, device="cuda")).unbind(),
        torch.randn(2, width, width, device="cuda") / width**0.5,
    ]
    weight = torch.randn(9, width, device="cuda")

    def run(fused, dtype):
        cast = [x.to(dtype) if i in (0, 4) else x for i, x in enumerate(inputs)]
        return output_and_gradients(lambda *args: chain(*args, block=2, fused=fused), cast, weight)

    for g, w in zip(run(True, torch.bfloat16), run(False, torch.float32), strict=True):
        assert relative_error(g, w) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("readers", [1, 2, 5, 70])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.005)])
def test_close_scores_and_gathers(readers, dtype, bound):
    """Any number of readers: scores of a finished sum, and its gradient out of random dh, from the formulas in float64."""
    from dwslm.ops.depth_mix.fused import Partial, close

    total, width, eps = 300, 80, 1e-6
    link, y = (torch.randn(total, width, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    keys = (torch.randn(readers, width, device="cuda") / width**0.5).requires_grad_()
    closed = close(Partial(link.detach(), link), y, keys, eps)
    dh = [torch.randn(total, width, device="cuda").to(dtype) for _ in range(readers)]
    pairs = [torch.randn(2, total, device="cuda") + 2 for _ in range(readers)]
    got = torch.autograd.grad([*closed.rows, *closed.pairs], [link, y, keys], [*dh, *pairs])

    v, wide_keys = closed.value.double().detach().requires_grad_(), keys.double().detach().requires_grad_()
    scores = wide_keys @ (v / torch.sqrt(v.square().mean(-1, keepdim=True) + eps)).T
    weights = torch.exp(scores - torch.stack(pairs)[:, 0]).detach()
    inner = torch.einsum("jtc,tc->jt", torch.stack(dh).double(), v)
    change = (weights * (inner - torch.stack(pairs)[:, 1])).detach()
    dv, dkeys = torch.autograd.grad((weights * inner).sum() + (change * scores).sum(), [v, wide_keys])

    assert torch.equal(closed.value, link + y)
    assert relative_error(closed.scores, scores) < 1e-5
    assert torch.equal(got[0], got[1]) and relative_error(got[0], dv) < bound
    assert relative_error(got[2], dkeys) < 1e-4


@pytest.mark.gpu
def test_fused_in_a_recording_gives_the_same_bits():
    inputs = [
        torch.randn(64, 48, device="cuda").bfloat16(),
        torch.randn(7, 48, device="cuda"),
        *torch.rand(2, 7, 48, device="cuda").unbind(),
        torch.randn(6, 48, 48, device="cuda").bfloat16() / 7,
    ]
    weight = torch.randn(64, 48, device="cuda")

    def run():
        return output_and_gradients(lambda *args: chain(*args, block=3, fused=True), inputs, weight)

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(2):
        for x in got:
            x.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_fused_compiled_with_a_model_is_one_graph():
    torch.manual_seed(0)
    losses, gradients = [], []
    for engine in ("torch", "fused"):
        model = small_model(depth_engine=engine).cuda()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "query" in name:
                    parameter.add_(
                        0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).cuda()
                    )
        hidden = torch.compile(model.hidden, fullgraph=True, dynamic=False) if engine == "fused" else model.hidden
        tokens = torch.arange(64, device="cuda") % model.vocab_size
        cu_seqlens = torch.tensor([0, 10, 64, 64], dtype=torch.int32, device="cuda")
        loss = model.loss(hidden(tokens, cu_seqlens, 64), tokens.roll(-1))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert max(relative_error(g, gradients[0][name]) for name, g in gradients[1].items()) < 1e-3


def test_keys_of_all_readers_at_once():
    torch.manual_seed(0)
    queries, gains = ([torch.randn(8, requires_grad=True) for _ in range(3)] for _ in range(2))
    weight = torch.randn(3, 8)
    got = reader_keys(queries, gains)
    want = torch.stack([q * g for q, g in zip(queries, gains, strict=True)])
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), [*queries, *gains]) for y in (got, want)), strict=True):
        assert torch.equal(a, b)
    torch.library.opcheck(keys._keys, (queries, gains))
