"""A dataset for runs of seconds."""

import json
import random
from pathlib import Path

from dwslm.data.prepare import prepare
from dwslm.data.prepare_settings import PrepareSettings


def make_tiny_data(folder: Path) -> Path:
    """Prepares made-up text, two sources and two languages, with a vocabulary of 384 entries; returns its folder."""
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
