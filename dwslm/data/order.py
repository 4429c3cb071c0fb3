"""The order of the text, as a function: keyed permutations and each source's endless stream of pieces.

Nothing here has a state that matters. A shuffle is a sort by a keyed hash, so any place of any epoch can be
asked for directly, and a resumed run reads on where it was without replaying anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1


def hash64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 output function (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195), elementwise.

    It is a bijection of 64-bit integers: different values never collide.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_key(*words: int) -> int:
    """One 64-bit key from several integers, of which only the low 64 bits count; their order matters."""
    key = 0
    for word in words:
        key = int(hash64(np.array([(key ^ word) & MASK64], dtype=np.uint64))[0])
    return key


def permutation(key: int, n: int) -> NDArray[np.int64]:
    """The permutation of 0 .. n-1 that belongs to the key, int64 [n].

    The sort keys are distinct (see `hash64`), so the result doesn't depend on the sorting algorithm or the
    machine.
    """
    return np.argsort(hash64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)))


@dataclass(frozen=True)
class Pieces:
    """Stretches of documents: text tokens `starts .. starts + lengths` of document `docs`. Three int64 arrays
    [n]."""

    docs: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    epochs: NDArray[np.int64] | None = None
    """Which reading of its source each piece is of, int64 [n]; None where it makes no difference."""

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, index: NDArray[np.int64] | slice) -> "Pieces":
        epochs = None if self.epochs is None else self.epochs[index]
        return Pieces(self.docs[index], self.starts[index], self.lengths[index], epochs)


def join_pieces(parts: Sequence[Pieces]) -> Pieces:
    """One after the other; there must be at least one part. Epochs are kept if all parts have them."""
    epochs = [part.epochs for part in parts if part.epochs is not None]
    return Pieces(
        np.concatenate([part.docs for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate(epochs) if len(epochs) == len(parts) else None,
    )


def no_pieces() -> Pieces:
    """None of any document."""
    return Pieces(*(np.empty(0, dtype=np.int64) for _ in range(4)))


def merge_adjacent(pieces: Pieces) -> Pieces:
    """Put pieces that follow each other in their document, and in the list, back together."""
    if len(pieces) == 0:
        return pieces
    ends = pieces.starts + pieces.lengths
    begins = np.ones(len(pieces), dtype=bool)
    begins[1:] = (pieces.docs[1:] != pieces.docs[:-1]) | (pieces.starts[1:] != ends[:-1])
    first = np.flatnonzero(begins)
    epochs = None if pieces.epochs is None else pieces.epochs[first]
    return Pieces(pieces.docs[first], pieces.starts[first], np.add.reduceat(pieces.lengths, first), epochs)


class SourceOrder:
    """One source, or a slice of it, as an endless stream: all its documents in a keyed order, then all of them
    in another, and so on.

    A document is cut into pieces of `longest` text tokens, the last one shorter. A position in the stream
    counts text tokens, so an epoch is exactly `epoch_tokens` long and shares of the stream are shares of text
    tokens. A slice keeps its documents in the order that they have in the whole source, so that a position of
    the source is one of the slice as well.

    Args:
        docs: the documents that have text, int64 [n], as indices into the dataset.
        tokens: their text tokens, int64 [n], all positive.
        key: decides the orders.
        longest: text tokens in a whole piece.
        begin: position that is read from. Nothing before it is asked for, and a document that it lies in is
            cut from there on.
        places: for a slice, which of its source's documents these are, int64 [n], rising.
        out_of: for a slice, how many documents its source has.
    """

    def __init__(
        self,
        docs: NDArray[np.int64],
        tokens: NDArray[np.int64],
        *,
        key: int,
        longest: int,
        begin: int = 0,
        places: NDArray[np.int64] | None = None,
        out_of: int = 0,
    ) -> None:
        self.docs = docs
        self.tokens = tokens
        self.key = key
        self.longest = longest
        self.begin = begin
        self.epoch_tokens = int(tokens.sum())
        self._places, self._out_of = places, out_of
        # A window looks at one epoch, or at two where one ends, so two orders are enough to keep.
        self._orders: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Permuted indices into `docs`, int64 [n], and the text tokens before each place, int64 [n]."""
        if epoch not in self._orders:
            key = derive_key(self.key, epoch)
            if self._places is None:
                order = permutation(key, len(self.docs))
            else:
                number = np.full(self._out_of, -1, dtype=np.int64)
                number[self._places] = np.arange(len(self._places))
                order = number[permutation(key, self._out_of)]
                order = order[order >= 0]
            tokens = self.tokens[order]
            if len(self._orders) == 2:
                del self._orders[min(self._orders)]
            self._orders[epoch] = order, np.cumsum(tokens) - tokens
        return self._orders[epoch]

    def pieces(self, begin: int, end: int) -> Pieces:
        """The pieces whose first token lies at a position in [begin, end) of the stream, in stream order.

        Consecutive intervals share the stream out exactly: each piece belongs to the one interval it begins
        in.
        """
        parts = [no_pieces()]
        while begin < end:
            epoch, first = divmod(begin, self.epoch_tokens)
            stop = min(self.epoch_tokens, end - epoch * self.epoch_tokens)
            parts.append(self._pieces_in_epoch(epoch, first, stop))
            begin = epoch * self.epoch_tokens + stop
        return join_pieces(parts)

    def next_piece(self, position: int) -> int:
        """The first position from `position` on at which a piece begins: where reading has got to once all
        pieces before `position` were taken."""
        if self.epoch_tokens == 0:
            return position
        epoch, first = divmod(position, self.epoch_tokens)
        place, skip = self._place(epoch, first)
        order, offsets = self._order(epoch)
        cut = int(offsets[place]) + skip
        piece = cut + -(-(first - cut) // self.longest) * self.longest
        return epoch * self.epoch_tokens + min(piece, int(offsets[place] + self.tokens[order[place]]))

    def slice_position(self, position: int, part: "SourceOrder") -> int:
        """Where a slice of this stream stands when the stream itself is at `position`."""
        if self.epoch_tokens == 0 or part.epoch_tokens == 0:
            return 0
        epoch, first = divmod(position, self.epoch_tokens)
        order, offsets = self._order(epoch)
        read = np.clip(first - offsets, 0, self.tokens[order])
        return epoch * part.epoch_tokens + int(read[np.isin(self.docs[order], part.docs)].sum())

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        """The place of the document that holds a position of an epoch, and its tokens before `self.begin`."""
        offsets = self._order(epoch)[1]
        place = int(np.searchsorted(offsets, position, side="right")) - 1
        skip = self.begin - epoch * self.epoch_tokens - int(offsets[place])
        return place, max(0, skip)

    def _pieces_in_epoch(self, epoch: int, begin: int, end: int) -> Pieces:
        order, offsets = self._order(epoch)
        lo, skip = self._place(epoch, begin)
        hi = int(np.searchsorted(offsets, end, side="left"))
        index, offsets = order[lo:hi], offsets[lo:hi].copy()
        tokens = self.tokens[index]
        offsets[0] += skip
        tokens[0] -= skip

        # Of the first document only the pieces from `begin` on, of the last one only those before `end`.
        first = np.zeros(hi - lo, dtype=np.int64)
        stop = -(-tokens // self.longest)
        first[0] = -(-(begin - offsets[0]) // self.longest)
        stop[-1] = min(stop[-1], -(-(end - offsets[-1]) // self.longest))
        count = np.maximum(stop - first, 0)

        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)
        starts = number * self.longest
        lengths = np.minimum(np.repeat(tokens, count) - starts, self.longest)
        starts[: count[0]] += skip
        return Pieces(np.repeat(self.docs[index], count), starts, lengths, np.full(len(starts), epoch))
