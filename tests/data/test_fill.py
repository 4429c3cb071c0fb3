import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dwslm.data.fill import best_fit, concatenate


def best_fit_by_search(slots: list[int], context: int, max_segments: int) -> list[int]:
    """The same rule, by looking at every row for every segment."""
    row_of = [-1] * len(slots)
    free: list[int] = []
    segments: list[int] = []
    touched: list[int] = []
    for time, item in enumerate(sorted(range(len(slots)), key=lambda item: -slots[item])):
        size = slots[item]
        candidates = [
            # The fullest row; of equally full ones the one that could take no other, then the last one used.
            (free[row], segments[row] + 1 < max_segments, -touched[row], row)
            for row in range(len(free))
            if free[row] >= size and segments[row] + 1 + (free[row] > size) <= max_segments
        ]
        if candidates:
            row = min(candidates)[-1]
        else:
            row = len(free)
            free.append(context)
            segments.append(0)
            touched.append(0)
        row_of[item] = row
        free[row] -= size
        segments[row] += 1
        touched[row] = time
    return row_of


def test_best_fit_by_hand() -> None:
    # 6 opens row 0, 5 row 1 and 4 row 2; 3 fills row 1 to the brim, 2 row 0.
    rows, count = best_fit(np.array([2, 6, 3, 5, 4]), 8, 4)
    assert rows.tolist() == [0, 0, 1, 1, 2]
    assert count == 3


def test_the_last_segment_of_a_row_is_padding_unless_the_row_is_full() -> None:
    # Three segments a row: 4 + 2 leaves padding, and so the third has to be of exactly 2 slots.
    rows, count = best_fit(np.array([4, 2, 2]), 8, 3)
    assert (rows.tolist(), count) == ([0, 0, 0], 1)
    rows, count = best_fit(np.array([4, 2, 2]), 9, 3)
    assert (rows.tolist(), count) == ([0, 0, 1], 2)


@given(st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(2, n), max_size=60))),
       st.integers(2, 6))  # fmt: skip
def test_best_fit_equals_the_search(case: tuple[int, list[int]], max_segments: int) -> None:
    context, slots = case
    rows, count = best_fit(np.array(slots, dtype=np.int64), context, max_segments)
    assert rows.tolist() == best_fit_by_search(slots, context, max_segments)
    assert count == max(rows.tolist(), default=-1) + 1
    for row in range(count):
        held = [size for size, r in zip(slots, rows, strict=True) if r == row]
        assert sum(held) <= context
        assert len(held) + (sum(held) < context) <= max_segments


def test_concatenate_by_hand() -> None:
    # Rows of 6: [eod 3 tokens][eod 1], then the rest of the second stretch [eod 5], then [eod 1] and padding.
    stretch, start, length, row = concatenate(np.array([3, 7]), 6, 4)
    assert stretch.tolist() == [0, 1, 1, 1]
    assert start.tolist() == [0, 0, 1, 6]
    assert length.tolist() == [3, 1, 5, 1]
    assert row.tolist() == [0, 0, 1, 2]


def test_concatenate_leaves_a_single_slot_and_the_last_segment_to_padding() -> None:
    _, _, length, row = concatenate(np.array([4, 2]), 6, 4)  # one slot is left after [eod 4]
    assert (length.tolist(), row.tolist()) == ([4, 2], [0, 1])
    _, _, length, row = concatenate(np.array([1, 1, 1]), 8, 3)  # a third segment would leave no place for padding
    assert (length.tolist(), row.tolist()) == ([1, 1, 1], [0, 0, 1])
    _, _, length, row = concatenate(np.array([1, 1, 5]), 8, 3)  # but one that fills the row may be the third
    assert (length.tolist(), row.tolist()) == ([1, 1, 3, 2], [0, 0, 0, 1])


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(2, 20), st.integers(2, 6))
def test_concatenate_keeps_every_token_in_order(lengths: list[int], context: int, max_segments: int) -> None:
    stretch, start, length, row = concatenate(np.array(lengths, dtype=np.int64), context, max_segments)
    found = [(s, t) for s, a, n in zip(stretch, start, length, strict=True) for t in range(a, a + n)]
    assert found == [(s, t) for s, n in enumerate(lengths) for t in range(n)]
    assert (np.diff(row) >= 0).all()
    last = int(row[-1]) if len(row) else -1
    for r in range(last + 1):
        held = length[row == r] + 1
        free = context - int(held.sum())
        assert len(held) > 0 and free >= 0
        assert len(held) + (free > 0) <= max_segments
        # A row is left early only at the end, for a slot too small for a segment, or for want of segments.
        assert r == last or free <= 1 or len(held) == max_segments - 1
