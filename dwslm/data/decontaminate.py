"""Held-out text that stands in training text too, found by runs of 13 words.

A word is a run of letters, marks and digits, case folded; what stands between words counts for nothing. In scripts
that are written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan) each character is a word. Two
runs of 13 words are the same if 64-bit hashes of them are. The number 13 is that of GPT-3's contamination study
(Brown et al., arXiv 2005.14165, appendix C).
"""

import unicodedata
from functools import cache
from pathlib import Path

import numpy as np

from dwslm.data.order import hash64

WORDS = 13
_MAX_NGRAMS = 1 << 26  # 512 MiB of hashes
_CODE_POINTS = 0x32000  # no letters beyond
_BLOCK = 1 << 20  # characters of a text that are looked at together
_UNSPACED = [
    (0x0E00, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x31FFF),
]  # fmt: skip


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each character is (0 nothing, 1 part of a word, 2 a word), its value, and factors of places in a word."""
    kinds = np.array([unicodedata.category(chr(c))[0] in "LMN" for c in range(_CODE_POINTS)], np.uint8)
    for first, last in _UNSPACED:
        kinds[first : last + 1] *= 2
    places = hash64(np.arange(1 << 48, (1 << 48) + 64, dtype=np.uint64)) | np.uint64(1)
    return kinds, hash64(np.arange(_CODE_POINTS, dtype=np.uint64)), places


def _words(text: str) -> np.ndarray:
    """Hashes of the words of a text, [words] uint64."""
    kinds, values, factors = _tables()
    characters = np.frombuffer(text.casefold().encode("utf-32-le"), "<u4")
    characters = np.minimum(characters, _CODE_POINTS - 1)
    kind = kinds[characters]
    start = (kind == 2) | ((kind == 1) & np.r_[True, kind[:-1] != 1])
    used = kind != 0
    starts = np.flatnonzero(start[used])
    if not len(starts):
        return np.zeros(0, np.uint64)
    lengths = np.diff(starts, append=int(used.sum()))
    places = np.arange(int(used.sum())) - np.repeat(starts, lengths)
    letters = values[characters[used]] * factors[np.minimum(places, len(factors) - 1)]
    return hash64(np.add.reduceat(letters, starts))


def ngrams(text: str) -> np.ndarray:
    """Hashes of all runs of 13 words of a text, [max(words - 12, 0)] uint64, in order."""
    factors = _tables()[2]
    # In blocks, or a large document would need a hundred times its size. A word on an edge becomes two.
    parts = [_words(text[at : at + _BLOCK]) for at in range(0, len(text), _BLOCK)]
    words = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.uint64)])
    count = len(words) - WORDS + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    total = np.zeros(count, np.uint64)
    for place in range(WORDS):
        total += words[place : place + count] * factors[place]
    return hash64(total)


class HeldOutRuns:
    """The runs of 13 words of the held-out text, on disk so that all workers share one copy in memory."""

    def __init__(self, folder: Path):
        self._sorted = np.load(folder / "held_out.npy", mmap_mode="r", allow_pickle=False)
        self._bits = np.load(folder / "held_out_bits.npy", mmap_mode="r", allow_pickle=False)

    def count(self, text: str) -> tuple[int, int]:
        """How many of a text's runs of 13 words are held out, and how many it has."""
        found = ngrams(text)
        low = found & np.uint64(len(self._bits) * 8 - 1)
        maybe = found[self._bits[low >> np.uint64(3)] >> (low & np.uint64(7)).astype(np.uint8) & 1 == 1]
        at = np.searchsorted(self._sorted, maybe)
        return int((self._sorted[np.minimum(at, len(self._sorted) - 1)] == maybe).sum()), len(found)


def write_runs(folder: Path, parts: list[np.ndarray]) -> int:
    """Write the files that `HeldOutRuns` reads; returns how many different runs there are."""
    runs = np.unique(np.concatenate([*parts, np.zeros(1, np.uint64)]))  # one that no text has, or none would be there
    bits = np.zeros((1 << max(20, (16 * len(runs) - 1).bit_length())) // 8, np.uint8)
    low = np.sort(runs & np.uint64(len(bits) * 8 - 1))
    places, first = np.unique(low >> np.uint64(3), return_index=True)
    bits[places] = np.bitwise_or.reduceat(np.uint8(1) << (low & np.uint64(7)).astype(np.uint8), first)
    np.save(folder / "held_out.npy", runs, allow_pickle=False)
    np.save(folder / "held_out_bits.npy", bits, allow_pickle=False)
    return len(runs) - 1


class RunCollector:
    """Gathers the runs of many texts, each once, in bounded memory."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._waiting = 0

    def add(self, text: str) -> None:
        """Add a text's runs.

        Raises:
            ValueError: more than the 67 million that are held in memory.
        """
        self._parts.append(ngrams(text))
        self._waiting += len(self._parts[-1])
        if self._waiting > _MAX_NGRAMS // 8:
            self._parts = [self.runs()]
            self._waiting = 0
            if len(self._parts[0]) > _MAX_NGRAMS:
                raise ValueError(
                    f"decontaminate: the held-out text has more than {_MAX_NGRAMS:,} runs of {WORDS} words (about "
                    "400 MB of text); hold out less"
                )

    def runs(self) -> np.ndarray:
        """All runs so far, sorted, each once."""
        return np.unique(np.concatenate(self._parts)) if self._parts else np.zeros(0, np.uint64)
