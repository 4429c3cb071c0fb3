"""Which engine is taken, what is said where none can be, and the wiring of the GPU engines with their libraries stood in for."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dwslm.ops import choice
from dwslm.ops.delta_rule import (
    check_name,
    cudnn,
    decay_dtype,
    delta_rule,
    fla,
    fla_gdn,
    gated_delta_rule,
    gpu,
    resolve,
)
from dwslm.ops.segments import segments
from tests.ops.helpers import boundaries

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MAIN = {"dtype": torch.bfloat16, "head_dim": 128, "bounded": True}
INSTALL = "pip install 'dwslm[gpu]'"


@pytest.fixture
def machine(monkeypatch):
    """Puts a GPU of some capability there, with these libraries installed; Triton, if not named, in a version too new."""

    def put(capability: tuple[int, int], *installed: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(choice, "TRITON", "3.6.0" if TRITON in installed else "3.7.1")
        for module, package in ((cudnn, "nvidia-cudnn-frontend"), (fla, "fla-core")):
            missing = f"needs {package}, which cannot be imported (No module named ...): {INSTALL}"
            monkeypatch.setattr(module, "unavailable", lambda reason=None if package in installed else missing: reason)
        monkeypatch.setattr(fla_gdn, "_miscompiled", lambda: capability == (9, 0))

    return put


BOTH = ("nvidia-cudnn-frontend", "fla-core")
TRITON = "triton"
ALL = (TRITON, *BOTH)


@pytest.mark.parametrize(
    ("capability", "installed", "changes", "want"),
    [
        ((9, 0), ALL, {}, "fused"),
        ((9, 0), (TRITON,), {}, "fused"),
        ((9, 0), ALL, {"scalar_gate": True}, "fused"),
        ((9, 0), BOTH, {}, "cudnn"),
        ((9, 0), ("fla-core",), {}, "fla"),
        ((9, 0), (), {}, "torch"),
        ((9, 0), ALL, {"head_dim": 64}, "fla"),
        ((9, 0), (TRITON,), {"head_dim": 64}, "torch"),
        ((9, 0), ALL, {"head_dim": 512}, "torch"),
        ((9, 0), ALL, {"bounded": False}, "torch"),
        ((9, 0), ALL, {"dtype": torch.float32}, "torch"),
        ((8, 0), ALL, {}, "fla"),
        ((10, 0), ALL, {}, "fla"),
        ((12, 0), ("nvidia-cudnn-frontend",), {}, "torch"),
        ((7, 5), BOTH, {}, "torch"),
    ],
)
def test_auto_takes_the_fastest_that_fits(machine, capability, installed, changes, want):
    machine(capability, *installed)
    assert resolve("auto", device=CUDA, **(MAIN | changes)) == want


@pytest.mark.parametrize(
    ("engine", "installed", "changes", "want"),
    [
        ("auto", ALL, {}, torch.bfloat16),
        ("fused", ALL, {}, torch.bfloat16),
        ("auto", BOTH, {}, torch.float32),  # cuDNN
        ("cudnn", ALL, {}, torch.float32),
        ("fla", ALL, {}, torch.float32),
        ("torch", ALL, {}, torch.float32),
        ("auto", ALL, {"bounded": False}, torch.float32),
        ("auto", ALL, {"dtype": torch.float32}, torch.float32),
    ],
)
def test_decays_are_made_in_what_the_engine_reads(machine, engine, installed, changes, want):
    machine((9, 0), *installed)
    assert decay_dtype(engine, device=CUDA, **(MAIN | changes)) == want
    assert decay_dtype("auto", device=CPU, **MAIN) == torch.float32


def test_auto_on_a_cpu_is_torch_whatever_is_installed(machine):
    machine((9, 0), *ALL)
    assert resolve("auto", device=CPU, **MAIN) == "torch"


@pytest.mark.parametrize(
    ("engine", "capability", "installed", "changes", "words"),
    [
        ("fused", (8, 0), ALL, {}, "needs a Hopper GPU"),
        (
            "fused",
            (9, 0),
            BOTH,
            {},
            "is for Triton 3.6, of which it uses experimental parts, and 3.7.1 is installed: choose",
        ),
        ("fused", (10, 0), ALL, {}, "needs a Hopper GPU (compute capability 9.0), and this one has 10.0"),
        ("fused", (9, 0), ALL, {"head_dim": 64}, "takes heads of 128, and head_dim is 64"),
        ("fused", (9, 0), ALL, {"dtype": torch.float16}, "computes in bfloat16, not in float16"),
        ("fused", (9, 0), ALL, {"bounded": False}, "model.delta_gate=bounded"),
        ("cudnn", (8, 0), BOTH, {}, "needs a Hopper GPU"),
        ("cudnn", (9, 0), (), {}, INSTALL),
        ("cudnn", (9, 0), BOTH, {"head_dim": 64}, "takes heads of 128, and head_dim is 64"),
        ("cudnn", (9, 0), BOTH, {"dtype": torch.float32}, "computes in bfloat16, not in float32"),
        ("cudnn", (9, 0), BOTH, {"bounded": False}, "model.delta_gate=bounded"),
        ("fla", (7, 5), BOTH, {}, "capability 8.0"),
        ("fla", (8, 0), (), {}, INSTALL),
        ("fla", (8, 0), BOTH, {"head_dim": 8}, "takes heads of 16 to 256, and head_dim is 8"),
        ("fla", (8, 0), BOTH, {"bounded": False}, "model.delta_gate=bounded"),
        ("fla_gdn", (8, 0), BOTH, {}, "takes one decay a head"),
        ("fla_gdn", (8, 0), (), {"scalar_gate": True}, INSTALL),
        ("fla_gdn", (9, 0), BOTH, {"scalar_gate": True}, "#640"),
    ],
)
def test_a_named_engine_that_does_not_fit_says_why(machine, engine, capability, installed, changes, words):
    machine(capability, *installed)
    with pytest.raises(ValueError, match=f"delta-rule engine '{engine}' ") as error:
        resolve(engine, device=CUDA, **(MAIN | changes))
    assert words in str(error.value)


def test_a_named_engine_that_fits_is_taken(machine):
    machine((9, 0), TRITON)
    assert resolve("fused", device=CUDA, **MAIN) == "fused"
    machine((9, 0), "nvidia-cudnn-frontend")
    assert resolve("cudnn", device=CUDA, **MAIN) == "cudnn"
    machine((8, 0), "fla-core")
    assert resolve("fla", device=CUDA, **MAIN) == "fla"
    assert resolve("fla_gdn", device=CUDA, **(MAIN | {"bounded": False}), scalar_gate=True) == "fla_gdn"


def test_an_unknown_engine_is_named_with_the_choices():
    with pytest.raises(
        ValueError, match="unknown delta-rule engine 'fast': choose one of auto, fused, cudnn, fla, torch, fla_gdn"
    ):
        check_name("fast")


@pytest.mark.parametrize("engine", ["fused", "cudnn"])
@pytest.mark.parametrize("call", [delta_rule, gated_delta_rule])
def test_a_missing_gpu_is_an_error_at_the_call_too(call, engine):
    q = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
    g = torch.zeros(4, 1, 128) if call is delta_rule else torch.zeros(4, 1)
    with pytest.raises(ValueError, match=f"delta-rule engine '{engine}' needs a Hopper GPU"):
        call(q, q, q, g, torch.zeros(4, 1), segments(boundaries([0, 4]), 4, 4), scale=1.0, engine=engine)


def test_a_library_that_is_not_there_is_named_with_its_cure(monkeypatch):
    for name in ("fla", "cudnn", "cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in (fla, cudnn):
        reason = module.unavailable.__wrapped__()
        assert "cannot be imported" in reason and INSTALL in reason


# ---- wiring, with libraries stood in for ------------------------------------------------------------------
#
# out = scale * v, and the gradient of the n-th input is n times that input times the sum of do: enough to see that each
# argument arrives in its place, contiguous, and that each gradient goes to its own input.

TOKENS, HEADS, DIM, SLOTS = 96, 2, 16, 5


def gradients(do, *inputs):
    return [n * x * do.sum() for n, x in enumerate(inputs, start=1)]


@functools.cache
def buffer(name: str, shape: torch.Size) -> torch.Tensor:
    """fla's trait: one buffer for each gradient and shape in the whole process."""
    return torch.empty(shape)


