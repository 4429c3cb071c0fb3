"""Where faults are put in: in memory, where a kill leaves the same and a sync costs nothing."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def memory_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("faults")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
