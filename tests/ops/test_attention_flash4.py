"""FlashAttention-4's engine without the package: what its two functions are told and handed, read by stand-ins for them."""

import sys
import types

import pytest
import torch

from dwslm.ops.attention import attention, flash4, gpu, resolve
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 16, 200
SCALE = 0.25
GPU = torch.device("cuda")


def probabilities(q, k, scale, left):
    """One segment: softmax [heads, query, key] over keys from `left` before the query, and log-sum-exps [heads, query]."""
    back = torch.arange(len(q))[:, None] - torch.arange(len(k))[None, :]
    seen = (back >= 0) if left is None else (back >= 0) & (back <= left)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (scale * torch.einsum("qhd,khd->hqk", q, k)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def each(cu_seqlens):
    return [slice(start, end) for start, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)]


class Package:
    """`flash_attn.cute.interface`, with the parameters that the package gives its functions; `told` keeps each call's."""

    def __init__(self):
        self.told = []

    def _flash_attn_fwd(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        out,
        lse,
    ):
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert causal and window_size_right == 0 and lse.dtype == torch.float32
        self.told.append({"longest": (max_seqlen_q, max_seqlen_k), "left": window_size_left, "q": q})
        for at in each(cu_seqlens_q):
            p, total = probabilities(q[at], k[at], softmax_scale, window_size_left)
            out[at] = torch.einsum("hqk,khd->qhd", p, v[at].repeat_interleave(q.shape[1] // v.shape[1], dim=1))
            lse[:, at] = total
        return out, lse

    def _flash_attn_bwd(
        self,
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        deterministic,
        dq,
        dk,
        dv,
    ):
        assert causal and window_size_right == 0 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert all(x.is_contiguous() for x in (out, dout, dq, dk, dv))
        self.told.append({"longest": (max_seqlen_q, max_seqlen_k), "left": window_size_left, "fixed": deterministic})
        group = q.shape[1] // k.shape[1]
        for at in each(cu_seqlens_q):
            p, total = probabilities(q[at], k[at], softmax_scale, window_size_left)
            torch.testing.assert_close(lse[:, at], total)
            dp = torch.einsum("qhd,khd->hqk", dout[at], v[at].repeat_interleave(group, dim=1))
            ds = softmax_scale * p * (dp - (dout[at] * out[at]).sum(-1).T[:, :, None])
            dq[at] = torch.einsum("hqk,khd->qhd", ds, k[at].repeat_interleave(group, dim=1))
            dk[at] = torch.einsum("hqk,qhd->khd", ds, q[at]).unflatten(1, (-1, group)).sum(2)
            dv[at] = torch.einsum("hqk,qhd->khd", p, dout[at]).unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv


@pytest.fixture
def package(monkeypatch):
    """The package is installed, as a stand-in that works on a CPU."""
    stand_in = Package()
    interface = types.SimpleNamespace(
        _flash_attn_fwd=stand_in._flash_attn_fwd, _flash_attn_bwd=stand_in._flash_attn_bwd
    )
    cute = types.ModuleType("flash_attn.cute")
    cute.interface = interface
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    for function in ("unavailable", "_library"):  # what they found before is not remembered, nor what they find here
        monkeypatch.setattr(flash4, function, getattr(flash4, function).__wrapped__)
    return stand_in


def views():
    """q, k, v side by side in one projection."""
    x = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    parts = x.split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], dim=1)
    return tuple(y.unflatten(1, (-1, HEAD_DIM)) for y in parts)


