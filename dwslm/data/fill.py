"""Filling rows: best-fit decreasing, and plain concatenation.

A row has `context` slots. A segment of n text tokens takes n + 1 of them, since an eod opens it. A row holds
at most `max_segments` segments, and what is left of it at its end is one padding segment which counts as one
of them.
"""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


def best_fit(slots: NDArray[np.int64], context: int, max_segments: int) -> tuple[NDArray[np.int64], int]:
    """Best-fit decreasing: the largest segment first, each into the fullest row that still takes it.

    Rows are kept by their free slots, so the best fit for a segment of s slots is found by a binary search for s.
    Best-fit packing for training: arXiv:2404.10830.

    Args:
        slots: slots of each segment, int64 [n], each in 2 .. context. Equal ones are placed as given.

    Returns the row of each segment, int64 [n], and the number of rows.
    """
    order = np.argsort(-slots, kind="stable")
    sizes = slots[order]
    whole = int(np.count_nonzero(sizes == context))
    row_of = list(range(whole))  # a segment as long as a row needs no search
    segments = [1] * whole
    rows = whole

    open_free: list[int] = []  # the keys of `with_free`, rising
    with_free: dict[int, list[int]] = {}  # free slots -> rows with room for more than one further segment
    exact_only: dict[int, list[int]] = {}  # free slots -> rows whose next segment is the last: it must fill them
    for size in sizes[whole:].tolist():
        if size in exact_only:
            stack = exact_only[size]
            row, free = stack.pop(), 0
            if not stack:
                del exact_only[size]
        else:
            at = bisect_left(open_free, size)
            if at < len(open_free):
                free = open_free[at]
                stack = with_free[free]
                row = stack.pop()
                if not stack:
                    del with_free[free], open_free[at]
                free -= size
            else:
                row, free = rows, context - size
                rows += 1
                segments.append(0)
        row_of.append(row)
        segments[row] += 1
        if free < 2:  # no segment is that short
            continue
        if segments[row] < max_segments - 1:
            if free in with_free:
                with_free[free].append(row)
            else:
                with_free[free] = [row]
                insort(open_free, free)
        elif segments[row] < max_segments:
            exact_only.setdefault(free, []).append(row)

    rows_in_order = np.empty(len(slots), dtype=np.int64)
    rows_in_order[order] = row_of
    return rows_in_order, rows


def concatenate(
    lengths: NDArray[np.int64], context: int, max_segments: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Plain concatenation: one after the other, cut where a row ends; the rest opens the next row as a new
    segment.

    Args:
        lengths: text tokens of each stretch of text, int64 [n], positive, of any size.

    Returns four int64 arrays [segments]: the stretch that a segment is cut from, its first token in it, its
    text tokens, and its row.
    """
    cuts: list[tuple[int, int, int, int]] = []
    row, free, segments = 0, context, 0
    for stretch, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            taken = min(length - start, free - 1)
            last_but_padding = segments == max_segments - 1 and taken + 1 < free
            if taken < 1 or last_but_padding:
                row, free, segments = row + 1, context, 0
                continue
            cuts.append((stretch, start, taken, row))
            start += taken
            free -= taken + 1
            segments += 1
    table = np.array(cuts, dtype=np.int64).reshape(-1, 4)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy()
