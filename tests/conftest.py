"""What every test shares: one thread, fixed seeds, and GPU cases that skip by themselves."""

import os
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from tests.tiny_data import make_tiny_data

# One thread: sums come out in the same order on every machine, and small tensors are quicker.
torch.set_num_threads(1)

MOST_PROCESSES = 8  # each has PyTorch and starts processes of its own

# Examples are derived from the test itself, so that a failure elsewhere is a failure here.
hypothesis.settings.register_profile("dwslm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dwslm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes for `--numprocesses auto`: one more than cores, since many tests wait for something that they have started. A
    GPU is used by one test at a time."""
    return 0 if torch.cuda.is_available() else min(MOST_PROCESSES, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed every global generator before each test. Returns the seed."""
    value = 0
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of made-up text, two sources and two languages, with a vocabulary of 384 entries."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny-data"))
