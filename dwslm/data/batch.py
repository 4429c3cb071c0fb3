"""A batch: rows of segments as flat arrays of tokens, targets and segment boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dwslm.data.order import Pieces, join_pieces
from dwslm.data.shards import Dataset
from dwslm.data.text import Text

IGNORE = -100
"""Target of a position that has no loss."""

RELEASE_EVERY = 16
"""Pieces between two releases of the token files' pages: the kernel maps up to a megabyte around each of them."""


@dataclass(frozen=True)
class Batch:
    """Rows of `context` slots, flattened.

    A segment is `[eod, t1 .. tn]` with targets `[t1 .. tn, eod]`; the closing eod is IGNORE where the
    document goes on after the piece. A row that isn't full ends in one padding segment of eod tokens whose
    targets are IGNORE.
    """

    tokens: NDArray[np.int32]
    """[rows * context]"""
    targets: NDArray[np.int32]
    """[rows * context]"""
    cu_seqlens: NDArray[np.int32]
    """Segment boundaries, [slots + 1] with slots = rows * segments_per_row: 0, then the end of each segment,
    then rows * context repeated, which makes the unused slots empty segments."""
    docs: NDArray[np.int64]
    """Document of each segment as an index into the dataset, -1 for padding and for empty segments,
    [slots]"""
    starts: NDArray[np.int64]
    """First text token of each segment in its document, 0 where there is none, [slots]"""
    context: int

    @property
    def scored(self) -> int:
        """Positions that have a loss."""
        return int(np.count_nonzero(self.targets != IGNORE))

    @property
    def segments(self) -> int:
        """Segments of text; padding and empty ones don't count."""
        return int(np.count_nonzero(self.docs >= 0))

    @property
    def padding(self) -> int:
        """Slots that hold padding."""
        return int(np.diff(self.cu_seqlens)[self.docs < 0].sum())


def assemble(
    dataset: Dataset, rows: Sequence[Pieces], context: int, segments_per_row: int, text: Text | None = None
) -> Batch:
    """Fetch the text of the rows, each given as its pieces from left to right.

    `text` is how the documents are read, and the pieces are of it; None takes them as they are stored.

    Raises ValueError if a row has more slots than `context` or more segments, padding included, than
    `segments_per_row`, and for a token that is not in the vocabulary.
    """
    pieces = join_pieces(rows)
    count = np.array([len(row) for row in rows])
    free = context - np.array([int(row.lengths.sum()) + len(row) for row in rows])
    padded = free > 0
    if (free < 0).any() or (count + padded > segments_per_row).any():
        raise ValueError(f"a row doesn't fit {context} slots in {segments_per_row} segments, padding included")

    # Segments in order: the pieces of a row, then its padding.
    slots = len(rows) * segments_per_row
    paddings_to = np.cumsum(padded)
    piece_slot = np.arange(len(pieces)) + np.repeat(paddings_to - padded, count)
    padding_slot = (np.cumsum(count) + paddings_to - 1)[padded]
    sizes = np.zeros(slots, dtype=np.int64)
    sizes[piece_slot] = pieces.lengths + 1
    sizes[padding_slot] = free[padded]
    cu_seqlens = np.zeros(slots + 1, dtype=np.int32)
    np.cumsum(sizes, out=cu_seqlens[1:])

    tokens = np.full(len(rows) * context, dataset.eod, dtype=np.int32)
    places = cu_seqlens[piece_slot] + 1
    text = text or Text(dataset)
    epochs = [0] * len(pieces) if pieces.epochs is None else pieces.epochs.tolist()
    found = zip(pieces.docs.tolist(), epochs, pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
    for number, ((doc, epoch, start, length), place) in enumerate(zip(found, places.tolist(), strict=True), start=1):
        tokens[place : place + length] = text.tokens(doc, epoch, start, start + length)
        if number % RELEASE_EVERY == 0 or number == len(pieces):
            dataset.release()  # else all of the text would count as this process's memory in the end

    if not 0 <= int(tokens.min()) <= int(tokens.max()) < dataset.vocab_size:  # a GPU would only assert
        slot = np.flatnonzero((tokens < 0) | (tokens >= dataset.vocab_size))[0]
        raise dataset.foreign_token(int(pieces.docs[np.searchsorted(places, slot, side="right") - 1]))

    # Inside a segment the target is the token after; its last slot looks past the piece.
    targets = np.full_like(tokens, IGNORE)
    targets[:-1] = tokens[1:]
    ends = pieces.starts + pieces.lengths == text.lengths[pieces.docs]
    targets[cu_seqlens[piece_slot + 1] - 1] = np.where(ends, dataset.eod, IGNORE)
    for begin, end in zip(cu_seqlens[padding_slot].tolist(), cu_seqlens[padding_slot + 1].tolist(), strict=True):
        targets[begin:end] = IGNORE

    docs = np.full(slots, -1, dtype=np.int64)
    docs[piece_slot] = pieces.docs
    starts = np.zeros(slots, dtype=np.int64)
    starts[piece_slot] = pieces.starts
    return Batch(tokens, targets, cu_seqlens, docs, starts, context)