def stand_in_for_cudnn(scale: float) -> SimpleNamespace:
    def forward(q, k, v, g, beta, cu_seqlens, given, *, plan_name):
        assert given == pytest.approx(128**-0.5) and plan_name == "kda_hopper_cuda"
        assert all(x.is_contiguous() for x in (q, k, v, g, beta)) and cu_seqlens.shape == (SLOTS + 1,)
        return scale * v, v.new_empty(0), v.new_empty(0)

    def backward(do, q, k, v, g, beta, cu_seqlens, given, *, plan_name):
        assert do.is_contiguous() and plan_name == "kda_hopper_cuda"
        return *gradients(do, q, k, v, g, beta), do.new_empty(0), do.new_empty(0), do.new_empty(0)

    return SimpleNamespace(kimi_delta_attention_fwd=forward, kimi_delta_attention_bwd=backward)


def stand_in_for_fla():
    def list_chunks(*, cu_seqlens, chunk_size, nt_max):
        assert chunk_size == 64 and nt_max == 2 + SLOTS - 1
        return cu_seqlens.new_zeros(nt_max, 2), cu_seqlens.clone()

    def forward(*, q, k, v, g, beta, scale, initial_state, output_final_state, safe_gate, use_graph, **rest):
        assert safe_gate and use_graph and all(x.is_contiguous() for x in (q, k, v, g, beta))
        scores = q.new_zeros(1, TOKENS, HEADS, 64)
        return scale * v, None, g.clone(), scores, scores.clone(), *[None] * 7

    def backward(*, q, k, v, g, beta, scale, do, dht, initial_state, **rest):
        assert do.is_contiguous() and rest["chunk_indices"].shape == (2 + SLOTS - 1, 2)
        dq, dk, dv, dg, dbeta = gradients(do, q, k, v, g, beta)
        dq, dk, dv = (buffer(name, d.shape).copy_(d) for name, d in (("dq", dq), ("dk", dk), ("dv", dv)))
        return dq, dk, dv, dbeta, dg, None, None, None

    return forward, backward, list_chunks


