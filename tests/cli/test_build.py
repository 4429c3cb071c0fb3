"""What `auto` comes to for the micro-batch: one number for all ranks, from the memory of each."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dwslm.cli.build import build, check_counted, micro_batch_of_all
from dwslm.cli.engines import PARTS
from dwslm.train.distributed import Ranks
from dwslm.train.dry_run import estimate
from tests.train.tiny_run import tiny_config


class Two(Ranks):
    """The first of two ranks, of which the other has chosen already, has so much memory and needs so much at least."""

    def __init__(self, chosen: int, memory: int, need: int = 0):
        super().__init__()
        self.world, self.other = 2, (chosen, memory, need)

    def total(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        assert not numbers[:, 1].any()
        return numbers + np.array([[0, n] for n in self.other])


@pytest.fixture(scope="module")
def built(tiny_data, tmp_path_factory):
    """256 tokens a step in rows of 64: 256, 128 or 64 at once."""
    return build(tiny_config(tiny_data, tmp_path_factory.mktemp("runs"), micro_batch_tokens="auto"), lr=None)


def memory_for(built, tokens: int) -> int:
    """Of a device that has room for a micro-batch of this size, and for no more."""
    return -(-10 * sum(estimate(built.model, built.optimizer, tokens).values()) // 9)


def test_a_cpu_takes_all_of_a_small_batch(built):
    assert (built.plan.micro_batch_tokens, built.plan.grad_accum) == (256, 1)


@pytest.mark.parametrize("tokens", [256, 128, 64])
def test_the_largest_for_a_devices_memory(built, tokens):
    memory = memory_for(built, tokens)
    assert micro_batch_of_all(built.plan.candidates(), built.model, built.optimizer, memory, Ranks()) == tokens


def test_a_device_without_room_for_one_row(built):
    memory = memory_for(built, 64) * 9 // 10
    with pytest.raises(
        ValueError, match=r"auto finds none that fits: 64 tokens, .* more than 90% of a GPU's 0.00 GB; take a"
    ):
        micro_batch_of_all(built.plan.candidates(), built.model, built.optimizer, memory, Ranks())


def test_the_smallest_device_decides_for_all(built):
    sizes = replace(built.plan, world=2).candidates()  # 128 or 64 at once

    def chosen(own: int, other: int) -> int:
        return micro_batch_of_all(sizes, built.model, built.optimizer, memory_for(built, own), Two(other, 10**12))

    assert [chosen(128, 128), chosen(128, 64), chosen(64, 128), chosen(64, 64)] == [128, 64, 64, 64]


GB = 10**9


def test_the_rank_without_room_is_told_with_its_own_need(built):
    """This rank needs next to nothing of its 80 GB; the other, with a larger share, 75 of its 80."""
    sizes = built.plan.candidates()
    with pytest.raises(ValueError, match=r"need about 75\.00 GB on rank 1, more than 90% of a GPU's 80\.00 GB"):
        micro_batch_of_all(sizes, built.model, built.optimizer, 80 * GB, Two(0, 80 * GB, 75 * GB))
    with pytest.raises(ValueError, match=r"GB on rank 0, more than 90% of a GPU's 0\.00 GB"):  # the other has room
        micro_batch_of_all(sizes, built.model, built.optimizer, 1000, Two(64, 80 * GB, 75 * GB))


# ---- what `auto` counts, and what it takes ------------------------------------------------------------------

GPU = torch.device("cuda")
FUSED = dict.fromkeys(PARTS, "fused")


def config_of(data, tmp_path, **train):
    return tiny_config(data, tmp_path, micro_batch_tokens="auto", **train)


def test_auto_wants_the_build_that_is_counted(tiny_data, tmp_path):
    launched, compiled = (config_of(tiny_data, tmp_path, compile=given) for given in (False, True))
    with pytest.raises(
        ValueError, match=r"auto counts .* set train.compile=true, or give a number for train.micro_batch_tokens"
    ):
        check_counted(launched, GPU, FUSED)
    check_counted(compiled, GPU, FUSED)
    check_counted(compiled, GPU, FUSED | {"convolution": "torch", "delta rule": "not used"})  # counted as they are
    for part in ("attention", "delta rule"):
        with pytest.raises(ValueError, match=rf"model.{PARTS[part]}=\w+ comes to plain torch .* or give a number"):
            check_counted(compiled, GPU, FUSED | {part: "torch"})
    check_counted(launched, torch.device("cpu"), FUSED | {"attention": "torch"})  # a CPU's memory is not counted


def test_a_build_on_a_gpu_is_refused_before_its_data_are_opened(tiny_data, tmp_path, monkeypatch):
    class OnAGpu(Ranks):
        def choose_device(self, name: str) -> torch.device:
            return GPU

    monkeypatch.setattr("dwslm.cli.build.engines", lambda *given: FUSED | {"attention": "torch"})
    for given, said in ((False, "set train.compile=true"), (True, "model.attention_engine=")):
        config = config_of(tiny_data, tmp_path, compile=given)
        config.data.path = str(tmp_path / "none")
        with pytest.raises(ValueError, match=said):
            build(config, lr=None, ranks=OnAGpu())
        config.train.micro_batch_tokens = 64  # a number is taken as it is
        with pytest.raises(ValueError, match="is not a prepared dataset"):
            build(config, lr=None, ranks=OnAGpu())


@pytest.mark.parametrize("setting", ["mlp_precision", "projection_precision", "head_precision"])
def test_fp8_takes_every_candidate(tiny_data, tmp_path, setting):
    """Rows of 8 slots; FP8 multiplies multiples of 16 tokens, and fills up what is none."""
    config = config_of(tiny_data, tmp_path)
    config = replace(
        config,
        model=replace(config.model, **{setting: "fp8_delayed"}),
        data=replace(config.data, packing=replace(config.data.packing, context=8)),
        train=replace(config.train, batch_tokens=24, micro_batch_tokens="auto"),
    )
    assert build(config, lr=None).plan.micro_batch_tokens == 24
