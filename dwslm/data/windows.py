"""Rows of one shape: windows of text, packed and shuffled, one after the other.

A leg is a stretch of the run in which rows have one context and the text flows in the same streams. It is cut into
windows of about `window_tokens` text tokens. Window k takes from every stream its next stretch, as long as its
share says; its pieces are packed into rows, and the rows shuffled. Which window a row is in follows from a running
count of rows, so any row can be asked for directly.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwslm.data.fill import best_fit, concatenate
from dwslm.data.order import (
    Pieces,
    SourceOrder,
    derive_key,
    hash64,
    join_pieces,
    merge_adjacent,
    no_pieces,
    permutation,
)
from dwslm.data.row_index import RowIndex

DOCUMENTS, SEGMENTS, ROWS, OFFSETS = 1, 2, 3, 5  # what a key is for, so that no two shuffles share one
QUOTA_SCALE = 1 << 16  # quotas are whole multiples of 1 / QUOTA_SCALE text tokens a window
KEPT_WINDOWS = 4


@dataclass(frozen=True)
class Window:
    """The rows of one window: row r is the pieces from bounds[r] to bounds[r + 1]."""

    pieces: Pieces
    bounds: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class Origin:
    """Where a leg takes over."""

    begin: list[int]
    """Position of each stream."""
    carried: Pieces
    """Pieces that the leg before had packed into rows which are not served; they go into the first window."""


class Leg:
    """The rows of one leg, numbered from 0.

    Args:
        context, segments_per_row, fill, window_tokens: as in `PackingSettings`.
        seed: decides the shuffles, with `salt` where this is not the first leg.
        phase_rows: row from which each phase holds, from the first window that starts there or later; the first is 0.
        quotas: text tokens a window times QUOTA_SCALE, int64 [phases, streams].
        rows: how many rows are served; the count may go beyond them to the end of a window.
        decides: everything else that decides the rows, as JSON-able data.
        make: gives the streams from their origin; called when the first row is wanted.
        stream_of: which stream each of some documents is in.
        cache_dir: folder for the running count of rows, or None.
    """

    def __init__(
        self,
        *,
        context: int,
        segments_per_row: int,
        fill: str,
        window_tokens: int,
        seed: int,
        salt: int,
        phase_rows: list[int],
        quotas: NDArray[np.int64],
        rows: int,
        decides: dict[str, Any],
        make: Callable[[], tuple[list[SourceOrder], Origin]],
        stream_of: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        cache_dir: Path | None,
    ) -> None:
        self.context, self.segments_per_row, self.fill = context, segments_per_row, fill
        self.window_tokens, self.seed, self._salt = window_tokens, seed, [salt] if salt else []
        self.phase_rows, self.quotas, self.rows = phase_rows, quotas, rows
        self._decides, self._make, self._stream_of = decides, make, stream_of
        self.key = self.key_of(len(phase_rows))
        self.index = RowIndex(self.key, cache_dir)
        self._windows: dict[int, Window] = {}
        self._streams: list[SourceOrder] | None = None
        self._origin = Origin([], no_pieces())

    def key_of(self, phases: int) -> str:
        """Hex digest of all that decides the rows, as far as only the first so many phases have begun."""
        decides = self._decides | {
            "packing": [self.context, self.segments_per_row, self.fill, self.window_tokens],
            "phase_rows": self.phase_rows[:phases],
            "quotas": self.quotas[:phases].tolist(),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def begun(self, rows: int) -> int:
        """How many phases the first so many rows are of; `rows` is 1 or more, and is counted to.

        A phase begins with a window, so one that no window begins in has no row, though its own row was passed.
        """
        passed = sum(row < rows for row in self.phase_rows)
        if passed > 1:
            self.extend(rows, None)
            while self.index.starts[np.searchsorted(self.index.starts, self.phase_rows[passed - 1])] >= rows:
                passed -= 1
        return passed

    @property
    def streams(self) -> list[SourceOrder]:
        """The streams from this leg's origin on."""
        if self._streams is None:
            self._streams, self._origin = self._make()
        return self._streams

    @property
    def origin(self) -> Origin:
        """Where this leg takes over from the one before."""
        assert self.streams
        return self._origin

    def get(self, first: int, count: int) -> list[Pieces]:
        """Rows first .. first + count, each as its pieces from left to right."""
        self.extend(first + count, None)
        rows: list[Pieces] = []
        row = first
        while row < first + count:
            number = self.index.find(row)
            window = self.window(number)
            offset = row - int(self.index.starts[number])
            stop = min(window.rows, offset + first + count - row)
            bounds = window.bounds[offset : stop + 1].tolist()
            rows += [window.pieces[begin:end] for begin, end in pairwise(bounds)]
            row += stop - offset
        return rows

    def extend(self, until: int, progress: Callable[[int], None] | None) -> None:
        """Count rows up to `until`; `progress(rows counted)` is called now and then."""
        while self.index.rows < until:
            number = self.index.windows
            pieces = self._pieces(number, self.cursor(number), self.cursor(number + 1))
            if self.fill == "concat":
                rows = self._fill(number, pieces, self.segments_per_row)[2]
            else:  # however equal ones are ordered, there are as many rows
                rows = best_fit(pieces.lengths + 1, self.context, self.segments_per_row)[1]
            self.index.append(rows)
            if progress is not None:
                progress(min(self.index.rows, until))

    def cursor(self, window: int) -> NDArray[np.int64]:
        """Where every stream stands when a window begins, int64 [streams]; its predecessors have been counted.

        Quotas are summed over a phase before they are rounded down, so nothing drifts however long it is.
        """
        # A window belongs to the last phase that has begun when it begins.
        first = np.searchsorted(self.index.starts[:window], self.phase_rows, side="left")
        windows = np.diff(first, append=window)  # of each phase, before this window
        begin = np.array([stream.begin for stream in self.streams], dtype=np.int64)
        position: NDArray[np.int64] = begin + (windows[:, None] * self.quotas // QUOTA_SCALE).sum(axis=0)
        return position

    def cursor_at(self, row: int) -> NDArray[np.float64]:
        """Where every stream stands at a row, to a fraction of a window, float64 [streams]; counted as far."""
        if row == self.index.rows:
            return self.cursor(self.index.windows).astype(np.float64)
        number = self.index.find(row)
        before, after = self.cursor(number), self.cursor(number + 1)
        start, stop = self.index.starts[number : number + 2].tolist()
        return before + (after - before) * ((row - start) / (stop - start))

    def end(self) -> Origin:
        """Where the leg that follows takes over: behind all pieces that were taken, with those not served."""
        self.extend(self.rows, None)
        number = self.index.find(self.rows - 1)
        window = self.window(number)
        left = window.pieces[int(window.bounds[self.rows - int(self.index.starts[number])]) :]
        cursor = self.cursor(number + 1).tolist()
        return Origin(
            [s.next_piece(c) if s.epoch_tokens else 0 for s, c in zip(self.streams, cursor, strict=True)], left
        )

    def window(self, number: int) -> Window:
        """A window whose predecessors have been counted. A few are kept, since one serves several batches."""
        if number not in self._windows:
            if len(self._windows) == KEPT_WINDOWS:
                del self._windows[next(iter(self._windows))]
            self._windows[number] = self.pack(number, self.segments_per_row)
        return self._windows[number]

    def pack(self, number: int, max_segments: int) -> Window:
        """A window with any limit of segments, and its rows shuffled."""
        pieces = self._pieces(number, self.cursor(number), self.cursor(number + 1))
        pieces, row, rows = self._fill(number, pieces, max_segments)
        row = self._spread(number, pieces, row, rows)[row]
        bounds = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row, minlength=rows), out=bounds[1:])
        return Window(pieces[np.argsort(row, kind="stable")], bounds)

    def _spread(self, number: int, pieces: Pieces, row: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
        """A place for each row, int64 [rows]: a shuffle in which those of a stream are spread over the window.

        The rows that hold most of a stream follow each other at equal distances, in any order, the first one anywhere.
        A plain shuffle of long rows would serve shares that are off by percents in a part of the window.
        """
        shuffle = permutation(derive_key(self.seed, ROWS, number, *self._salt), rows)
        streams = len(self.quotas[0])
        held = np.bincount(row * streams + self._stream_of(pieces.docs), pieces.lengths, rows * streams)
        most = held.reshape(rows, streams).argmax(axis=1)
        by_stream = np.lexsort((shuffle, most))
        count = np.bincount(most, minlength=streams)
        rank = np.empty(rows, dtype=np.int64)
        rank[by_stream] = np.arange(rows) - np.repeat(np.cumsum(count) - count, count)
        key = derive_key(self.seed, OFFSETS, number, *self._salt)
        offset = (hash64(np.arange(streams, dtype=np.uint64) ^ np.uint64(key)) >> np.uint64(11)) * 2.0**-53
        order = np.lexsort((shuffle, (rank + offset[most]) / count[most]))
        place = np.empty(rows, dtype=np.int64)
        place[order] = np.arange(rows)
        return place

    def _pieces(self, number: int, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Pieces:
        """What the streams give between two cursors."""
        spans = zip(self.streams, begin.tolist(), end.tolist(), strict=True)
        parts = [stream.pieces(first, stop) for stream, first, stop in spans if first < stop]
        return join_pieces([self._origin.carried if number == 0 else no_pieces(), *parts])

    def _fill(self, number: int, pieces: Pieces, max_segments: int) -> tuple[Pieces, NDArray[np.int64], int]:
        """The pieces as they go into rows, the row of each, and the number of rows."""
        if self.fill == "concat":
            pieces = merge_adjacent(pieces)
        pieces = pieces[permutation(derive_key(self.seed, SEGMENTS, number, *self._salt), len(pieces))]
        if self.fill == "concat":
            stretch, start, lengths, row = concatenate(pieces.lengths, self.context, max_segments)
            epochs = None if pieces.epochs is None else pieces.epochs[stretch]
            pieces = Pieces(pieces.docs[stretch], pieces.starts[stretch] + start, lengths, epochs)
            return pieces, row, int(row[-1]) + 1 if len(row) else 0
        row, rows = best_fit(pieces.lengths + 1, self.context, max_segments)
        return pieces, row, rows


def padding_share(windows: Sequence[Window], context: int) -> float:
    """Slots of these windows' rows that hold neither text nor its eod, 0 if they have no rows."""
    used = sum(int(window.pieces.lengths.sum()) + len(window.pieces) for window in windows)
    slots = sum(window.rows for window in windows) * context
    return 1.0 - used / slots if slots else 0.0


def segments_of_rows(window: Window, context: int) -> NDArray[np.int64]:
    """Segments of each row, padding included, int64 [rows]."""
    pieces = np.diff(window.bounds)
    row = np.repeat(np.arange(window.rows), pieces)
    text = np.bincount(row, weights=window.pieces.lengths, minlength=window.rows)
    return pieces + (text + pieces < context)
