"""Datasets made of arrays, for tests that need many small ones, and streams of rows over them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dwslm.data.mixture import MixtureSettings, Phase
from dwslm.data.packing import Batch, PackingSettings, RowStream
from dwslm.data.shards import DOC_DTYPE, Dataset

EOD = 0
SMALL = PackingSettings(context=8, segments_per_row=4, window_tokens=40)
ANNEAL = MixtureSettings(phases=[Phase(start=0.5, scale={"a": 2.0})])


def dataset(
    documents: Sequence[tuple[str, int] | tuple[str, int, str]], *, shards: int = 1, fingerprint: str = "f" * 64
) -> Dataset:
    """Documents given as (source, text tokens) in English, or (source, text tokens, language). Every token of the
    dataset has its own id, from 1 on."""
    sources = sorted({document[0] for document in documents})
    languages = sorted({document[2] if len(document) == 3 else "en" for document in documents})
    tables, texts, entries, token = [], [], [], 1
    for part in np.array_split(np.arange(len(documents)), shards):
        table = np.zeros(len(part), dtype=DOC_DTYPE)
        for record, doc in zip(table, part, strict=True):
            record["tokens"] = documents[doc][1]
            record["source"] = sources.index(documents[doc][0])
            record["language"] = languages.index((*documents[doc], "en")[2])
            record["id_hash"] = doc
        table["start"] = np.cumsum(table["tokens"]) - table["tokens"]
        count = int(table["tokens"].sum())
        tables.append(table)
        texts.append(np.arange(token, token + count, dtype=np.uint32))
        entries.append({"documents": len(part)})
        token += count
    manifest = {
        "sources": sources,
        "languages": languages,
        "vocab_size": token,
        "eod": EOD,
        "tokenizer_hash": "0" * 64,
        "shards": entries,
    }
    return Dataset(Path("memory"), manifest, fingerprint, np.concatenate(tables), texts)


def mixed_dataset() -> Dataset:
    """Three sources with documents of 1 to 60 tokens, three shards."""
    lengths = np.random.default_rng(3).integers(1, 60, 90).tolist()
    return dataset([("aabbbc"[n % 6], length) for n, length in enumerate(lengths)], shards=3)


def stream(text: Dataset, /, packing: PackingSettings = SMALL, **changes: Any) -> RowStream:
    arguments: dict[str, Any] = {
        "mixture": MixtureSettings(),
        "seed": 1,
        "planned_tokens": 10_000,
        "cache_dir": None,
    }
    return RowStream(text, packing=packing, **{**arguments, **changes})


def same(one: Batch, other: Batch) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "targets", "cu_seqlens", "docs", "starts")
    )
