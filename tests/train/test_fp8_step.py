"""Training with FP8 MLPs whose scales come from the micro-batch before: the state moves, is saved, and decides the bits."""

import pytest
import torch
from torch import Tensor

from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.step import TrainStep
from tests.model.small import small_model

TOKENS = 32


def start(seed: int = 0, *, compile: bool = False, precision: str = "fp8_delayed") -> TrainStep:
    model = small_model(seed, layers=2, pattern=["global"], depth_block=0, mlp_precision=precision)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters, model.roles(), OptimSettings(), lr=0.02, extra=model.extra_state())
    return TrainStep(model, optimizer, 1, TOKENS, 3, compile=compile)


def run(step: TrainStep, numbers: range, micro_batches: int = 2) -> None:
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        micro = []
        for _ in range(micro_batches):
            ids = torch.randint(0, 50, (TOKENS,), dtype=torch.int32, generator=draw)
            boundaries = torch.tensor([0, 10 + number, TOKENS, TOKENS], dtype=torch.int32)
            micro.append(TorchBatch(ids, ids.roll(-1).long(), boundaries, context=TOKENS, scored=TOKENS))
        step.run(GlobalBatch(micro, micro_batches * TOKENS, segments=2, padding=0, first_row=0, next_row=1), 0.02)


def everything(step: TrainStep) -> dict[str, Tensor]:
    return step.optimizer.weights() | step.optimizer.state()


def same(a: TrainStep, b: TrainStep) -> bool:
    ours, theirs = everything(a), everything(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_resume_goes_on_to_the_same_bits_and_not_without_the_peaks() -> None:
    straight, resumed, without = start(), start(1), start(2)
    run(straight, range(3))
    weights, state = straight.optimizer.weights(), straight.optimizer.state()
    assert {name for name in state if "peaks" in name} == {f"layers.{i}.mlp.peaks" for i in range(2)}
    resumed.optimizer.load(weights, state)
    without.optimizer.load(weights, {name: t * ("peaks" not in name) for name, t in state.items()})
    for step in (straight, resumed, without):
        run(step, range(3, 5))
    assert same(straight, resumed)
    assert not same(straight, without)


def test_every_peak_is_known_after_one_step_and_moves_with_each() -> None:
    step = start()
    assert all(not peaks.any() for peaks in step.model.extra_state().values())
    seen = []
    for number in range(2):
        run(step, range(number, number + 1))
        seen.append(torch.stack(list(step.model.extra_state().values())))
        assert (seen[-1] > 0).all() and seen[-1].isfinite().all()
    assert (seen[0] != seen[1]).all()


def test_scoring_leaves_the_peaks() -> None:
    step = start()
    run(step, range(1))
    before = everything(step)
    tokens = torch.arange(TOKENS)
    step.model.nats(tokens, tokens.roll(-1), torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS)
    assert all(torch.equal(before[name], tensor) for name, tensor in everything(step).items())
    run(step, range(1, 2))


def test_a_model_keeps_its_state_when_it_is_moved_and_cast() -> None:
    model = small_model(mlp_precision="fp8_delayed").to(torch.bfloat16)
    states = [layer.mlp.peaks for layer in model.layers]
    assert all(s.is_leaf and s.requires_grad and s.dtype == torch.float32 for s in states)
    assert not small_model(mlp_precision="fp8").extra_state()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8_delayed"])
def test_a_compiled_step_compiles_once(precision: str) -> None:
    """A second compilation would end the run."""
    torch._dynamo.reset()
    step = start(compile=True, precision=precision)
    run(step, range(3))
    assert all(tensor.isfinite().all() for tensor in everything(step).values())
