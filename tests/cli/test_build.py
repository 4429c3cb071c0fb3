"""What `auto` comes to for the micro-batch: one number for all ranks, from the memory of each."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from dwslm.cli.build import build, micro_batch_of_all
from dwslm.train.distributed import Ranks
from dwslm.train.dry_run import estimate
from tests.train.tiny_run import tiny_config


class Two(Ranks):
    """The first of two ranks, of which the other has chosen already and has so much memory."""

    def __init__(self, chosen: int, memory: int):
        super().__init__()
        self.world, self.other = 2, (chosen, memory)

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
    assert micro_batch_of_all(built.plan, built.model, built.optimizer, memory, Ranks()) == tokens


def test_a_device_without_room_for_one_row(built):
    memory = memory_for(built, 64) * 9 // 10
    with pytest.raises(
        ValueError, match=r"auto finds none that fits: 64 tokens, .* more than 90% of a GPU's 0.00 GB; take a"
    ):
        micro_batch_of_all(built.plan, built.model, built.optimizer, memory, Ranks())


def test_the_smallest_device_decides_for_all(built):
    plan = replace(built.plan, world=2)  # 128 or 64 at once

    def chosen(own: int, other: int) -> int:
        return micro_batch_of_all(plan, built.model, built.optimizer, memory_for(built, own), Two(other, 10**12))

    assert [chosen(128, 128), chosen(128, 64), chosen(64, 128), chosen(64, 64)] == [128, 64, 64, 64]
    with pytest.raises(ValueError, match="0.00 GB"):  # this one has room, the other has none
        micro_batch_of_all(plan, built.model, built.optimizer, memory_for(built, 128), Two(0, 1000))