@pytest.mark.parametrize("window", [None, 1, 16])
def test_the_package_is_told_boundaries_window_and_scale(package, window):
    torch.manual_seed(0)
    inputs, cu, weight = views(), boundaries(UNEVEN), torch.randn(TOKENS, HEADS, HEAD_DIM)
    seg = segments(cu, TOKENS, TOKENS)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash4.attention_flash4(*leaves, seg, scale=SCALE, window=window)
    got = [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
    want = output_and_gradients(lambda *x: attention_reference(*x, cu, scale=SCALE, window=window), inputs, weight)
    for g, w in zip(got, want, strict=True):  # a window of one token has no gradient for q and k but rounding
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    forward, backward = package.told
    assert forward["longest"] == backward["longest"] == (TOKENS, TOKENS)
    assert forward["left"] == backward["left"] == (None if window is None else window - 1)
    assert forward["q"].data_ptr() == inputs[0].data_ptr()  # read where it lies


def test_a_window_as_long_as_a_row_is_none(package):
    q, k, v = views()
    seg = segments(boundaries([0, 100, TOKENS]), TOKENS, 100)
    for window in (99, 100, 101, None):
        flash4.attention_flash4(q, k, v, seg, scale=SCALE, window=window)
    assert [told["left"] for told in package.told] == [98, None, None, None]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_pass_is_told_whether_to_be_deterministic(package, deterministic):
    inputs = [x.detach().requires_grad_() for x in views()]
    seg = segments(boundaries([0, 100, TOKENS]), TOKENS, TOKENS)
    torch.use_deterministic_algorithms(deterministic)
    try:
        flash4.attention_flash4(*inputs, seg, scale=SCALE).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.told[1]["fixed"] is deterministic


def test_operators_keep_the_rules(package):
    seg = segments(boundaries(UNEVEN), TOKENS, TOKENS)
    inputs = *(x.detach().requires_grad_() for x in views()), seg.cu_seqlens, TOKENS, SCALE, 16
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.dwslm.attention_flash4.default, inputs, test_utils=checks)
    out, stats = torch.ops.dwslm.attention_flash4(*inputs)
    back = [x.detach() for x in (torch.ones_like(out), *inputs[:3], out, stats)]
    torch.library.opcheck(
        torch.ops.dwslm.attention_flash4_backward.default,
        (*back, *inputs[3:]),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_is_one_graph_and_boundaries_compile_nothing(package, monkeypatch):
    monkeypatch.setattr(gpu, "choose", torch.compiler.assume_constant_result(lambda engine, *case: engine))

    def step(q, k, v, cu):
        return attention(q, k, v, segments(cu, TOKENS, 100), scale=SCALE, window=16, engine="flash4")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    weight, inputs = torch.randn(TOKENS, HEADS, HEAD_DIM), list(views())
    cu = boundaries([0, 1, 1, 40, 100, 163, 200, 200])
    for i, offsets in enumerate(([0, 1, 1, 40, 100, 163, 200, 200], [0, 100, 200, 200, 200, 200, 200, 200])):
        cu.copy_(boundaries(offsets))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = output_and_gradients(lambda *x: compiled(*x, cu), inputs, weight)
        want = output_and_gradients(lambda *x: attention_reference(*x, cu, scale=SCALE, window=16), inputs, weight)
        assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
    torch._dynamo.reset()


# ---- the choice -----------------------------------------------------------------------------------------


@pytest.fixture
def generation(package, monkeypatch):
    """generation(capability): a made-up GPU of it, with the package installed."""

    def set_capability(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return set_capability


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_it_is_taken_by_name_where_it_fits_and_never_by_auto(generation, capability):
    generation(*capability)
    assert resolve("flash4", GPU, torch.bfloat16, 128) == resolve("flash4", GPU, torch.bfloat16, 64) == "flash4"
    assert resolve("auto", GPU, torch.bfloat16, 128) != "flash4"


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "message"),
    [
        (
            (8, 9),
            torch.bfloat16,
            128,
            r"needs a GPU of the Hopper generation or newer .* this one has 8\.9: choose auto",
        ),
        ((9, 0), torch.float32, 128, "computes in bfloat16 or float16, not in float32: choose auto or torch"),
        (
            (9, 0),
            torch.bfloat16,
            16,
            "was held to float32 .* heads of 64 and 128 alone, .* are bfloat16 of 16: choose auto",
        ),
        (
            (9, 0),
            torch.float16,
            128,
            "was held to float32 in bfloat16 .*, and these are float16 of 128: choose auto or flash",
        ),
        ((10, 0), torch.bfloat16, 256, "was held to float32 .*, and these are bfloat16 of 256: choose auto"),
    ],
)
def test_what_does_not_fit_says_why(generation, capability, dtype, head_dim, message):
    generation(*capability)
    with pytest.raises(ValueError, match=f"^attention engine 'flash4' {message}"):
        resolve("flash4", GPU, dtype, head_dim)


def test_without_the_package_it_says_how_to_get_it(generation, monkeypatch):
    generation(9, 0)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    with pytest.raises(
        ValueError, match=r"'flash4' needs the package flash-attn-4, .*: pip install 'dwslm\[flash4\]'$"
    ):
        resolve("flash4", GPU, torch.bfloat16, 128)


def test_deterministic_mode_refuses_it_only_where_the_package_has_no_such_backward_pass(generation):
    torch.use_deterministic_algorithms(True)
    try:
        generation(9, 0)
        assert resolve("flash4", GPU, torch.bfloat16, 128) == "flash4"
        generation(12, 0)
        with pytest.raises(ValueError, match="'flash4' has no deterministic .* GPU: set train.deterministic=false"):
            resolve("flash4", GPU, torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_package_with_other_functions_is_another_one(generation):
    generation(9, 0)
    interface = sys.modules["flash_attn.cute"].interface
    interface._flash_attn_fwd = lambda q, k, v, **options: None
    with pytest.raises(
        ValueError, match=r"'flash4' needs the package flash-attn-4, .* takes no causal, cu_seqlens_k, "
    ):
        resolve("flash4", GPU, torch.bfloat16, 128)
    del interface._flash_attn_bwd
    with pytest.raises(ValueError, match=r"'flash4' needs the package flash-attn-4, .*_flash_attn_bwd.*\[flash4\]"):
        resolve("flash4", GPU, torch.bfloat16, 128)
