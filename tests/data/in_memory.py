"""Datasets made of arrays, for tests that need many small ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dwslm.data.shards import DOC_DTYPE, Dataset

EOD = 0


def dataset(documents: Sequence[tuple[str, int]], *, shards: int = 1, fingerprint: str = "f" * 64) -> Dataset:
    """Documents given as (source, text tokens). Every token of the dataset has its own id, from 1 on."""
    sources = sorted({source for source, _ in documents})
    tables, texts, entries, token = [], [], [], 1
    for part in np.array_split(np.arange(len(documents)), shards):
        table = np.zeros(len(part), dtype=DOC_DTYPE)
        for record, doc in zip(table, part, strict=True):
            record["tokens"] = documents[doc][1]
            record["source"] = sources.index(documents[doc][0])
        table["start"] = np.cumsum(table["tokens"]) - table["tokens"]
        count = int(table["tokens"].sum())
        tables.append(table)
        texts.append(np.arange(token, token + count, dtype=np.uint32))
        entries.append({"documents": len(part)})
        token += count
    manifest = {
        "sources": sources,
        "languages": ["en"],
        "vocab_size": token,
        "eod": EOD,
        "tokenizer_hash": "0" * 64,
        "shards": entries,
    }
    return Dataset(Path("memory"), manifest, fingerprint, np.concatenate(tables), texts)
