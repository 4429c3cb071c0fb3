import pytest
import torch

from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.step import TrainStep
from tests.model.small import small_model


def test_what_is_known_to_be_wrong_when_compiled_is_refused():
    model = small_model(attention_engine="flex", head_dim=16)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1)
    with pytest.raises(ValueError, match="attention_engine=flex gives wrong numbers when compiled"):
        TrainStep(model, optimizer, 1, 32, 4, compile=True)


def test_the_model_is_scored_as_it_is_and_trained_compiled():
    model = small_model()
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=0.1), lr=0.1)
    step = TrainStep(model, optimizer, 1, 32, 4, compile=True)
    assert step.hidden != model.hidden and model.hidden.__func__ is type(model).hidden
    assert step.tokens.dtype == torch.int64 and step.cu_seqlens.tolist() == [32] * 5
