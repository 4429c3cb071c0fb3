"""Every attention engine that the GPU at hand can run, held to the float32 truth and to the rules of packing.

Two rows of 1,024 tokens, 8 query and 2 key-value heads of 128. q, k and v are views of one tensor, as they are in the model.
"""

import contextlib
import importlib.util

import pytest
import torch

from dwslm.ops.attention import ENGINES, attention, resolve
from dwslm.ops.attention.blocked import attention_blocked
from dwslm.ops.attention.gpu import misfit
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
TOKENS, CONTEXT = 2048, 1024
SCALE = HEAD_DIM**-0.5
WINDOWS = [None, 1, 16, 512]
BOUND = 0.01  # on relative errors of bfloat16
# Empty, single-token and uneven segments, one as long as a row; spare slots at the end.
PACKED = [0, 1, 1, 40, 104, 105, 300, 941, 1024, 2048, 2048, 2048, 2048, 2048]
OTHER = [0, 700, 701, 1024, 1024, 1025, 1300, 1428, 1429, 1429, 1900, 2048, 2048, 2048]


@pytest.fixture(params=ENGINES)
def engine(request):
    try:
        resolve(request.param, torch.device("cuda"), torch.bfloat16, HEAD_DIM)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def same_bits(engine, monkeypatch):
    """A context in which the engine must give the same bits every time."""

    @contextlib.contextmanager
    def deterministic():
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    # FlexAttention adds nothing by atomics in either mode; the other mode would only compile it again. cuDNN has no other mode.
    return contextlib.nullcontext if engine in ("flex", "cudnn") else deterministic


def packed(offsets):
    return segments(boundaries(offsets).cuda(), TOKENS, CONTEXT)


def draw(seed=0):
    """q, k, v side by side, [T, heads + 2 kv_heads, head_dim], and the weight of each output in the loss."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    heads = HEADS + 2 * KV_HEADS
    return tuple(torch.randn(TOKENS, n, HEAD_DIM, **options) for n in (heads, HEADS))


def split(qkv):
    return qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)


def run(f, qkv, weight):
    """Output of f(q, k, v), and the gradients of (output * weight).sum() for q, k and v."""
    qkv = qkv.detach().requires_grad_()
    out = f(*split(qkv))
    (gradient,) = torch.autograd.grad((out * weight).sum(), qkv)
    return [out.detach(), *split(gradient)]


def attend(seg, engine, window=None):
    return lambda q, k, v: attention(q, k, v, seg, scale=SCALE, window=window, engine=engine)


def errors(got, want, weight):
    """Relative errors. A window of one token has no gradient for q and k but rounding, so sizes start at that of the loss."""
    floor = 1e-3 * weight.float().norm()
    return [
        ((g.float() - w.float()).norm() / torch.maximum(w.float().norm(), floor)).item()
        for g, w in zip(got, want, strict=True)
    ]


def same(engine, got, want, weight):
    """Bit for bit; of `cudnn` only the output, since its gradients are sums in no fixed order."""
    if engine == "cudnn":
        return torch.equal(got[0], want[0]) and max(errors(got, want, weight)) < 1e-3
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("window", [None, 16])
def test_the_truth_of_this_file_meets_the_token_by_token_reference(window):
    inputs = [torch.randn(200, heads, 64, device="cuda") for heads in (4, 2, 2)]
    weight, cu = torch.randn(200, 4, 64, device="cuda"), boundaries(UNEVEN).cuda()
    got = output_and_gradients(
        lambda q, k, v: attention_blocked(q, k, v, segments(cu, 200, 200), scale=0.125, window=window), inputs, weight
    )
    want = output_and_gradients(
        lambda q, k, v: attention_reference(q, k, v, cu, scale=0.125, window=window), inputs, weight
    )
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-4


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("offsets", [PACKED, OTHER], ids=["packed", "other"])
def test_engine_meets_the_float32_truth(engine, window, offsets):
    qkv, weight = draw()
    seg = packed(offsets)
    got = run(attend(seg, engine, window), qkv, weight)
    want = run(attend(seg, "torch", window), qkv.float(), weight.float())
    worst = errors(got, want, weight)
    assert got[0].dtype == torch.bfloat16
    assert max(worst) < BOUND, dict(zip(("o", "dq", "dk", "dv"), worst, strict=True))


def test_a_packed_batch_equals_its_segments_one_by_one(engine):
    qkv, weight = draw()
    together = run(attend(packed(PACKED), engine, 16), qkv, weight)
    apart = [torch.empty_like(x) for x in together]
    for start, end in zip(PACKED, PACKED[1:], strict=False):
        if start == end:
            continue
        # Alone at the start of a row, with other neighbours: the rest is one segment of padding, and another row.
        size = end - start
        alone, (other, other_weight) = [0, size, CONTEXT, TOKENS], draw(seed=1)
        other[:size], other_weight[:size] = qkv[start:end], weight[start:end]
        alone += [TOKENS] * (len(PACKED) - len(alone))
        for x, y in zip(apart, run(attend(packed(alone), engine, 16), other, other_weight), strict=True):
            x[start:end] = y[:size]
    assert max(errors(together, apart, weight)) < BOUND


@pytest.mark.parametrize("window", [None, 16])
def test_many_spare_slots_change_nothing(engine, window):
    """More than 256, from where on `flash4` looks a tile's segment up in another way."""
    qkv, weight = draw()
    few, many = (run(attend(packed(x), engine, window), qkv, weight) for x in (PACKED, PACKED + 290 * [TOKENS]))
    assert torch.equal(few[0], many[0])
    assert max(errors(many, few, weight)) < 1e-3  # the order of atomic additions


