"""Small models that have every part of the large one, and packed batches for them."""

from dataclasses import replace

import torch
from torch import Tensor

from dwslm.model.lm import LanguageModel, ModelSettings

VOCAB = 97
ARMS = ("kda", "gdn", "window")

SMALL = ModelSettings(
    layers=4,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    window=6,
    delta_heads=2,
    delta_head_dim=16,
    delta_gate_rank=8,
    mlp_hidden=64,
    depth_block=4,
    dtype="float32",
)


def small_model(seed: int = 0, **changes) -> LanguageModel:
    """A small model whose zero-initialised parts are stirred, so that nothing is hidden behind a zero."""
    model = LanguageModel(replace(SMALL, **changes), VOCAB, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query.query" in name or "bias" in name or "gain" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            for block, rows in zip(getattr(module, "blocks", ()), getattr(module, "rows", ()), strict=True):
                if block.init == "zero":
                    offset = sum(module.rows[: module.blocks.index(block)])
                    module.weight[offset : offset + rows].normal_(generator=generator)
    return model


def packed(lengths: list[int], seed: int = 0, spare: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, targets and boundaries of segments with these lengths, with empty slots at the end."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(0, VOCAB, (total,), generator=generator)
    targets = torch.randint(0, VOCAB, (total,), generator=generator)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return tokens, targets, torch.tensor(offsets + [total] * spare, dtype=torch.int32)
