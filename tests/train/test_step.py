import pytest
import torch

from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.step import TrainStep
from tests.model.small import small_model


def test_the_model_is_scored_as_it_is_and_trained_compiled():
    model = small_model()
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1)
    step = TrainStep(model, optimizer, 1, 32, 4, compile=True)
    assert step.hidden != model.hidden and model.hidden.__func__ is type(model).hidden
    assert step.tokens.dtype == torch.int64 and step.cu_seqlens.tolist() == [32] * 5


def batch(cu_seqlens: list[int], tokens: int = 32) -> GlobalBatch:
    ids = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    micro = TorchBatch(ids, ids.roll(-1).long(), boundaries, context=tokens, scored=tokens)
    return GlobalBatch([micro], scored=tokens, segments=1, padding=0, first_row=0, next_row=1)


@pytest.mark.slow
def test_a_compiled_step_compiles_once_and_refuses_to_again():
    model = small_model(layers=1, pattern=["global"], depth_block=2)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1)
    step = TrainStep(model, optimizer, 1, 32, 4, compile=True)
    seen = torch._dynamo.utils.counters
    seen.clear()
    step.run(batch([0, 32, 32, 32, 32]), 0.1)
    graphs = seen["stats"]["unique_graphs"]
    for cu_seqlens in [[0, 5, 32, 32, 32], [0, 1, 2, 3, 32]]:
        loss, _ = step.run(batch(cu_seqlens), 0.1)
        assert loss.isfinite()
    assert seen["stats"]["unique_graphs"] == graphs > 0 and not seen["graph_break"]

    # What must never happen: another shape in the middle of a run.
    step.tokens, step.targets, step.context = torch.zeros(64).long(), torch.zeros(64).long(), 64
    with pytest.raises(RuntimeError, match="recompile"):
        step.run(batch([0, 64, 64, 64, 64], tokens=64), 0.1)
