"""What is in a dataset: totals by slice, how long documents are, some of the text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dwslm.data.prepare_settings import SPLITS
from dwslm.data.shards import check_dataset, open_dataset, read_manifest
from dwslm.data.tokenizer import load_tokenizer, tokenizer_hash

LONG = 4096
"""Tokens from which on a document counts as long: the context of the main run's last rung but one."""


def find_datasets(path: str | Path) -> dict[str, Path]:
    """The datasets of a folder by split; one that is a dataset itself is listed under its own name.

    Raises:
        FileNotFoundError: neither.
    """
    path = Path(path)
    if (path / "manifest.json").is_file():
        return {path.name: path}
    found = {split: path / split for split in SPLITS if (path / split / "manifest.json").is_file()}
    if not found:
        raise FileNotFoundError(f"{path} holds no dataset: no manifest.json in it, nor in train/ or valid/")
    return found


def find_tokenizer(dataset: Path) -> Path:
    """The tokenizer file of a dataset, in its folder or the one above, where `prepare` puts it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another one than made the dataset.
    """
    for folder in (dataset, dataset.resolve().parent):
        if (path := folder / "tokenizer.json").is_file():
            if tokenizer_hash(path) != read_manifest(dataset)["tokenizer_hash"]:
                raise ValueError(f"{path} is not the tokenizer that made {dataset}")
            return path
    raise FileNotFoundError(f"{dataset} has no tokenizer.json beside it")


@dataclass(frozen=True)
class Lengths:
    """Document lengths of a dataset, in tokens."""

    median: float
    """Half of the documents are shorter (the mean of the two in the middle, for an even number)."""
    token_median: int
    """Half of the tokens stand in documents of at most this many."""
    longest: int
    long_documents: int
    """Documents of 4,096 tokens or more, and their tokens."""
    long_tokens: int
    classes: list[dict[str, int]]
    """`from`, `to` (inclusive), `documents`, `tokens`, for powers of two."""


def lengths(path: Path) -> Lengths:
    """Count documents by length; exact, with one document table in memory at a time."""
    manifest = check_dataset(path)
    counts = np.zeros(1, np.int64)  # documents of each length
    for shard in manifest["shards"]:
        table = np.load(path / f"{shard['name']}.docs.npy", allow_pickle=False)
        here = np.bincount(table["tokens"], minlength=len(counts))
        here[: len(counts)] += counts
        counts = here
    size = np.arange(len(counts))
    running, tokens = np.cumsum(counts), counts * size
    middle = [int(np.searchsorted(running, (int(running[-1]) + extra) // 2)) for extra in (1, 2)]
    classes = []
    for power in range(len(counts).bit_length()):
        first, last = 1 << power, min((2 << power) - 1, len(counts) - 1)
        if first <= last and counts[first : last + 1].any():
            part = slice(first, last + 1)
            classes.append(
                {
                    "from": first,
                    "to": (2 << power) - 1,
                    "documents": int(counts[part].sum()),
                    "tokens": int(tokens[part].sum()),
                }
            )
    return Lengths(
        median=sum(middle) / 2,
        token_median=int(np.searchsorted(np.cumsum(tokens), (int(tokens.sum()) + 1) // 2)),
        longest=len(counts) - 1,
        long_documents=int(counts[LONG:].sum()),
        long_tokens=int(tokens[LONG:].sum()),
        classes=classes,
    )


def totals(path: Path, by: str) -> list[dict[str, Any]]:
    """Documents, tokens and bytes by "source", "language", or "both", most tokens first."""
    keys = ("source", "language") if by == "both" else (by,)
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for row in read_manifest(path)["slices"]:
        total = sums.setdefault(tuple(row[key] for key in keys), {"documents": 0, "tokens": 0, "bytes": 0})
        for name in total:
            total[name] += row[name]
    rows = [{**dict(zip(keys, names, strict=True)), **total} for names, total in sums.items()]
    return sorted(rows, key=lambda row: (-row["tokens"], *(row[key] for key in keys)))


def samples(
    path: Path, count: int, characters: int, seed: int = 0, source: str = "", language: str = ""
) -> list[dict[str, Any]]:
    """Some documents drawn at random, of one source or language if named.

    Returns:
        `document` (its number), `source`, `language`, `tokens`, `bytes`, and the first `characters` of its `text`.

    Raises:
        ValueError: a name that the dataset does not have, or no document of both.
    """
    data = open_dataset(path)
    tokenizer = load_tokenizer(find_tokenizer(path))
    fits = np.ones(len(data), bool)
    for column, name, names in (("source", source, data.sources), ("language", language, data.languages)):
        if name and name not in names:
            raise ValueError(f"{path} has no {column} {name!r}; it has {', '.join(names[:20])}")
        if name:
            fits &= data.docs[column] == names.index(name)
    candidates = np.flatnonzero(fits)
    if not len(candidates):
        raise ValueError(f"{path} has no document of source {source!r} and language {language!r}")
    drawn = np.random.default_rng(seed).choice(candidates, min(count, len(candidates)), replace=False)
    found = []
    for document in sorted(drawn.tolist()):
        row = data.docs[document]
        # A token is at least one byte, a character at most four.
        text = tokenizer.decode(data.tokens(document)[: characters * 4].tolist(), skip_special_tokens=False)
        found.append(
            {
                "document": document,
                "source": data.sources[row["source"]],
                "language": data.languages[row["language"]],
                "tokens": int(row["tokens"]),
                "bytes": int(row["bytes"]),
                "text": text[:characters],
            }
        )
    return found