@pytest.mark.parametrize("window", [None, 16])
def test_a_changed_neighbour_changes_nothing(engine, same_bits, window):
    qkv, weight = draw()
    changed = qkv.clone()
    changed[105:300] = draw(seed=1)[0][105:300]
    seg = packed(PACKED)
    with same_bits():
        before, after = (run(attend(seg, engine, window), x, weight) for x in (qkv, changed))
    rest = torch.ones(TOKENS, dtype=torch.bool, device="cuda")
    rest[105:300] = False
    assert same(engine, [x[rest] for x in before], [x[rest] for x in after], weight[rest])
    assert not torch.equal(before[0], after[0])


def test_deterministic_mode_gives_the_same_bits_twice(engine, same_bits):
    qkv, weight = draw()
    seg = packed(OTHER)
    with same_bits():
        first, *others = (run(attend(seg, engine), qkv, weight) for _ in range(4))
    assert all(same(engine, first, other, weight) for other in others)


def test_deterministic_mode_refuses_cudnn_and_auto_takes_flash():
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve("auto", torch.device("cuda"), torch.bfloat16, HEAD_DIM) in ("flash", "torch")
        with pytest.raises(ValueError, match="'cudnn'"):
            resolve("cudnn", torch.device("cuda"), torch.bfloat16, HEAD_DIM)
    finally:
        torch.use_deterministic_algorithms(False)


def test_boundaries_refreshed_in_place_are_honoured(engine):
    qkv, _ = draw()
    cu = boundaries(PACKED).cuda()

    def forward():
        return attention(*split(qkv), segments(cu, TOKENS, CONTEXT), scale=SCALE, window=512, engine=engine)

    before = forward()
    cu.copy_(boundaries(OTHER))
    after = forward()
    assert torch.equal(after, attend(packed(OTHER), engine, 512)(*split(qkv)))
    assert not torch.equal(after, before)


def test_a_recorded_step_follows_its_boundaries(engine):
    qkv, weight = draw()
    cu = boundaries(PACKED).cuda()

    def step():
        seg = segments(cu, TOKENS, CONTEXT)
        return run(attend(seg, engine, 512), qkv, weight)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = step()
    for offsets in (PACKED, OTHER):
        cu.copy_(boundaries(offsets))
        graph.replay()
        want = step()
        assert torch.equal(recorded[0], want[0])
        # Gradients differ by the order of atomic additions.
        assert max(errors(recorded, want, weight)) < 1e-3


