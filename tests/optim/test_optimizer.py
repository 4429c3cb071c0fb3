"""One step of the whole optimizer: blocks, accumulation, clipping, masking, compute copies, recording."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from tests.optim.small_model import (
    ROLES,
    SETTINGS,
    assert_equal,
    everything,
    optimizer,
    parameters,
    set_gradients,
    train,
)


@pytest.mark.parametrize("rule", list(SETTINGS))
def test_fused_equals_separate(rule: str) -> None:
    fused = parameters()
    separate = {name: nn.Parameter(p.detach().clone()) for name, p in fused.items() if name != "qkv"}
    roles = {name: blocks for name, blocks in ROLES.items() if name != "qkv"}
    rows = {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16), "beta": slice(16, 19)}
    for name, where in rows.items():
        separate[name] = nn.Parameter(fused["qkv"].detach()[where].clone())
        roles[name] = [("", separate[name].shape[0], "vector" if name == "beta" else "matrix")]
    a = optimizer(fused, SETTINGS[rule])
    b = Optimizer(separate, roles, SETTINGS[rule], lr=0.02)
    for seed in range(5):
        set_gradients(fused, seed, scale=0.01)
        for name, parameter in separate.items():
            gradient = fused["qkv"].grad[rows[name]] if name in rows else fused[name].grad
            parameter.grad = gradient.clone()
        for opt in (a, b):
            opt.accumulate()
            opt.step(0.02)
    for name, where in rows.items():
        torch.testing.assert_close(fused["qkv"].detach()[where], separate[name].detach())
    for name in roles.keys() - rows.keys():
        torch.testing.assert_close(fused[name].detach(), separate[name].detach())


def test_blocks_do_not_influence_each_other() -> None:
    """Another gradient in k's rows changes k alone (without clipping, which is global)."""
    results = []
    for scale in (1.0, -3.0):
        opt = optimizer(parameters(), OptimSettings(clip=None))
        set_gradients(opt.params, 0)
        opt.params["qkv"].grad[8:12] *= scale
        opt.accumulate()
        opt.step(0.02)
        results.append(opt.weights())
    qkv_a, qkv_b = results[0].pop("qkv"), results[1].pop("qkv")
    assert_equal(*results)
    changed = (qkv_a != qkv_b).any(dim=1)
    assert changed[8:12].all() and not changed[:8].any() and not changed[12:].any()


def test_one_against_four_accumulations() -> None:
    """Exact in binary: the whole gradient is four quarters, so that sums round nowhere."""
    whole, quarters = optimizer(parameters()), optimizer(parameters())
    for seed in range(3):
        set_gradients(whole.params, seed)
        for _ in range(4):
            for name, parameter in quarters.params.items():
                parameter.grad = whole.params[name].grad / 4
            quarters.accumulate()
        whole.accumulate()
        assert torch.equal(whole.step(0.02), quarters.step(0.02))
    assert_equal(everything(whole), everything(quarters))


def test_accumulates_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    opt = optimizer(parameters(torch.bfloat16), OptimSettings(clip=None))
    for value in (256.0, 1.0):
        for parameter in opt.params.values():
            parameter.grad = torch.zeros_like(parameter)
        opt.params["out"].grad[0, 0] = value
        opt.accumulate()
        assert opt.params["out"].grad is None
    assert opt.step(0.02).item() == 257.0


def test_missing_gradient_is_named() -> None:
    opt = optimizer(parameters())
    set_gradients(opt.params, 0)
    opt.params["gain"].grad = None
    with pytest.raises(RuntimeError, match="parameter gain has no gradient"):
        opt.accumulate()


def test_compute_copies_are_the_rounded_masters() -> None:
    opt = optimizer(parameters(torch.bfloat16))
    train(opt, range(20), lr=1e-3)
    weights = opt.weights()
    for name, parameter in opt.params.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(parameter.detach(), weights[name].to(parameter.dtype)), name
    assert not torch.equal(weights["out"], weights["out"].bfloat16().float())  # the master keeps more


