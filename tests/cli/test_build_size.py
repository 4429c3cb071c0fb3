"""A model that the machine's memory cannot hold."""

import pytest
import torch

from dwslm.cli import build as building
from dwslm.cli.build import build
from dwslm.model.lm import LanguageModel
from tests.train.tiny_run import tiny_config


def test_a_model_larger_than_the_machine_is_refused_before_it_is_made(tiny_data, tmp_path, monkeypatch):
    config = tiny_config(tiny_data, tmp_path)
    made = build(config, lr=None)
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    optimizer = made.optimizer
    held = [*made.model.parameters(), *optimizer._masters().values(), *optimizer.state().values(), optimizer.gradient]
    kept = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())
    monkeypatch.setattr(building, "machine_memory", lambda: int(1.02 * kept))
    build(config, lr=None)

    def on_paper_alone(*arguments):
        assert torch.get_default_device().type == "meta"
        return LanguageModel(*arguments)

    monkeypatch.setattr(building, "LanguageModel", on_paper_alone)
    monkeypatch.setattr(building, "machine_memory", lambda: int(0.98 * kept))
    with pytest.raises(ValueError, match=r"weights, gradients and optimizer take .* make model\.layers, model\.width"):
        build(config, lr=None)
    monkeypatch.setattr(building, "machine_memory", lambda: weights - 1)
    with pytest.raises(ValueError, match="the model's weights alone take"):
        building.check_size(config, made.model.vocab_size, trains_here=False)
