"""The order of the text, as a function: keyed permutations and each source's endless stream of pieces.

Nothing here has a state that matters. A shuffle is a sort by a keyed hash, so any place of any epoch can be
asked for directly, and a resumed run reads on where it was without replaying anything.
"""

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

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, index: NDArray[np.int64] | slice) -> "Pieces":
        return Pieces(self.docs[index], self.starts[index], self.lengths[index])


def join_pieces(parts: list[Pieces]) -> Pieces:
    """One after the other; there must be at least one part."""
    return Pieces(
        np.concatenate([part.docs for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def merge_adjacent(pieces: Pieces) -> Pieces:
    """Put pieces that follow each other in their document, and in the list, back together."""
    if len(pieces) == 0:
        return pieces
    ends = pieces.starts + pieces.lengths
    begins = np.ones(len(pieces), dtype=bool)
    begins[1:] = (pieces.docs[1:] != pieces.docs[:-1]) | (pieces.starts[1:] != ends[:-1])
    first = np.flatnonzero(begins)
    return Pieces(pieces.docs[first], pieces.starts[first], np.add.reduceat(pieces.lengths, first))


class SourceOrder:
    """One source as an endless stream: all its documents in a keyed order, then all of them in another, and
    so on.

    A document is cut into pieces of `longest` text tokens, the last one shorter. A position in the stream
    counts text tokens, so an epoch is exactly `epoch_tokens` long and shares of the stream are shares of text
    tokens.

    Args:
        docs: the source's documents that have text, int64 [n], as indices into the dataset.
        tokens: their text tokens, int64 [n], all positive.
        key: decides the orders.
        longest: text tokens in a whole piece.
    """

    def __init__(self, docs: NDArray[np.int64], tokens: NDArray[np.int64], *, key: int, longest: int) -> None:
        self.docs = docs
        self.tokens = tokens
        self.key = key
        self.longest = longest
        self.epoch_tokens = int(tokens.sum())
        # A window looks at one epoch, or at two where one ends, so two orders are enough to keep.
        self._orders: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Permuted indices into `docs`, int64 [n], and the text tokens before each place, int64 [n]."""
        if epoch not in self._orders:
            order = permutation(derive_key(self.key, epoch), len(self.docs))
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
        parts = [Pieces(*(np.empty(0, dtype=np.int64) for _ in range(3)))]
        while begin < end:
            epoch, first = divmod(begin, self.epoch_tokens)
            stop = min(self.epoch_tokens, end - epoch * self.epoch_tokens)
            parts.append(self._pieces_in_epoch(epoch, first, stop))
            begin = epoch * self.epoch_tokens + stop
        return join_pieces(parts)

    def _pieces_in_epoch(self, epoch: int, begin: int, end: int) -> Pieces:
        order, offsets = self._order(epoch)
        lo = int(np.searchsorted(offsets, begin, side="right")) - 1  # the document that holds token `begin`
        hi = int(np.searchsorted(offsets, end, side="left"))
        index, offsets = order[lo:hi], offsets[lo:hi]
        tokens = self.tokens[index]

        # Of the first document only the pieces from `begin` on, of the last one only those before `end`.
        first = np.zeros(hi - lo, dtype=np.int64)
        stop = -(-tokens // self.longest)
        first[0] = -(-(begin - offsets[0]) // self.longest)
        stop[-1] = min(stop[-1], -(-(end - offsets[-1]) // self.longest))
        count = np.maximum(stop - first, 0)

        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)
        starts = number * self.longest
        lengths = np.minimum(np.repeat(tokens, count) - starts, self.longest)
        return Pieces(np.repeat(self.docs[index], count), starts, lengths)
