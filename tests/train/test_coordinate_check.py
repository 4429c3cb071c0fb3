"""One learning rate at every depth (CompleteP's alpha = 1, arXiv 2505.01618): what 8/L is for."""

import pytest
import torch

from dwslm.model.lm import LanguageModel, ModelSettings
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings

DEPTHS = (8, 20, 40)
RATE = 3.7e-3
WIDTH = 128


def logit_change(layers: int, base_depth: int, depth_block: int = 0) -> float:
    """RMS change of the logits by one step at RATE, from initialisation."""
    settings = ModelSettings(
        layers=layers,
        width=WIDTH,
        heads=4,
        kv_heads=2,
        head_dim=32,
        delta_heads=4,
        delta_head_dim=32,
        delta_gate_rank=32,
        mlp_hidden=4 * WIDTH,
        base_depth=base_depth,
        depth_block=depth_block,
        dtype="float32",
    )
    model = LanguageModel(settings, vocab_size=256)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (512,), generator=generator)
    targets, cu = tokens.roll(-1), torch.tensor([0, 100, 256, 400, 512], dtype=torch.int32)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(lr=RATE), lr=RATE)

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return 20 * torch.tanh(model.head(model.hidden(tokens, cu, 512)) / 20)

    before = logits()
    (model(tokens, targets, cu, 512) / 512).backward()
    optimizer.accumulate()
    optimizer.step(RATE)
    return (logits() - before).square().mean().sqrt().item()


def spread(changes: list[float]) -> float:
    """Largest distance from the mean of the depths, as a share of it."""
    mean = sum(changes) / len(changes)
    return max(abs(change / mean - 1) for change in changes)


@pytest.mark.slow
@pytest.mark.parametrize("depth_block", [0, 8])
def test_with_the_residual_factor_all_depths_move_alike(depth_block):
    assert spread([logit_change(layers, 8, depth_block) for layers in DEPTHS]) < 0.15


@pytest.mark.slow
def test_without_it_they_do_not():
    changes = [logit_change(layers, 0) for layers in DEPTHS]
    assert changes[2] > 3 * changes[0] and spread(changes) > 0.5
