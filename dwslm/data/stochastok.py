"""StochasTok: training text whose tokens are now and then split, so that a model meets the letters inside them.

The method of arXiv:2506.01687: again and again a token of the document, drawn uniformly among those that can be
split, is replaced by two vocabulary entries whose bytes join to its own, drawn uniformly among all such pairs.
A part may be split again, down to single bytes. The text stays the same and the vocabulary too. It is for
training alone: scoring always reads the tokenizer's own tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer

from dwslm.data.order import derive_key, hash64
from dwslm.data.tokenizer import _byte_alphabet, token_bytes

PROPORTION = 0.1  # splits per token, as in the paper

FIRST, SECOND, CHOICE = np.uint64(1), np.uint64(2), np.uint64(3)  # what a node's key is hashed on for


@dataclass
class StochasTokSettings:
    """Splitting tokens of the training text at random (StochasTok, arXiv:2506.01687)."""

    enabled: bool = False
    """Whether training text is split. Scoring never splits."""
    proportion: float | None = None
    """Splits per token of a document; null for the paper's 0.1, which makes a document of 1,000 tokens one of 1,100 with
    the same text. Refused where `enabled` is not set, since it would change nothing."""

    def __post_init__(self) -> None:
        if self.enabled and self.proportion is not None and not 0 < self.proportion < float("inf"):
            raise ValueError(
                f"data.stochastok.proportion={self.proportion}: must be above 0 and finite; for text as the tokenizer gives it, "
                "leave out both it and data.stochastok.enabled"
            )
        if not self.enabled and self.proportion:
            raise ValueError(
                f"data.stochastok.proportion={self.proportion} has no effect without data.stochastok.enabled=true"
            )

    @property
    def splits_per_token(self) -> float:
        """What text is split with: 0 where it is not."""
        if not self.enabled:
            return 0.0
        return PROPORTION if self.proportion is None else self.proportion


@dataclass(frozen=True)
class SplitTable:
    """Every way to split a token in two vocabulary entries; those of token t are rows starts[t] .. starts[t + 1].

    Token t has none if it is special or a single byte, and at least one otherwise. A vocabulary of 32,768 has
    about 60 thousand rows, 0.8 MB in all.
    """

    starts: NDArray[np.int32]
    """[vocab_size + 1]"""
    first: NDArray[np.int32]
    """[splits], the left part"""
    second: NDArray[np.int32]
    """[splits], the right part"""
    bytes: NDArray[np.int32]
    """[vocab_size], bytes of text of each token, 0 for special tokens"""


def split_table(tokenizer: Tokenizer) -> SplitTable:
    """The splits of a byte-level tokenizer, in the order of the tokens and then from left to right.

    Raises:
        ValueError: the tokenizer is not byte-level, or has an entry of several bytes without a split, so that
            its text could not be brought down to bytes. BPE has none: the merge that made an entry is a split.
    """
    lengths = token_bytes(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    letter_of = {byte: letter for letter, byte in _byte_alphabet().items()}
    spelling: dict[int, str] = {}  # in the byte alphabet, a letter a byte
    for entry, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token not in added:
            spelling[token] = entry
        elif lengths[token]:
            spelling[token] = "".join(letter_of[byte] for byte in entry.encode("utf-8"))
    token_of = {entry: token for token, entry in spelling.items()}

    starts = np.zeros(len(lengths) + 1, np.int32)
    first: list[int] = []
    second: list[int] = []
    for token in range(len(lengths)):
        entry = spelling.get(token, "")
        for cut in range(1, len(entry)):
            left, right = token_of.get(entry[:cut]), token_of.get(entry[cut:])
            if left is not None and right is not None:
                first.append(left)
                second.append(right)
        starts[token + 1] = len(first)
        if len(entry) > 1 and starts[token] == starts[token + 1]:
            raise ValueError(
                f"entry {entry!r} (id {token}) of the tokenizer is not two other entries joined, so text can't be "
                "split down to bytes: use a BPE tokenizer, or leave out data.stochastok.enabled, and "
                "data.stochastok.proportion with it"
            )
    return SplitTable(starts, np.array(first, np.int32), np.array(second, np.int32), lengths)


def expanded_length(tokens: ArrayLike, byte_count: ArrayLike, proportion: float) -> NDArray[np.int64]:
    """Tokens of a document after its splits: proportion * tokens more, rounded down, and never more than its bytes.

    Args:
        tokens, byte_count: of each document, of any one shape; the document table of a dataset has them.
    """
    tokens = np.asarray(tokens, np.int64)
    return np.minimum(tokens + np.floor(tokens * proportion).astype(np.int64), np.asarray(byte_count, np.int64))


def expand(tokens: NDArray[np.integer], target: int, table: SplitTable, seed: int) -> NDArray[np.int32]:
    """A document's tokens after target - len(tokens) random splits. Special tokens stay as they are.

    The same arguments give the same result on every machine. Time and memory are linear in the document's bytes.

    To draw the token of each split uniformly from the current list is the same as to give each token that can be
    split a clock of its own, with exponential times, and to split whatever rings next: clocks have no memory, so
    parts start anew. With exp(-time), a token is a uniform number, and a part its parent's number times another
    uniform one. The splits made are those with the largest numbers, which never takes a part without its parent.
    So whole generations are drawn at once, with products alone, which round the same everywhere.

    Args:
        tokens: [n], ids of the table's vocabulary.
        target: how many tokens to give, from n to the document's bytes (`expanded_length`).
        seed: any integer; give each document and epoch its own.

    Returns:
        int32 [target].

    Raises:
        ValueError: fewer tokens asked for than there are, or more than can be had.
    """
    splits = target - len(tokens)
    if splits == 0:
        return np.asarray(tokens, np.int32)
    widths = np.maximum(table.bytes[tokens], 1)  # a special token has no bytes, but needs its place
    ends = np.cumsum(widths, dtype=np.int64)
    most = int(ends[-1]) if len(tokens) else 0
    if not 0 < splits <= most - len(tokens):
        raise ValueError(f"{len(tokens)} tokens can't be split into {target}: give {len(tokens)} to {most}")

    floor = -1.0  # the number of the last split to be made; below all numbers while fewer splits are known
    key = hash64(np.arange(len(tokens), dtype=np.uint64) ^ np.uint64(derive_key(seed)))
    nodes = _Nodes(key, _uniform(key), np.asarray(tokens, np.int32), ends - widths).splittable(table)
    generations: list[_Splits] = []
    while len(nodes.key):
        numbers = np.concatenate([*(generation.number for generation in generations), nodes.number])
        if len(numbers) >= splits:
            floor = np.partition(numbers, len(numbers) - splits)[len(numbers) - splits]
        parents = nodes[nodes.number >= floor]
        generations.append(parents.split(table))
        nodes = parents.parts(generations[-1]).splittable(table)

    # Place every token at its first byte; parts overwrite their parents. Of splits with the same number, those of
    # earlier generations come first.
    place = np.full(most, -1, np.int32)
    place[ends - widths] = tokens
    ties = splits - sum(int(np.count_nonzero(generation.number > floor)) for generation in generations)
    for generation in generations:
        made = generation.number > floor
        tied = np.flatnonzero(generation.number == floor)[:ties]
        made[tied] = True
        ties -= len(tied)
        place[generation.offset[made]] = generation.left[made]
        place[generation.between[made]] = generation.right[made]
    expanded = place[place >= 0]
    assert len(expanded) == target, (len(expanded), target)
    return expanded


@dataclass(frozen=True)
class _Splits:
    """Splits of tokens that begin at byte `offset` into `left` and `right`, which begins at byte `between`."""

    number: NDArray[np.float64]
    offset: NDArray[np.int64]
    left: NDArray[np.int32]
    between: NDArray[np.int64]
    right: NDArray[np.int32]


@dataclass(frozen=True)
class _Nodes:
    """Tokens that may come to be split: each with a key of its own, its number, and the byte where it begins."""

    key: NDArray[np.uint64]
    number: NDArray[np.float64]
    token: NDArray[np.int32]
    offset: NDArray[np.int64]

    def __getitem__(self, index: NDArray[np.bool_]) -> "_Nodes":
        return _Nodes(self.key[index], self.number[index], self.token[index], self.offset[index])

    def splittable(self, table: SplitTable) -> "_Nodes":
        return self[table.bytes[self.token] > 1]

    def split(self, table: SplitTable) -> _Splits:
        """A split of each, drawn uniformly among its token's."""
        start = table.starts[self.token]
        count = (table.starts[self.token + 1] - start).astype(np.uint64)
        draw = hash64(self.key ^ CHOICE) >> np.uint64(32)
        pair = start + (draw * count >> np.uint64(32)).astype(np.int32)
        left = table.first[pair]
        return _Splits(self.number, self.offset, left, self.offset + table.bytes[left], table.second[pair])

    def parts(self, splits: _Splits) -> "_Nodes":
        """The two tokens of each split, all left ones first."""
        key = hash64(np.concatenate([self.key ^ FIRST, self.key ^ SECOND]))
        return _Nodes(
            key,
            np.concatenate([self.number, self.number]) * _uniform(key),
            np.concatenate([splits.left, splits.right]),
            np.concatenate([splits.offset, splits.between]),
        )


def _uniform(key: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from the upper 53 bits of keys."""
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53
