"""The guard: what it lets through, what it remembers, and that it needs no word from the host."""

import math

import numpy as np
import pytest
import torch

from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.guard import LEAST_SPREAD, UNREAD, Guard, GuardSettings
from dwslm.train.skips import Skips
from dwslm.train.step import TrainStep
from tests.model.small import small_model
from tests.train.test_step import batch

CPU = torch.device("cpu")


def tell(guard: Guard, loss: float, norm: float = 1.0) -> bool:
    """One step as TrainStep does it, with an optimizer that only looks at the norm. Returns whether it was taken."""
    guard.limits()
    loss_now, norm_now = torch.tensor(loss), torch.tensor(norm)
    taken = guard.allowed(loss_now) & norm_now.isfinite() & (norm_now <= guard.norm_limit)
    guard.record(loss_now, norm_now, taken)
    return bool(taken)


def test_limits_are_mean_and_six_deviations_of_the_steps_taken():
    guard = Guard(GuardSettings(window=8, off_for=8), CPU)
    draw = np.random.default_rng(0)
    losses, norms = draw.normal(3.0, 0.05, 30), draw.normal(0.4, 0.02, 30)
    for loss, norm in zip(losses, norms, strict=True):
        assert tell(guard, loss, norm)
    guard.limits()
    for limit, values in ((guard.loss_limit, losses), (guard.norm_limit, norms)):
        last = values[-8:].astype(np.float32).astype(np.float64)
        assert limit.item() == pytest.approx(last.mean() + 6 * last.std(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 30.0])
def test_what_is_rejected_never_enters_the_window(bad):
    """A window that took them in would reject the steps after a NaN, or let the next spike pass."""
    guard, clean = (Guard(GuardSettings(window=10, off_for=10), CPU) for _ in range(2))
    values = [3.0 + 0.05 * math.sin(n) for n in range(40)]
    for n, value in enumerate(values):
        assert tell(guard, value) and tell(clean, value)
        if n > 20:
            assert not tell(guard, bad)
            assert not tell(guard, value, bad)
            assert not tell(guard, 6.0)  # the second spike, smaller than the first
    assert guard.state() == clean.state()


def test_spikes_are_judged_only_after_enough_steps_and_what_is_not_finite_always():
    guard = Guard(GuardSettings(window=5, off_for=20), CPU)
    for n in range(20):
        assert not tell(guard, math.nan) and tell(guard, 3.0 if n % 2 else 3.1)
        if n < 19:
            assert guard.loss_limit.item() == math.inf
    assert not tell(guard, 4.0) and tell(guard, 3.05)
    guard.restart()
    assert tell(guard, 9.0) and not tell(guard, math.inf)


def test_without_sigma_only_what_is_not_finite_is_left_out():
    guard = Guard(GuardSettings(sigma=None, off_for=2), CPU)
    assert all(tell(guard, loss) for loss in (3.0, 3.0, 3.0, 1e30)) and not tell(guard, math.nan)


def test_steps_that_are_all_alike_leave_room_for_noise():
    guard = Guard(GuardSettings(window=5, off_for=5), CPU)
    for _ in range(5):
        tell(guard, 2.0)
    assert tell(guard, 2.0 * (1 + 5.9 * LEAST_SPREAD)) and not tell(guard, 2.1)


def test_the_host_reads_what_happened_since_it_last_did():
    guard = Guard(GuardSettings(window=5, off_for=5), CPU)
    for n in range(UNREAD):
        tell(guard, float(n % 3))
    assert [v.loss for v in guard.read(UNREAD)] == [float(n % 3) for n in range(UNREAD)]
    tell(guard, 1.0), tell(guard, math.nan), tell(guard, 1.0, math.inf), tell(guard, 50.0)
    reasons = [verdict.reason for verdict in guard.read(4)]
    assert reasons[:3] == ["taken", "loss nan", "gradient norm inf"]
    assert reasons[3].startswith("loss 50 above ")


def test_a_window_that_was_saved_goes_on_as_it_would_have():
    guard, other = (Guard(GuardSettings(window=7, off_for=4), CPU) for _ in range(2))
    for n in range(11):
        tell(guard, 3.0 + 0.1 * (n % 4), 1.0 + 0.01 * n)
    other.load(guard.state())
    for n in range(20):
        value = 3.0 + 0.2 * math.sin(n * n)
        assert tell(guard, value) == tell(other, value)
        assert (guard.loss_limit == other.loss_limit) and (guard.norm_limit == other.norm_limit)
    assert guard.state() == other.state()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sigma": 0.0}, "guard.sigma=0.0: must be above 0, or null"),
        ({"window": 1}, "guard.window=1: must be at least 2"),
        ({"off_for": 1}, "guard.off_for=1: must be at least 2"),
        ({"max_skips": -1}, "guard.max_skips=-1: must be 0 or more"),
        ({"max_rollbacks": -1}, "guard.max_rollbacks=-1: must be 0 or more"),
        ({"stretch": 0}, "guard.stretch=0: must be at least 1"),
    ],
)
def test_settings_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        GuardSettings(**wrong)


