from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dwslm.data.order import Pieces, SourceOrder, derive_key, hash64, merge_adjacent, permutation


def test_hash_is_splitmix64() -> None:
    # The first outputs of the reference generator for seed 1234567; its state grows by the golden ratio.
    states = np.array([1234567 + n * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for n in range(3)], dtype=np.uint64)
    assert hash64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 300))
def test_permutation_holds_every_number_once(key: int, n: int) -> None:
    assert sorted(permutation(key, n).tolist()) == list(range(n))


def test_permutations_are_even() -> None:
    # Each of the 24 permutations of four should come about 1,000 times (chi-squared, 23 degrees of freedom).
    counts: dict[tuple[int, ...], int] = {}
    for key in range(24_000):
        order = tuple(permutation(derive_key(7, key), 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 50  # p = 0.001


def test_keys_depend_on_each_word_and_their_order() -> None:
    keys = {derive_key(1, 2), derive_key(2, 1), derive_key(1), derive_key(1, 2, 0), derive_key(1, 3)}
    assert len(keys) == 5
    assert derive_key(-1) == derive_key((1 << 64) - 1)


def stream(source: SourceOrder, epochs: int) -> list[tuple[int, int, int, int]]:
    """(position, doc, start, length) of the pieces of some epochs, one by one."""
    pieces, position = [], 0
    for epoch in range(epochs):
        for index in permutation(derive_key(source.key, epoch), len(source.docs)).tolist():
            tokens = int(source.tokens[index])
            for start in range(0, tokens, source.longest):
                length = min(source.longest, tokens - start)
                pieces.append((position, int(source.docs[index]), start, length))
                position += length
    return pieces


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 9),
    st.lists(st.integers(0, 300), min_size=2, max_size=6),
)
def test_pieces_of_an_interval_begin_in_it(tokens: list[int], longest: int, cuts: list[int]) -> None:
    source = SourceOrder(np.arange(len(tokens)) * 3, np.array(tokens), key=5, longest=longest)
    cuts = sorted(min(cut, 4 * source.epoch_tokens) for cut in cuts)
    expected = stream(source, 4)
    for begin, end in pairwise(cuts):
        pieces = source.pieces(begin, end)
        found = list(zip(*(a.tolist() for a in (pieces.docs, pieces.starts, pieces.lengths)), strict=True))
        assert found == [piece[1:] for piece in expected if begin <= piece[0] < end]


def test_epochs_have_different_orders() -> None:
    source = SourceOrder(np.arange(50), np.full(50, 3), key=5, longest=8)
    first, second = source.pieces(0, 150), source.pieces(150, 300)
    assert first.docs.tolist() != second.docs.tolist()
    assert sorted(first.docs.tolist()) == sorted(second.docs.tolist())


def test_merge_adjacent() -> None:
    docs, starts, lengths = np.array([[4, 0, 5], [4, 5, 5], [7, 0, 5], [7, 10, 2], [4, 0, 5], [4, 0, 5]]).T
    merged = merge_adjacent(Pieces(docs, starts, lengths))
    assert merged.docs.tolist() == [4, 7, 7, 4, 4]
    assert merged.starts.tolist() == [0, 0, 10, 0, 0]
    assert merged.lengths.tolist() == [10, 5, 2, 5, 5]
