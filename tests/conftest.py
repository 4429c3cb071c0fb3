"""What every test shares: one thread, fixed seeds, and GPU cases that skip by themselves."""

import json
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from dwslm.data.prepare import prepare
from dwslm.data.prepare_settings import PrepareSettings

# One thread: sums come out in the same order on every machine, and small tensors are quicker.
torch.set_num_threads(1)

# Examples are derived from the test itself, so that a failure elsewhere is a failure here.
hypothesis.settings.register_profile("dwslm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dwslm")


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
    folder = tmp_path_factory.mktemp("tiny-data")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyzäöß", k=draw.randint(2, 8))) for _ in range(200)]
    for split, documents in (("train", 240), ("valid", 24)):
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for i in range(documents):
                text = " ".join(draw.choices(words, k=draw.choice([3, 20, 60, 200])))
                source, language = ("notes", "books")[i % 2], ("en", "de")[i // 2 % 2]
                row = {"id": f"{split}-{i}", "text": text, "source": source, "language": language}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    files = {split: [str(folder / f"{split}.jsonl")] for split in ("train", "valid")}
    prepare(PrepareSettings(out=str(folder / "data"), vocab_size=384, **files))
    return folder / "data"
