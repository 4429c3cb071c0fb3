"""Which 64-bit keys were seen before: ids that must be unique, hashes of texts that are wanted once.

Memory is bounded: `KeySet` holds at most `MAX_KEYS` in 512 MiB (and 256 MiB more for a moment, while it grows into
that); `repeated`, for keys that are on the disk already, needs a fixed amount whatever their number.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

_MAX_SLOTS = 1 << 26
MAX_KEYS = _MAX_SLOTS // 4 * 3
"""Keys that one `KeySet` can hold: 50 million documents, where 23B tokens of web text have about 30 million."""

_PASS_KEYS = 1 << 23  # keys that `repeated` sorts at a time


def text_hash(text: str) -> int:
    """64-bit hash of a text. Among 50 million texts two different ones share it with a chance of 1 in 15,000."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=b"text").digest(), "little")


class KeySet:
    """A growing set of 64-bit hashes in one flat table (8 bytes a slot, at most three quarters of them taken)."""

    def __init__(self, what: str = "documents"):
        self.what = what
        self._table = np.zeros(1 << 12, np.uint64)  # 0: a free slot
        self._taken = 0

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Add keys, [n] uint64.

        Returns:
            [n] bool: whether each was met for the first time, be it before or earlier in `keys`.

        Raises:
            ValueError: more than `MAX_KEYS`.
        """
        keys = np.maximum(keys.astype(np.uint64), np.uint64(1))
        unique, first = np.unique(keys, return_index=True)
        fresh = self._absent(unique)
        if self._taken + int(fresh.sum()) > MAX_KEYS:
            raise ValueError(
                f"more than {MAX_KEYS:,} {self.what} in one call of prepare; prepare in pieces (--piece 1/2, 2/2) "
                "and merge them"
            )
        while self._taken + int(fresh.sum()) > len(self._table) // 4 * 3:
            self._grow()
        self._insert(unique[fresh])
        new = np.zeros(len(keys), bool)
        new[first[fresh]] = True
        return new

    def _slots(self, keys: np.ndarray, step: int) -> np.ndarray:
        return ((keys ^ (keys >> np.uint64(32))) + np.uint64(step)) & np.uint64(len(self._table) - 1)

    def _absent(self, keys: np.ndarray) -> np.ndarray:
        absent = np.zeros(len(keys), bool)
        open_ = np.arange(len(keys))
        step = 0
        while len(open_):
            there = self._table[self._slots(keys[open_], step)]
            absent[open_[there == 0]] = True
            open_ = open_[(there != 0) & (there != keys[open_])]
            step += 1
        return absent

    def _insert(self, keys: np.ndarray) -> None:
        """Put in keys that are all different and not there yet."""
        self._taken += len(keys)
        step = 0
        while len(keys):
            slots = self._slots(keys, step)
            free = self._table[slots] == 0
            self._table[slots[free]] = keys[free]  # of several that want one slot the last gets it
            keys = keys[self._table[slots] != keys]
            step += 1

    def _grow(self) -> None:
        old = self._table
        self._table = np.zeros(len(old) * 2, np.uint64)
        self._taken = 0
        for part in np.array_split(old, max(len(old) >> 20, 1)):
            self._insert(part[part != 0])


def repeated(batches: Callable[[], Iterable[np.ndarray]], count: int) -> Iterator[np.ndarray]:
    """Where keys occur again, among any number of them.

    Args:
        batches: gives all keys in order, [n] uint64 at a time; called once for every 8 million of them.
        count: how many there are.

    Yields:
        positions of all occurrences of a key but its first, [n] int64; in no order.
    """
    passes = max(-(-count // _PASS_KEYS), 1)
    for number in range(passes):
        keys, places, before = [], [], 0
        for batch in batches():
            # By remainder of the high bits: any bits of a hash would do.
            mine = np.flatnonzero((batch >> np.uint64(32)) % np.uint64(passes) == number)
            keys.append(batch[mine])
            places.append(mine + before)
            before += len(batch)
        if keys:
            yield _later_ones(np.concatenate(keys), np.concatenate(places))


def _later_ones(keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    again = np.zeros(len(keys), bool)
    again[1:] = ordered[1:] == ordered[:-1]
    return places[order[again]]