def stand_in_for_fla_gdn():
    def forward(*, q, k, v, g, beta, scale, **rest):
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        return g.clone(), scale * v, q.new_zeros(1, TOKENS, HEADS, 64), None, None, None

    def backward(*, q, k, v, g, beta, do, **rest):
        dq, dk, dv, dg, dbeta = gradients(do, q, k, v, g, beta)
        return dq, dk, dv, dbeta, dg, None, None, None

    return forward, backward, lambda cu_seqlens, chunk_size: cu_seqlens.new_zeros(3, 2)


@pytest.fixture(params=["cudnn", "fla", "fla_gdn"])
def stood_in(request, monkeypatch):
    """(the op with the engine, its module, inputs, scale) with the engine's library stood in for."""
    name, scalar = request.param, request.param == "fla_gdn"
    scale = 128**-0.5 if name == "cudnn" else 0.5
    module, library = {
        "cudnn": (cudnn, stand_in_for_cudnn(scale)),
        "fla": (fla, stand_in_for_fla()),
        "fla_gdn": (fla_gdn, stand_in_for_fla_gdn()),
    }[name]
    monkeypatch.setattr(module, "_library", lambda: library)
    monkeypatch.setitem(gpu.ENGINES, name, gpu.ENGINES[name]._replace(misfit=lambda *case: None))
    q, k, v = (torch.randn(TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(3))
    g = -torch.rand(TOKENS, HEADS) if scalar else -torch.rand(TOKENS, HEADS, DIM)

    def call(cu, *x):
        rule = gated_delta_rule if scalar else delta_rule
        return rule(*x, segments(cu, TOKENS, TOKENS), scale=scale, engine=name)

    return call, module, [q, k, v, g, torch.rand(TOKENS, HEADS)], scale


def test_log_decays_of_another_dtype_are_refused(stood_in):
    call, _, (q, k, v, g, beta), _ = stood_in
    with pytest.raises(ValueError, match="reads float32 log decays, not bfloat16"):
        call(boundaries([0, 96]), q, k, v, g.bfloat16(), beta)


def test_each_gradient_reaches_its_input_eager_and_compiled(stood_in):
    call, _, inputs, scale = stood_in
    # As after a fused projection and a broadcast: none of them contiguous.
    wide = [torch.stack([x, x], dim=-1)[..., 0].detach().requires_grad_() for x in inputs]
    cu = boundaries([0, 1, 40, 96, 96, 96])
    weight = torch.randn(HEADS, TOKENS, DIM, dtype=torch.bfloat16).transpose(0, 1)
    for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)):
        out = f(cu, *wide)
        assert torch.allclose(out, scale * inputs[2])
        got = torch.autograd.grad(out, wide, weight)
        for g, x, want in zip(got, inputs, gradients(weight, *inputs), strict=True):
            assert g.dtype == x.dtype and torch.allclose(g, want.to(x.dtype), rtol=1e-2)