def test_compiled_is_one_graph_and_boundaries_compile_nothing(engine):
    def step(q, k, v, cu):
        return attention(q, k, v, segments(cu, TOKENS, CONTEXT), scale=SCALE, window=512, engine=engine)

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    qkv, weight = draw()
    cu = boundaries(PACKED).cuda()

    def both(cu, offsets):
        got = run(lambda q, k, v: compiled(q, k, v, cu), qkv, weight)
        want = run(attend(packed(offsets), engine, 512), qkv, weight)
        return errors(got, want, weight)

    assert max(both(cu, PACKED)) < BOUND
    with torch._dynamo.config.patch(error_on_recompile=True):
        cu.copy_(boundaries(OTHER))
        assert max(both(cu, OTHER)) < BOUND
        assert max(both(boundaries(PACKED).cuda(), PACKED)) < BOUND


def test_auto_is_the_fastest_that_fits_and_torch_for_float32():
    device = torch.device("cuda")
    capability = torch.cuda.get_device_capability(device)
    best = "flash" if capability >= (8, 0) else "torch"
    if capability == (9, 0) and importlib.util.find_spec("cudnn"):
        best = "cudnn"
    assert resolve("auto", device, torch.bfloat16, HEAD_DIM) == best
    assert resolve("auto", device, torch.float32, HEAD_DIM) == "torch"


@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.float16), (64, torch.bfloat16)])
@pytest.mark.parametrize("engine", ["cudnn", "flash4"])
def test_other_heads_and_layouts(engine, head_dim, dtype):
    """Packed q and k beside values that are a view of rows of another length, as after the fused QK-norm; odd context."""
    if reason := misfit(engine, torch.device("cuda"), dtype, head_dim):
        pytest.skip(reason)
    seg = segments(boundaries([0, 1, 1, 290, 300, 427, 600, 600]).cuda(), 600, 300)
    more = torch.randn(600, 2 * head_dim + 8, device="cuda", dtype=dtype)
    q, k = (torch.randn(600, n, head_dim, device="cuda", dtype=dtype) for n in (4, 2))
    v, weight = more[:, : 2 * head_dim].unflatten(1, (2, head_dim)), torch.randn_like(q)

    def both(name, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = attention(*inputs, seg, scale=head_dim**-0.5, engine=name)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

    got, want = both(engine, [q, k, v]), both("torch", [x.float() for x in (q, k, v)])
    assert max(errors(got, want, weight)) < BOUND


def test_operators_of_this_project_keep_the_rules(engine):
    if engine not in ("cudnn", "flash4"):
        pytest.skip("not an operator of this project")
    qkv, _ = draw()
    seg = packed(PACKED)
    inputs = *(x.requires_grad_() for x in split(qkv)), seg.cu_seqlens, CONTEXT, SCALE, 16
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    operator = getattr(torch.ops.dwslm, f"attention_{engine}").default
    torch.library.opcheck(operator, inputs, test_utils=checks)


def test_log_sum_exps_by_segment():
    """Each at its segment's place; behind an end, as far as a tile of cuDNN's may read, what lets nothing through."""
    from dwslm.ops.attention.pad import BLOCK, by_segment

    cu, stats = boundaries(PACKED).cuda(), torch.randn(TOKENS, 6, device="cuda")
    padded = by_segment(stats, cu, CONTEXT)
    assert padded.shape == (len(PACKED) - 1, 6, CONTEXT)
    for slot, (start, end) in enumerate(zip(PACKED, PACKED[1:], strict=False)):
        length = end - start
        written = min(length + BLOCK, CONTEXT) if length else 0
        assert torch.equal(padded[slot, :, :length], stats[start:end].T)
        assert (padded[slot, :, length:written] == 1e30).all()
