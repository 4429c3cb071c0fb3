import math
import sys
import types

import pytest
import torch

from dwslm.ops.attention import attention, blocked, check_name, cudnn, gpu, resolve
from dwslm.ops.attention import flash as flash_file
from dwslm.ops.attention import flex as flex_file
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("window", [None, 1, 16, 512])
@pytest.mark.parametrize("block", [32, 256])
def test_engine_meets_the_reference(window, block, monkeypatch):
    monkeypatch.setattr(blocked, "QUERY_BLOCK", block)
    torch.manual_seed(window or 0)
    total, cu = 200, boundaries(UNEVEN)
    inputs = [torch.randn(total, heads, 16) for heads in (4, 2, 2)]
    weight = torch.randn(total, 4, 16)
    got = output_and_gradients(
        lambda q, k, v: attention(q, k, v, segments(cu, total, total), scale=0.25, window=window),
        inputs,
        weight,
    )
    want = output_and_gradients(
        lambda q, k, v: attention_reference(q, k, v, cu, scale=0.25, window=window), inputs, weight
    )
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 5e-5


def test_reference_by_hand():
    """Two tokens of one segment, then one of another: softmax of (1, 3) over the first two, itself alone for the third."""
    q = torch.tensor([[[1.0]], [[1.0]], [[1.0]]])
    k = torch.tensor([[[1.0]], [[3.0]], [[5.0]]])
    v = torch.tensor([[[10.0]], [[20.0]], [[30.0]]])
    out = attention_reference(q, k, v, boundaries([0, 2, 3]), scale=1.0)
    second = (10 * math.exp(1) + 20 * math.exp(3)) / (math.exp(1) + math.exp(3))
    assert out.flatten().tolist() == pytest.approx([10, second, 30])


def test_a_window_counts_the_query_itself():
    v = torch.arange(5.0)[:, None, None]
    zero = torch.zeros(5, 1, 1)
    out = attention(zero, zero, v, segments(boundaries([0, 5]), 5, 5), scale=1.0, window=2)
    assert out.flatten().tolist() == pytest.approx([0, 0.5, 1.5, 2.5, 3.5])


def test_rows_are_independent_of_their_batch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 2, 8) for _ in range(3))
    both = attention(q, k, v, segments(boundaries([0, 20, 32, 64]), 64, 32), scale=0.3)
    first = attention(q[:32], k[:32], v[:32], segments(boundaries([0, 20, 32]), 32, 32), scale=0.3)
    assert torch.allclose(both[:32], first, atol=1e-6)