def test_rates_of_the_groups() -> None:
    """Adam's first step is its rate times the gradient's sign; the sphere's is rate x radius, nearly."""
    opt = optimizer(parameters())
    before = opt.weights()
    set_gradients(opt.params, 0)
    opt.accumulate()
    opt.step(0.013)
    moved = {name: (weight - before[name]).abs() for name, weight in opt.weights().items()}
    for name in ("embedding", "gain", "convolution", "scale"):
        torch.testing.assert_close(moved[name], torch.full_like(moved[name], 0.003), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(moved["values"], torch.full_like(moved["values"], 0.0015), rtol=1e-3, atol=1e-6)
    assert moved["head"].norm() / before["head"].norm() == pytest.approx(0.013, rel=0.01)
    assert moved["out"].norm() / before["out"].norm() == pytest.approx(0.013, rel=0.01)


def test_norm_and_clipping() -> None:
    opt = optimizer(parameters(), OptimSettings(clip=0.5))
    set_gradients(opt.params, 0)
    gradients = {name: p.grad.clone() for name, p in opt.params.items()}
    expected = torch.cat([g.flatten() for g in gradients.values()]).double().norm()
    opt.accumulate()
    norm = opt.step(0.02)
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    factor = 0.5 / expected.item()
    torch.testing.assert_close(opt.state()["out.momentum"], gradients["out"] * factor)
    torch.testing.assert_close(opt.state()["gain.exp_avg"], gradients["gain"] * factor * 0.1)
    set_gradients(opt.params, 1, scale=1e-4)  # small enough to stay
    small = opt.params["gain"].grad.clone()
    opt.accumulate()
    opt.step(0.02)
    torch.testing.assert_close(opt.state()["gain.exp_avg"], gradients["gain"] * factor * 0.09 + small * 0.1)


@pytest.mark.parametrize("rule", list(SETTINGS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing(rule: str, bad: float) -> None:
    """1e30 is finite, but the square in its norm is not."""
    opt = optimizer(parameters(torch.bfloat16), SETTINGS[rule])
    clean = optimizer(parameters(torch.bfloat16), SETTINGS[rule])
    train(opt, range(3))
    train(clean, range(3))
    set_gradients(opt.params, 3)
    opt.params["up"].grad[2, 3] = bad
    opt.accumulate()
    assert not opt.step(0.02).isfinite()
    before, after = everything(clean), everything(opt)
    assert before.pop("skipped") == 0 and after.pop("skipped") == 1
    assert_equal(before, after)
    train(opt, range(4, 6))  # and nothing of it is left in the accumulators
    train(clean, range(4, 6))
    before, after = everything(clean), everything(opt)
    before.pop("skipped"), after.pop("skipped")
    assert_equal(before, after)
    assert opt.state()["step"] == 5


@pytest.mark.parametrize("rule", list(SETTINGS))
def test_a_step_that_is_not_allowed_or_over_its_limit_changes_nothing(rule: str) -> None:
    opt = optimizer(parameters(torch.bfloat16), SETTINGS[rule])
    train(opt, range(3))
    before = everything(opt)
    norm = torch.tensor(0.0)
    for limits in (
        {"allowed": torch.tensor(False)},
        {"norm_limit": torch.tensor(0.0)},
        {"allowed": torch.tensor(False), "norm_limit": torch.tensor(math.inf)},
    ):
        set_gradients(opt.params, 3)
        opt.accumulate()
        norm = opt.step(0.02, **limits)
        assert norm.isfinite() and norm > 0 and not opt.accepted
    after = everything(opt)
    assert before.pop("skipped") == 0 and after.pop("skipped") == 3
    assert_equal(before, after)
    # At the limit is not over it, and limits are of one step.
    for limits in ({"allowed": torch.tensor(True), "norm_limit": norm}, {}):
        set_gradients(opt.params, 3)
        opt.accumulate()
        opt.step(0.02, **limits)
        assert opt.accepted
    assert opt.state()["step"] == 5


def test_not_finite_at_the_very_first_step() -> None:
    opt = optimizer(parameters())
    before = everything(opt)
    set_gradients(opt.params, 0)
    opt.params["gain"].grad[0] = float("nan")
    opt.accumulate()
    opt.step(0.02)
    after = everything(opt)
    assert after.pop("skipped") == 1 and before.pop("skipped") == 0
    assert_equal(before, after)


def test_zero_gradient_is_no_step() -> None:
    opt = optimizer(parameters())
    before = opt.weights()
    for parameter in opt.params.values():
        parameter.grad = torch.zeros_like(parameter)
    opt.accumulate()
    assert opt.step(0.02) == 0
    assert_equal(before, opt.weights())


@pytest.mark.parametrize(("name", "rows"), [("qkv/k", slice(8, 12)), ("out", slice(0, 8)), ("head", slice(0, 20))])
def test_matrix_of_norm_zero_is_refused_by_name(name: str, rows: slice) -> None:
    params = parameters()
    with torch.no_grad():
        params[name.split("/")[0]][rows] = 0
    with pytest.raises(ValueError, match=f"matrix {name} has norm 0.0"):
        optimizer(params)


def test_plain_muon_and_adam_take_zeros() -> None:
    params = parameters()
    with torch.no_grad():
        params["out"].zero_()
        params["qkv"][16:] = 0  # beta, under Adam
    opt = optimizer(params, SETTINGS["muon"])
    train(opt, range(1))
    assert params["out"].abs().min() > 0


def test_rate_as_number_and_as_tensor() -> None:
    a, b = optimizer(parameters()), optimizer(parameters())
    set_gradients(a.params, 0)
    set_gradients(b.params, 0)
    a.accumulate()
    b.accumulate()
    a.step(0.02)
    b.step(torch.tensor(0.02))
    assert_equal(everything(a), everything(b))
    with pytest.raises(ValueError, match="0-D"):
        a.step(torch.tensor([0.02]))
    with pytest.raises(ValueError, match="lr=nan"):
        a.step(float("nan"))


def test_parameters_of_two_devices() -> None:
    params = parameters()
    params["gain"] = nn.Parameter(torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match="parameters of one device, got cpu, meta"):
        optimizer(params)


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: .item(), bool(tensor), nonzero."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", list(SETTINGS))
def test_the_host_reads_nothing(rule: str) -> None:
    opt = optimizer(parameters(torch.bfloat16), SETTINGS[rule])
    set_gradients(opt.params, 0)
    with HostReads() as reads:
        opt.accumulate()
        norm = opt.step(torch.tensor(0.02))
    assert reads.count == 0
    with HostReads() as reads:
        norm.item()
    assert reads.count == 1


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    eager = optimizer(parameters(torch.bfloat16))
    compiled = optimizer(parameters(torch.bfloat16), compile=True)
    for seed, lr in enumerate((0.01, 0.02, 0.005)):  # a changing rate
        for opt in (eager, compiled):
            train(opt, [seed], lr)
    a, b = eager.weights() | eager.state(), compiled.weights() | compiled.state()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", list(SETTINGS))
def test_recorded_equals_eager_on_the_device(rule: str) -> None:
    """Step and accumulation as a CUDA graph, replayed under a changing rate: bit for bit the eager step."""
    eager, recorded = (
        optimizer(
            {n: nn.Parameter(p.detach().cuda()) for n, p in parameters(torch.bfloat16).items()},
            SETTINGS[rule],
        )
        for _ in range(2)
    )
    gradients = {name: torch.zeros_like(p) for name, p in recorded.params.items()}
    lr = torch.zeros((), device="cuda")

    def both() -> None:
        for name, parameter in recorded.params.items():
            parameter.grad = gradients[name]
        recorded.accumulate()
        recorded.step(lr)

    start = recorded.weights(), recorded.state()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    recorded.load(*start)
    for seed, value in enumerate((0.01, 0.02, 0.005)):
        set_gradients_on_device(eager, gradients, seed)
        eager.accumulate()
        eager.step(value)
        lr.fill_(value)
        graph.replay()
    assert_equal(everything(eager), everything(recorded))


def set_gradients_on_device(opt: Optimizer, gradients: dict[str, Tensor], seed: int) -> None:
    source = parameters(torch.bfloat16, seed=2000 + seed)
    for name, parameter in opt.params.items():
        parameter.grad = source[name].detach().cuda()
        gradients[name].copy_(parameter.grad)
