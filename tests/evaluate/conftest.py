"""Small datasets in memory, and models whose nats are known."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dwslm.data.batch import IGNORE, Batch
from dwslm.data.shards import DOC_DTYPE, Dataset


class Doc(NamedTuple):
    source: str
    language: str
    tokens: Sequence[int]
    bytes: int


def build_dataset(documents: Sequence[Doc], vocab_size: int = 16) -> Dataset:
    """The last id is eod. Id hashes fall with the document's number."""
    sources = sorted({doc.source for doc in documents})
    languages = sorted({doc.language for doc in documents})
    docs = np.zeros(len(documents), dtype=DOC_DTYPE)
    tokens: Counter[tuple[str, str]] = Counter()
    byte_counts: Counter[tuple[str, str]] = Counter()
    start = 0
    for number, doc in enumerate(documents):
        docs[number] = (
            start,
            len(doc.tokens),
            doc.bytes,
            sources.index(doc.source),
            languages.index(doc.language),
            1000 - number,
        )
        start += len(doc.tokens)
        tokens[doc.source, doc.language] += len(doc.tokens)
        byte_counts[doc.source, doc.language] += doc.bytes
    manifest = {
        "sources": sources,
        "languages": languages,
        "vocab_size": vocab_size,
        "eod": vocab_size - 1,
        "tokenizer_hash": "",
        "slices": [
            {"source": source, "language": language, "tokens": count, "bytes": byte_counts[source, language]}
            for (source, language), count in tokens.items()
        ],
        "shards": [{"documents": len(documents)}],
    }
    text = np.array([token for doc in documents for token in doc.tokens], dtype=np.uint16)
    return Dataset(Path("held-out"), manifest, "fingerprint", docs, [text])


def table_model(nats_of_token: Sequence[float]) -> Callable[[Batch], np.ndarray]:
    """A model that looks at nothing: nats depend on the target alone. NaN where there is none."""
    table = np.array([*nats_of_token, np.nan], dtype=np.float32)
    return lambda batch: table[np.where(batch.targets == IGNORE, len(table) - 1, batch.targets)]


@pytest.fixture(scope="session")
def make_doc() -> type[Doc]:
    return Doc


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., Dataset]:
    return build_dataset


@pytest.fixture(scope="session")
def make_table_model() -> Callable[..., Callable[[Batch], np.ndarray]]:
    return table_model
