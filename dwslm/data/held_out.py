"""Held-out documents must not be trained on."""

import numpy as np

from dwslm.data.shards import Dataset

SHOWN = 3


def check_held_out(train: Dataset, valid: Dataset) -> None:
    """Raises ValueError where documents of the held-out set are in the training text too, known by their ids."""
    common, in_train, _ = np.intersect1d(train.docs["id_hash"], valid.docs["id_hash"], return_indices=True)
    if not len(common):
        return
    tokens = int(train.docs["tokens"][in_train].astype(np.int64).sum())
    some = ", ".join(
        f"document {int(doc)} of source {train.sources[train.docs['source'][doc]]!r}" for doc in in_train[:SHOWN]
    )
    raise ValueError(
        f"{len(common):,} of the {len(valid):,} held-out documents of {valid.path} are in the training text as well "
        f"({tokens:,} tokens of {train.path}: {some}{', ...' if len(common) > SHOWN else ''}): their scores would "
        "say nothing; prepare the data again with every id in one of the two"
    )