# ---- which engine ---------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A made-up GPU: machine(capability) sets its generation; PyTorch has FlashAttention, no other package is installed."""

    def set_capability(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for package in ("flash_attn", "cudnn"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it is an ImportError
    monkeypatch.setattr(cudnn, "unavailable", cudnn.unavailable.__wrapped__)  # what it found before is not remembered
    set_capability(9, 0)
    return set_capability


@pytest.fixture
def with_cudnn(machine, monkeypatch):
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)


def install_flash_attn(monkeypatch, function):
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def test_an_unknown_engine_is_named():
    with pytest.raises(
        ValueError, match="unknown attention engine 'flash9': choose one of auto, cudnn, flash, flash4, flash_attn"
    ):
        check_name("flash9")
    with pytest.raises(ValueError, match="unknown attention engine 'flash9'"):
        resolve("flash9", CPU, torch.float32, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_on_a_cpu_is_torch(dtype):
    assert resolve("auto", CPU, dtype, 128) == "torch"


@pytest.mark.parametrize("generation", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_auto_is_flash_from_ampere_on(machine, generation, dtype):
    machine(*generation)
    assert resolve("auto", GPU, dtype, 128) == "flash"


def test_auto_is_cudnn_on_hopper_where_it_is_installed(machine, with_cudnn):
    assert resolve("auto", GPU, torch.bfloat16, 128) == resolve("cudnn", GPU, torch.float16, 64) == "cudnn"
    assert resolve("auto", GPU, torch.bfloat16, 256) == "flash"
    assert resolve("auto", GPU, torch.float32, 128) == "torch"
    machine(10, 0)
    assert resolve("auto", GPU, torch.bfloat16, 128) == "flash"


def test_deterministic_mode_refuses_cudnn_and_auto_takes_flash(with_cudnn):
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve("auto", GPU, torch.bfloat16, 128) == "flash"
        with pytest.raises(ValueError, match="'cudnn' has no deterministic backward .* set train.deterministic=false"):
            resolve("cudnn", GPU, torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_is_torch_where_flash_does_not_fit(machine, monkeypatch):
    assert resolve("auto", GPU, torch.float32, 128) == "torch"
    assert resolve("auto", GPU, torch.bfloat16, 12) == "torch"
    assert resolve("auto", GPU, torch.bfloat16, 264) == "torch"
    machine(7, 5)
    assert resolve("auto", GPU, torch.float16, 128) == "torch"
    machine(9, 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert resolve("auto", GPU, torch.bfloat16, 128) == "torch"


@pytest.mark.parametrize(
    ("engine", "device", "dtype", "head_dim", "generation", "message"),
    [
        ("flash", CPU, torch.bfloat16, 128, (9, 0), "needs an NVIDIA GPU, which cpu is not: choose auto or torch"),
        ("flex", CPU, torch.bfloat16, 128, (9, 0), "needs an NVIDIA GPU"),
        ("flash", GPU, torch.float16, 128, (7, 5), r"needs a GPU of the Ampere generation .* this one has 7\.5"),
        ("flash", GPU, torch.float32, 128, (9, 0), "computes in bfloat16 or float16, not in float32"),
        ("flash", GPU, torch.bfloat16, 12, (9, 0), "needs heads of a multiple of 8 up to 256, and head_dim is 12"),
        ("cudnn", CPU, torch.bfloat16, 128, (9, 0), "needs an NVIDIA GPU"),
        ("cudnn", GPU, torch.bfloat16, 128, (8, 0), r"needs a Hopper GPU .* this one has 8\.0: choose auto or flash"),
        ("cudnn", GPU, torch.float32, 128, (9, 0), "computes in bfloat16 or float16, not in float32"),
        ("cudnn", GPU, torch.bfloat16, 24, (9, 0), "takes heads of a multiple of 16 up to 128, and head_dim is 24"),
        (
            "cudnn",
            GPU,
            torch.bfloat16,
            128,
            (9, 0),
            r"needs nvidia-cudnn-frontend, which .*: pip install 'dwslm\[gpu\]'",
        ),
        (
            "flash_attn",
            GPU,
            torch.bfloat16,
            264,
            (9, 0),
            "needs heads of a multiple of 8 up to 256, and head_dim is 264",
        ),
        ("flash_attn", GPU, torch.bfloat16, 128, (9, 0), r"cannot be imported .*: pip install 'dwslm\[flash-attn\]'"),
        ("flex", GPU, torch.bfloat16, 8, (9, 0), "needs heads of 16 or more, and head_dim is 8"),
    ],
)
def test_a_named_engine_that_does_not_fit_says_why(machine, engine, device, dtype, head_dim, generation, message):
    machine(*generation)
    with pytest.raises(ValueError, match=f"^attention engine '{engine}' {message}"):
        resolve(engine, device, dtype, head_dim)


def test_a_named_engine_that_is_missing_says_how_to_get_it(machine, monkeypatch):
    monkeypatch.setattr(gpu, "installed", lambda package: False)
    with pytest.raises(ValueError, match="'flex' needs the package triton, which is not installed: pip install triton"):
        resolve("flex", GPU, torch.bfloat16, 128)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match="'flash' is not part of this build of PyTorch"):
        resolve("flash", GPU, torch.bfloat16, 128)
    with pytest.raises(ValueError, match="'flash' needs an NVIDIA GPU"):
        x = torch.zeros(4, 1, 16)
        attention(x, x, x, segments(boundaries([0, 4]), 4, 4), scale=1.0, engine="flash")


@pytest.mark.parametrize("engine", ["flash", "flash_attn", "flex", "torch"])
def test_a_named_engine_that_fits_is_taken(machine, engine, monkeypatch):
    install_flash_attn(monkeypatch, lambda *args: None)
    monkeypatch.setattr(gpu, "installed", lambda package: True)
    assert resolve(engine, GPU, torch.bfloat16, 128) == engine


# ---- what the GPU engines are told ----------------------------------------------------------------------


def window_attention(q, k, v, cu_seqlens, left, scale):
    """The kernels' meaning of a window, after their documentation: keys from `left` before the query, all if -1."""
    return attention_reference(q, k, v, cu_seqlens, scale=scale, window=None if left < 0 else left + 1)


@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.parametrize("grouped", [{}, {"enable_gqa": True}])
def test_flash_is_told_boundaries_window_and_scale(window, grouped, monkeypatch):
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **options):
        assert cu_q is cu_k and max_q == max_k == 100 and options == grouped
        assert window_size[1] == 0
        return window_attention(q, k, v, cu_q, window_size[0], scale)

    monkeypatch.setattr(flash_file, "varlen_attn", varlen_attn)
    monkeypatch.setattr(flash_file, "GROUPED", grouped)
    q, k, v = (torch.randn(200, heads, 8) for heads in (4, 2, 2))
    cu = boundaries([0, 1, 40, 100, 100, 163, 200, 200])
    out = flash_file.attention_flash(q, k, v, segments(cu, 200, 100), scale=0.3, window=window)
    assert torch.equal(out, attention_reference(q, k, v, cu, scale=0.3, window=window))


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_flash_attn_package_is_told_the_same_and_whether_to_be_deterministic(window, deterministic, monkeypatch):
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size, deterministic):
        told.append(deterministic)
        assert torch.equal(cu_q, cu_k) and max_q == max_k == 100 and causal and window_size[1] == 0
        return window_attention(q, k, v, cu_q, window_size[0], softmax_scale)

    told: list[bool] = []
    install_flash_attn(monkeypatch, flash_attn_varlen_func)
    q, k, v = (torch.randn(200, heads, 8) for heads in (4, 2, 2))
    cu = boundaries([0, 1, 40, 100, 100, 163, 200, 200])
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = flash_file.attention_flash_attn(q, k, v, segments(cu, 200, 100), scale=0.3, window=window)
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [deterministic]
    assert torch.equal(out, attention_reference(q, k, v, cu, scale=0.3, window=window))


def test_the_flash_attn_package_is_traced_without_a_break(monkeypatch):
    """Its function is a Python autograd function, which the compiler traces only if no tensor is handed over twice."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, cu_q, cu_k):
            return q * (cu_q + cu_k).sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None, None, None, None

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        return Kernel.apply(q, k, v, cu_q, cu_k)

    install_flash_attn(monkeypatch, flash_attn_varlen_func)
    q, k, v = (torch.ones(8, 1, 4, requires_grad=True) for _ in range(3))
    seg = segments(boundaries([0, 3, 8]), 8, 8)
    compiled = torch.compile(flash_file.attention_flash_attn, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, seg, scale=1.0), 22 * q)


# ---- FlexAttention --------------------------------------------------------------------------------------


def dense_mask(seg, window):
    """[rows, context, context]: key visible to query, pair by pair."""
    ids, index = seg.ids.view(seg.rows, seg.context), torch.arange(seg.context)
    back = index[:, None] - index[None, :]
    near = back >= 0 if window is None else (back >= 0) & (back < window)
    return near & (ids[:, :, None] == ids[:, None, :])


@pytest.mark.parametrize("window", [None, 1, 16, 128, 129, 512])
@pytest.mark.parametrize(
    ("context", "offsets"),
    [
        (512, [0, 1, 1, 40, 300, 512, 512, 640, 768, 1024, 1024]),
        (512, [0, 512, 1024]),
        (300, [0, 127, 128, 300, 301, 429, 600, 600]),
        (100, [0, 100, 150, 200]),
    ],
)
def test_tiles_of_the_block_mask_against_every_pair(context, offsets, window):
    rows, tile = offsets[-1] // context, flex_file.TILE
    seg = segments(boundaries(offsets), rows * context, context)
    mask = flex_file.block_mask(seg, window)
    assert mask.shape == (rows, 1, context, context)

    query, key = torch.arange(context)[:, None], torch.arange(context)[None, :]
    pairs = dense_mask(seg, window)
    assert torch.equal(mask.mask_mod(torch.arange(rows)[:, None, None], 0, query, key), pairs)

    def listed(counts, tiles):
        return [[set(t[:n]) for n, t in zip(*row, strict=True)] for row in zip(counts, tiles, strict=True)]

    masked = listed(mask.kv_num_blocks[:, 0].tolist(), mask.kv_indices[:, 0].tolist())
    whole = listed(mask.full_kv_num_blocks[:, 0].tolist(), mask.full_kv_indices[:, 0].tolist())
    for row in range(rows):
        for i in range(-(-context // tile)):
            queries = pairs[row, i * tile : (i + 1) * tile]
            parts = [queries[:, j * tile : (j + 1) * tile] for j in range(i + 1)]
            assert whole[row][i] == {j for j, part in enumerate(parts) if part.all() and j < i}
            assert masked[row][i] == {j for j, part in enumerate(parts) if part.any()} - whole[row][i]

    # What the gradient of keys and values goes by: the same tiles, listed by key tile.
    for by_key, by_query in [
        (listed(mask.q_num_blocks[:, 0].tolist(), mask.q_indices[:, 0].tolist()), masked),
        (listed(mask.full_q_num_blocks[:, 0].tolist(), mask.full_q_indices[:, 0].tolist()), whole),
    ]:
        assert by_key == [
            [{i for i, tiles in enumerate(row) if j in tiles} for j in range(len(row))] for row in by_query
        ]


@pytest.fixture
def flex_on_a_cpu(monkeypatch):
    """FlexAttention through the compiler's front half: PyTorch has no gradient of it on a CPU, and no need of a kernel."""
    options = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
    compiled = torch.compile(flex_file.flex_attention, **options)
    monkeypatch.setattr(flex_file, "_compiled", lambda: compiled)
    monkeypatch.setattr(gpu, "choose", torch.compiler.assume_constant_result(lambda engine, *case: engine))
    torch._dynamo.reset()
    with torch.no_grad():
        yield options
    torch._dynamo.reset()


def test_flex_meets_the_reference_with_one_kernel_and_one_mask_a_window(flex_on_a_cpu, monkeypatch):
    made = []
    block_mask = flex_file.block_mask
    monkeypatch.setattr(flex_file, "block_mask", lambda seg, window: made.append(window) or block_mask(seg, window))
    q, k, v = (torch.randn(256, heads, 16) for heads in (4, 2, 2))
    cu = boundaries([0, 1, 1, 40, 128, 131, 256, 256])
    for offsets in ([0, 1, 1, 40, 128, 131, 256, 256], [0, 128, 256, 256, 256, 256, 256, 256]):
        cu.copy_(boundaries(offsets))
        seg = segments(cu, 256, 128)
        for window in (None, 16, None):
            # The first call compiles; neither another window nor other boundaries may do so again.
            with torch._dynamo.config.patch(error_on_recompile=len(made) > 0):
                out = attention(q, k, v, seg, scale=0.25, window=window, engine="flex")
            assert relative_error(out, attention_reference(q, k, v, cu, scale=0.25, window=window)) < 1e-5
    assert made == [None, 16, None, 16]


def test_flex_in_a_compiled_model_is_one_graph_and_follows_its_boundaries(flex_on_a_cpu):
    def layers(q, k, v, cu):
        seg = segments(cu, 256, 128)
        for window in (None, 16, None):
            q = attention(q, k, v, seg, scale=0.25, window=window, engine="flex")
        return q

    compiled = torch.compile(layers, **flex_on_a_cpu)
    q, k, v = (torch.randn(256, heads, 16) for heads in (4, 2, 2))
    cu = boundaries([0, 1, 1, 40, 128, 131, 256, 256])
    before = compiled(q, k, v, cu)
    cu.copy_(boundaries([0, 128, 256, 256, 256, 256, 256, 256]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        after = compiled(q, k, v, cu)
    assert not torch.allclose(before, after)
    want = q
    for window in (None, 16, None):
        want = attention_reference(want, k, v, cu, scale=0.25, window=window)
    assert relative_error(after, want) < 1e-5
