"""Training in FP8 with scales that come from the micro-batch before: the state moves, is saved, and decides the bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.step import TrainStep
from tests.model.small import small_model

TOKENS = 32
MLPS: dict[str, Any] = {"pattern": ["global"], "mlp_precision": "fp8_delayed"}
PROJECTIONS: dict[str, Any] = {"pattern": ["local", "global"], "projection_precision": "fp8_delayed"}
HEAD: dict[str, Any] = {"pattern": ["global"], "head_precision": "fp8_delayed"}
CASES = pytest.mark.parametrize(
    "changes",
    [MLPS, PROJECTIONS, PROJECTIONS | {"mlp_precision": "fp8_delayed", "local": "gdn"}, HEAD],
    ids=["mlp", "projections", "both", "head"],
)


def start(seed: int = 0, *, compile: bool = False, **changes: Any) -> TrainStep:
    model = small_model(seed, layers=2, depth_block=0, **changes)
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


@CASES
def test_a_resume_goes_on_to_the_same_bits_and_not_without_the_peaks(changes: dict[str, Any]) -> None:
    straight, resumed, without = (start(seed, **changes) for seed in range(3))
    run(straight, range(3))
    weights, state = straight.optimizer.weights(), straight.optimizer.state()
    parts = ["mlp"] * ("mlp_precision" in changes)
    parts += ["mixer.input", "mixer.output"] * ("projection_precision" in changes)
    assert {name for name in state if "peaks" in name} == {
        f"layers.{i}.{part}.peaks" for i in range(2) for part in parts
    } | ({"head.peaks"} if "head_precision" in changes else set())
    resumed.optimizer.load(weights, state)
    without.optimizer.load(weights, {name: t * ("peaks" not in name) for name, t in state.items()})
    for step in (straight, resumed, without):
        run(step, range(3, 5))
    assert same(straight, resumed)
    assert not same(straight, without)


@CASES
def test_every_peak_is_known_after_one_step_and_moves_with_each(changes: dict[str, Any]) -> None:
    step = start(**changes)
    assert all(not peaks.any() for peaks in step.model.extra_state().values())
    seen = []
    for number in range(2):
        run(step, range(number, number + 1))
        seen.append(torch.cat(list(step.model.extra_state().values())))
        assert (seen[-1] > 0).all() and seen[-1].isfinite().all()
    assert (seen[0] != seen[1]).all()


@CASES
def test_scoring_leaves_the_peaks_and_does_not_see_them(changes: dict[str, Any]) -> None:
    step = start(**changes)
    run(step, range(1))
    before = everything(step)
    tokens = torch.arange(TOKENS)
    arguments = tokens, tokens.roll(-1), torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS
    nats = step.model.nats(*arguments)
    other = small_model(layers=2, depth_block=0, **changes)
    other.load_state_dict({name: t for name, t in step.model.state_dict().items() if "peaks" not in name}, strict=False)
    assert torch.equal(nats, other.nats(*arguments))
    assert all(torch.equal(before[name], tensor) for name, tensor in everything(step).items())
    run(step, range(1, 2))


def test_a_model_keeps_its_state_when_it_is_moved_and_cast() -> None:
    model = small_model(mlp_precision="fp8_delayed", projection_precision="fp8_delayed").to(torch.bfloat16)
    states = [part.peaks for layer in model.layers for part in (layer.mlp, layer.mixer.input, layer.mixer.output)]
    assert all(s.is_leaf and s.requires_grad and s.dtype == torch.float32 for s in states)
    assert not small_model(mlp_precision="fp8").extra_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [MLPS | {"mlp_precision": "fp8"}, MLPS, PROJECTIONS, HEAD], ids=["rows", "mlp", "projections", "head"]
)
def test_a_compiled_step_compiles_once(changes: dict[str, Any]) -> None:
    """A second compilation would end the run."""
    torch._dynamo.reset()
    step = start(compile=True, **changes)
    run(step, range(3))
    assert all(tensor.isfinite().all() for tensor in everything(step).values())