def test_gradients_outlive_the_next_backward(stood_in):
    call, _, inputs, _ = stood_in
    leaves = [x.requires_grad_() for x in inputs]
    cu, ones = boundaries([0, 1, 40, 96, 96, 96]), torch.ones_like(leaves[2])
    first = torch.autograd.grad(call(cu, *leaves), leaves, ones)
    kept = [x.clone() for x in first]
    torch.autograd.grad(call(cu, *leaves), leaves, 3 * ones)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_operators_declare_what_they_return(stood_in):
    _, module, inputs, scale = stood_in
    cu = boundaries([0, 1, 40, 96, 96, 96])
    rest = () if module is cudnn else (scale,)
    torch.library.opcheck(
        module._forward,
        (*(x.requires_grad_() for x in inputs), cu, *rest),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_cudnn_has_its_scale_built_in(monkeypatch):
    q = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
    seg = segments(boundaries([0, 4]), 4, 4)
    with pytest.raises(ValueError, match=r"takes scale 128 \*\* -0.5 only, not 1.0"):
        cudnn.delta_rule_cudnn(q, q, q, torch.zeros(4, 1, 128), torch.zeros(4, 1), seg, scale=1.0)


def test_a_refusal_of_cudnn_comes_with_its_own_words(monkeypatch):
    class NotSupportedError(RuntimeError):
        pass

    def refuse(*args, **kwargs):
        raise NotSupportedError("CUDA headers (cuda_bf16.h) not found")

    library = SimpleNamespace(kimi_delta_attention_fwd=refuse)
    monkeypatch.setattr(cudnn, "_library", lambda: library)
    monkeypatch.setattr(cudnn, "_refusals", lambda: (NotSupportedError,))
    q = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
    seg = segments(boundaries([0, 4]), 4, 4)
    with pytest.raises(ValueError, match="refused by cuDNN frontend: CUDA headers"):
        cudnn.delta_rule_cudnn(q, q, q, torch.zeros(4, 1, 128), torch.zeros(4, 1), seg, scale=128**-0.5)


@pytest.mark.parametrize(
    ("dispatch", "other", "fails"), [(True, "tilelang", True), (True, None, False), (False, "tilelang", False)]
)
def test_parts_are_not_left_to_another_package(monkeypatch, dispatch, other, fails):
    active = SimpleNamespace(backend_type=other) if other else None
    backends = ModuleType("fla.backends")
    backends._DISPATCH_DISABLED = not dispatch
    backends._operation_registries = {"kda": SimpleNamespace(get_active=lambda: active)}
    utils, package = ModuleType("fla.utils"), ModuleType("fla")
    package.backends, package.utils = backends, utils
    for module in (package, backends, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if fails:
        with pytest.raises(ValueError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
            fla.pin()
    else:
        fla.pin()
    assert utils.FLA_DISABLE_TENSOR_CACHE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": (64, torch.bfloat16)}, "takes values of 128 a head, and v has 64"),
        ({"q": (128, torch.float32)}, "beta in float32, not float32, bfloat16"),
        ({"g": (128, torch.float16)}, "g in bfloat16 or float32"),
    ],
)
def test_what_our_kernels_would_read_wrongly_is_refused(changes, words):
    """`resolve` sees the keys' width and the values' dtype alone."""
    shapes = {name: (128, torch.bfloat16) for name in "qkv"} | {"g": (128, torch.float32)} | changes
    inputs = [torch.zeros(4, 1, width, dtype=dtype) for width, dtype in shapes.values()]
    seg = segments(boundaries([0, 4]), 4, 4)
    with pytest.raises(ValueError, match=words):
        gpu.ENGINES["fused"].run(*inputs, torch.zeros(4, 1), seg, scale=1.0)
