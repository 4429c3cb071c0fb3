"""Held-out documents must not be trained on, under their own ids or under others."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dwslm.data.order import hash64
from dwslm.data.shards import Dataset

SHOWN = 3


def check_held_out(train: Dataset, valid: Dataset, *, allow_copies: bool = False) -> str | None:
    """Hold the two splits of a dataset against each other.

    Returns:
        what there is to say of copies that are allowed, None where there are none.

    Raises:
        ValueError: documents of the held-out set are in the training text too, by their ids; or, unless `allow_copies`,
            by their text.
    """
    ids = np.unique(valid.docs["id_hash"])
    in_train = np.flatnonzero(_among(train.docs["id_hash"], ids))
    if len(in_train):
        common = int(_among(valid.docs["id_hash"], np.unique(train.docs["id_hash"][in_train])).sum())
        raise ValueError(
            f"{common:,} of the {len(valid):,} held-out documents of {valid.path} are in the training text as well "
            f"({_named(train, in_train)}): their scores would say nothing; prepare the data again with every id in one of "
            "the two"
        )
    found = copies(train, valid)
    if not len(found.train):
        return None
    said = (
        f"{len(found.valid):,} of the {len(valid):,} held-out documents of {valid.path} are in the training text "
        f"as well, byte for byte under other ids ({_named(train, found.train)})"
    )
    if allow_copies:
        return said
    raise ValueError(
        f"{said}: their scores would say little; prepare the data again with --dedup, which leaves them out of the training "
        "text, or accept them with data.allow_held_out_copies=true"
    )


class Copies(NamedTuple):
    """Documents whose text is in both splits: those of `train`, int64 [n], and the held-out ones, `valid`, int64 [m]; each in
    rising order and once, however often its text occurs."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]


def copies(train: Dataset, valid: Dataset) -> Copies:
    """Training documents whose text is that of a held-out one, exactly.

    Same text means same tokens, since both were made by one tokenizer. Only documents with the same numbers of tokens
    and bytes are looked at, and of those only the ones that share three tokens are read whole.
    """
    every = np.arange(len(valid))
    sizes, marks = np.unique(_sizes(valid, every)), _marks(valid, every)
    known = np.unique(marks)
    alike: list[NDArray[np.int64]] = []
    for first, stop in train.shard_documents():
        docs = np.arange(first, stop)
        docs = docs[_among(_sizes(train, docs), sizes)]
        docs = docs[_among(_marks(train, docs), known)]
        alike.append(docs)
        train.release()
    docs = np.concatenate([np.empty(0, np.int64), *alike])
    wanted = np.flatnonzero(_among(marks, np.unique(_marks(train, docs))))
    of_text: dict[bytes, list[int]] = {}
    for doc in wanted.tolist():
        of_text.setdefault(valid.tokens(doc).tobytes(), []).append(doc)
    trained: list[int] = []
    texts: set[bytes] = set()
    for doc in docs.tolist():
        text = train.tokens(doc).tobytes()
        if text in of_text:
            trained.append(doc)
            texts.add(text)
    train.release()
    valid.release()
    held_out = sorted(doc for text in texts for doc in of_text[text])
    return Copies(np.array(trained, np.int64), np.array(held_out, np.int64))


def _named(train: Dataset, docs: NDArray[np.int64]) -> str:
    some = ", ".join(
        f"document {int(doc)} of source {train.sources[train.docs['source'][doc]]!r}" for doc in docs[:SHOWN]
    )
    tokens = int(train.docs["tokens"][docs].sum(dtype=np.int64))
    return f"{tokens:,} tokens of {train.path}: {some}{', ...' if len(docs) > SHOWN else ''}"


def _among(values: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which values are in the sorted array `known`. Much quicker than np.isin where that is the smaller one by far."""
    if not len(known):
        return np.zeros(len(values), bool)
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    result: NDArray[np.bool_] = known[places] == values
    return result


def _sizes(dataset: Dataset, docs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Numbers of tokens and of bytes, as one."""
    table = dataset.docs[docs]
    result: NDArray[np.uint64] = table["tokens"].astype(np.uint64) << np.uint64(32) | table["bytes"]
    return result


def _marks(dataset: Dataset, docs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each document's size and its first, middle and last token."""
    marks = _sizes(dataset, docs)
    lengths = dataset.docs["tokens"][docs].astype(np.int64)
    for places in (0 * lengths, lengths // 2, lengths - 1):
        marks = hash64(marks ^ dataset.tokens_at(docs, places))
    return marks
