"""The named builds of `dwslm bench step`: what groups stand for, and that those of the growth fit the main model."""

import dataclasses

import pytest

from dwslm.bench.step import Parts
from dwslm.bench.step_builds import BUILDS, GROUPS, named
from dwslm.cli.build import build
from dwslm.cli.preflight import composed

NARROW = [
    "train.device=cpu", "train.compile=false", "data.packing.window_tokens=131072", "model.width=32", "model.head_dim=8",
    "model.delta_head_dim=8", "model.delta_gate_rank=8", "model.mlp_hidden=64",
]  # fmt: skip
# Layers, context, tokens of a micro-batch, its rows.
GROWTH = {
    "main": (20, 4_096, 65_536, 16),
    "layers_8": (8, 4_096, 65_536, 16),
    "layers_40": (40, 4_096, 32_768, 8),
    "context_1k": (20, 1_024, 65_536, 64),
    "context_16k": (20, 16_384, 65_536, 4),
    "context_32k": (20, 32_768, 65_536, 2),
}


def test_a_group_stands_for_its_builds_and_none_comes_twice():
    assert [name for name, _ in named(["growth"], None)] == list(GROWTH)
    assert [name for name, _ in named(["table"], None)] == [
        "main", "plain", "fp8", "fp8_delayed", "fp8_all", "fp8_head", "main_fp8", "window", "no_depth", "no_values",
    ]  # fmt: skip
    both = [name for name, _ in named(["plain", "growth", "table"], None)]
    assert both[:3] == ["plain", "main", "layers_8"] and sorted(both) == sorted(BUILDS)
    assert [name for name, _ in named(["growth"], "both")][:2] == ["main recorded", "main launched"]
    assert not GROUPS.keys() & BUILDS.keys()
    with pytest.raises(ValueError, match="build 'growth' is given twice"):
        named(["growth", "growth"], None)
    with pytest.raises(ValueError, match="unknown build 'grow': choose out of main, .*, table, growth"):
        named(["grow"], None)


@pytest.mark.parametrize("name", GROWTH)
def test_builds_of_the_growth_differ_from_main_in_what_grows_alone(name):
    config, main = (composed(["experiment=main", *BUILDS[build]], None) for build in (name, "main"))
    layers, context, tokens, rows = GROWTH[name]
    assert (config.model.layers, config.data.packing.context, config.train.micro_batch_tokens) == GROWTH[name][:3]
    assert rows * context == tokens and config.train.batch_tokens % tokens == 0
    assert (2 * layers) % config.model.depth_block == 0 and config.model.depth_block == main.model.depth_block == 8
    # As many tokens for a segment as in main, so as many slots in a micro-batch of as many tokens.
    assert config.data.packing.segments_per_row / context == main.data.packing.segments_per_row / 4_096
    assert config.evaluate.segments_per_row == config.data.packing.segments_per_row
    same = dataclasses.replace(config.model, layers=main.model.layers)
    assert same == main.model and config.optim == main.optim
    assert dataclasses.replace(config.train, micro_batch_tokens=main.train.micro_batch_tokens) == main.train


@pytest.mark.parametrize("name", GROWTH)
def test_builds_of_the_growth_are_built_and_get_their_micro_batches(name, tiny_data):
    config = composed(["experiment=main", f"data.path={tiny_data}", *NARROW, *BUILDS[name]], None)
    built = build(config, lr=None)
    layers, context, tokens, rows = GROWTH[name]
    assert len(built.model.layers) == layers and built.plan.grad_accum == 524_288 // tokens
    parts = Parts(built.plan, config.train, config.guard, built.model, built.optimizer, built.stream)
    with parts.loader() as loader:
        batch = next(iter(loader)).micro_batches[0]
    assert len(batch.tokens) == tokens and batch.context == context
    assert len(batch.cu_seqlens) - 1 == rows * config.data.packing.segments_per_row
    assert batch.cu_seqlens.diff().max() <= context