@pytest.mark.parametrize(
    ("now", "too_many", "kept"),
    [
        ({"max_skips": 5, "stretch": 1000}, False, []),  # eight steps of the first eight: long ago
        ({"max_skips": 7, "stretch": 49_995}, False, [6, 7, 8]),
        ({"max_skips": 7, "stretch": 50_000}, True, list(range(1, 9))),
        ({"max_skips": 8, "stretch": 50_000}, False, list(range(1, 9))),
    ],
)
def test_a_resume_counts_what_was_left_out_by_its_own_settings(now, too_many, kept):
    state = {
        **Guard(GuardSettings(), CPU).state(),
        "recent": [[step, 4 * step, 4 * step + 4] for step in range(1, 9)],
        "rollbacks": 0,
    }
    skips = Skips(Guard(GuardSettings(**now), CPU), None, None)
    skips.load({"step": 50_000, "guard": state})
    assert (skips.too_many, [skip.step for skip in skips.recent]) == (too_many, kept)


def make_step(guard: Guard | None, device: str = "cpu") -> TrainStep:
    model = small_model(layers=2, pattern=["local", "global"], depth_block=2).to(device)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1)
    return TrainStep(model, optimizer, 1, 32, 4, compile=False, guard=guard)


@pytest.mark.parametrize("how", ["loss nan", "loss spike", "gradient nan", "gradient spike"])
def test_a_step_left_out_changes_no_weight_no_momentum_and_no_norm(how, monkeypatch):
    step = make_step(Guard(GuardSettings(window=6, off_for=6), CPU))
    text = batch([0, 32, 32, 32, 32])
    for _ in range(6):
        step.run(text, 0.001)
    before = step.optimizer.weights() | step.optimizer.state()
    copies = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    real = TrainStep.update

    def poisoned(self: TrainStep) -> torch.Tensor:
        if how.startswith("loss"):
            self.loss += math.nan if how.endswith("nan") else 100.0
        elif how.endswith("nan"):
            self.optimizer.gradient[7] = math.nan
        else:
            self.optimizer.gradient.mul_(1e4)
        return real(self)

    monkeypatch.setattr(TrainStep, "update", poisoned)
    step.run(text, 0.001)
    after = step.optimizer.weights() | step.optimizer.state()
    assert after.pop("skipped") == before.pop("skipped") + 1 == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(copies[name], p) for name, p in step.model.named_parameters())
    assert not step.optimizer.gradient.any()
    monkeypatch.undo()
    step.run(text, 0.001)
    assert step.optimizer.state()["step"] == 7 and step.optimizer.skipped == 1


class NoReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails at what makes the host wait for a GPU: a value read back, or a shape that depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), name
        return function(*args, **(kwargs or {}))


def test_a_guarded_update_reads_nothing_back_and_keeps_its_tensors_in_place(monkeypatch):
    step = make_step(Guard(GuardSettings(window=4, off_for=4), CPU))
    step.run(batch([0, 32, 32, 32, 32]), 0.01)
    guard = step.guard
    tensors = [value for value in vars(guard).values() if isinstance(value, torch.Tensor)]
    places = [tensor.data_ptr() for tensor in tensors]
    assert len(places) == 8
    step.optimizer.gradient.fill_(1e-3)
    with NoReads(), monkeypatch.context() as patch:
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, None, raising=False)  # calling it is an error
        step.update()
    assert places == [value.data_ptr() for value in vars(guard).values() if isinstance(value, torch.Tensor)]
    with pytest.raises(AssertionError, match="local_scalar"), NoReads():
        guard.state()


def test_guarded_and_unguarded_steps_are_the_same_where_nothing_is_wrong():
    guarded, plain = make_step(Guard(GuardSettings(), CPU)), make_step(None)
    for n in range(3):
        torch.manual_seed(n)
        one = guarded.run(batch([0, 9, 32, 32, 32]), 0.01)
        torch.manual_seed(n)
        other = plain.run(batch([0, 9, 32, 32, 32]), 0.01)
        assert torch.equal(torch.stack(one), torch.stack(other))
    assert all(torch.equal(a, b) for a, b in zip(guarded.model.parameters(), plain.model.parameters(), strict=True))


@pytest.mark.gpu
def test_a_recorded_update_decides_as_an_unrecorded_one():
    steps = [make_step(Guard(GuardSettings(window=4, off_for=6), torch.device("cuda")), "cuda") for _ in range(2)]
    recorded, plain = steps

    def prepare(step: TrainStep, turn: int) -> None:
        step.loss.fill_(math.nan if turn == 9 else 3.0 + 0.01 * (turn % 3) + 50.0 * (turn == 11))
        step.optimizer.gradient.copy_(torch.sin(torch.arange(step.optimizer.gradient.numel(), device="cuda") + turn))
        if turn == 13:
            step.optimizer.gradient.mul_(1e4)
        step.rate.fill_(0.01)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for turn in range(3):
            prepare(recorded, turn), recorded.update()
    torch.cuda.current_stream().wait_stream(side)
    prepare(recorded, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.update()
    graph.replay()
    for turn in range(4, 16):
        prepare(recorded, turn), graph.replay()
    for turn in range(16):
        prepare(plain, turn), plain.update()
    torch.cuda.synchronize()
    assert recorded.guard.state() == plain.guard.state() and int(recorded.optimizer.skipped) == 3
    told = [[verdict.taken for verdict in step.guard.read(16)] for step in steps]
    assert told[0] == told[1] == [turn not in (9, 11, 13) for turn in range(16)]
    one, other = (step.optimizer.weights() | step.optimizer.state() for step in steps)
    assert all(torch.equal(one[name], other[name]) for name in one)
