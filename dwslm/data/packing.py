"""The rows of a run as a function of their number.

The run is cut into windows of about `window_tokens` text tokens. Window k takes from every source the next
stretch of its stream, as long as the source's share says; its pieces are packed into rows, and the rows
shuffled. Which window a row is in follows from a running count of rows, so any row can be asked for directly,
and all that a run has to remember is how many rows it has used.

Everything follows from the seed, the dataset, the mixture and the packing: not from ranks, micro-batches,
prefetching or what was asked for before.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwslm.data.batch import IGNORE, Batch, assemble
from dwslm.data.fill import best_fit, concatenate
from dwslm.data.mixture import MixtureSettings, phase_shares
from dwslm.data.order import Pieces, SourceOrder, derive_key, join_pieces, merge_adjacent, permutation
from dwslm.data.row_index import RowIndex
from dwslm.data.shards import Dataset

__all__ = ["IGNORE", "Batch", "PackingSettings", "RowStream", "assemble"]

ORDER_VERSION = 1  # part of the key: raise it with any change to which text is in which row
DOCUMENTS, SEGMENTS, ROWS = 1, 2, 3  # what a key is for, so that no two shuffles share one
QUOTA_SCALE = 1 << 16  # quotas are whole multiples of 1 / QUOTA_SCALE text tokens a window
MANY_EPOCHS = 4  # up to about 4, repeated text is nearly as good as new: arXiv:2305.16264


@dataclass
class PackingSettings:
    """How text is laid out in rows."""

    context: int = 2048
    """Slots in a row: the longest segment, opening eod included."""

    segments_per_row: int = 32
    """The most segments in a row, padding included. It fixes the size of `cu_seqlens`; short documents cost
    padding when it is small."""

    fill: str = "best_fit"
    """`best_fit`: best-fit decreasing inside each window, whole pieces only. `concat`: one document after the
    other, cut where a row ends."""

    window_tokens: int = 1_048_576
    """Text tokens packed and shuffled together. Larger windows leave less padding and take more memory."""

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ValueError(f"packing context {self.context}: must be 2 or more, an eod and a token")
        if self.segments_per_row < 2:
            raise ValueError(f"packing segments_per_row {self.segments_per_row}: must be 2 or more, text and padding")
        if self.fill not in ("best_fit", "concat"):
            raise ValueError(f"packing fill {self.fill!r}: must be best_fit or concat")
        if self.window_tokens < self.context:
            raise ValueError(
                f"packing window_tokens {self.window_tokens}: must be at least the context, {self.context}"
            )


@dataclass(frozen=True)
class Window:
    """The rows of one window: row r is the pieces from bounds[r] to bounds[r + 1]."""

    pieces: Pieces
    bounds: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1


class RowStream:
    """All rows of a run, in order, from any place on. For one thread at a time.

    Args:
        dataset: the text.
        packing: how rows are filled.
        mixture: what each source gets; weights are shares of text tokens.
        seed: decides the orders.
        planned_tokens: length of the run in slots (rows x context); the starts of phases are fractions of it.
            A phase begins with the first window that starts at or after its row.
        cache_dir: folder for the running count of rows, or None.

    Attributes:
        key: hex digest of all that decides the rows; two streams with one key give the same rows.
        warnings: what the user should hear about the kept running count.

    Raises ValueError for a mixture that the dataset can't serve.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        packing: PackingSettings,
        mixture: MixtureSettings,
        seed: int,
        planned_tokens: int,
        cache_dir: Path | None,
    ) -> None:
        self.dataset = dataset
        self.packing = packing
        self.planned_rows = -(-planned_tokens // packing.context)
        if self.planned_rows < 1:
            raise ValueError(f"planned tokens {planned_tokens}: a run needs at least one row of {packing.context}")
        self.seed = seed

        tokens = dataset.docs["tokens"].astype(np.int64)
        source_of = np.asarray(dataset.docs["source"])
        self._sources: list[SourceOrder] = []
        for source in range(len(dataset.sources)):
            docs = np.flatnonzero((source_of == source) & (tokens > 0))
            key = derive_key(seed, DOCUMENTS, source)
            self._sources.append(SourceOrder(docs, tokens[docs], key=key, longest=packing.context - 1))
        self._doc_tokens = tokens

        totals = [source.epoch_tokens for source in self._sources]
        starts, shares = phase_shares(mixture, dataset.sources, totals)
        self.phase_starts = starts
        self._phase_rows = [math.ceil(start * self.planned_rows) for start in starts]
        # Text tokens per window, times QUOTA_SCALE: int64 [phases, sources].
        self._quotas = np.rint(shares * packing.window_tokens * QUOTA_SCALE).astype(np.int64)

        self.key = self._key(len(starts))
        self._index = RowIndex(self.key, cache_dir)
        self.warnings = self._index.warnings
        self._windows: dict[int, Window] = {}

    def key_until(self, row: int) -> str:
        """Hex digest of all that decides the rows before `row`: the key, without the phases that begin later.

        A run that goes on from `row` with another plan keeps its past if this stays the same.
        """
        return self._key(max(1, sum(start < row for start in self._phase_rows)))

    def rows(self, first: int, count: int) -> list[Pieces]:
        """Rows first .. first + count, each as its pieces from left to right."""
        assert first >= 0 and count >= 0
        self._extend(first + count, None)
        rows: list[Pieces] = []
        row = first
        while row < first + count:
            number = self._index.find(row)
            window = self._window(number)
            offset = row - int(self._index.starts[number])
            stop = min(window.rows, offset + first + count - row)
            bounds = window.bounds[offset : stop + 1].tolist()
            rows += [window.pieces[begin:end] for begin, end in pairwise(bounds)]
            row += stop - offset
        return rows

    def batch(self, first_row: int, rows: int) -> Batch:
        """Rows first_row .. first_row + rows with their text."""
        return self.assemble(self.rows(first_row, rows))

    def assemble(self, rows: list[Pieces]) -> Batch:
        """Rows that `rows` gave, with their text."""
        return assemble(self.dataset, rows, self.packing.context, self.packing.segments_per_row)

    def scored(self, rows: list[Pieces]) -> int:
        """Positions of these rows that have a loss, from their pieces alone."""
        pieces = join_pieces(rows)
        ends = pieces.starts + pieces.lengths == self._doc_tokens[pieces.docs]
        return int(pieces.lengths.sum() + np.count_nonzero(ends))

    def count_rows(self, until: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Count rows up to row `until` and keep the count; calls `progress(rows counted, until)` on the way.

        `rows` counts on by itself; doing it for the whole plan beforehand makes every later start instant.
        """
        self._extend(until, progress)
        self._index.save()

    def describe(self, sample_windows: int = 4) -> dict[str, Any]:
        """What the plan will serve, to be printed before a run.

        Padding and segments are measured on `sample_windows` windows from the start of each phase, and the
        tokens of a phase follow from them; the exact figures would need every window to be packed.

        Returns `planned_tokens` (slots), `rows`, `key`; `padding_share` of the slots, and
        `padding_share_unlimited`, what it would be if a row could have any number of segments;
        `segments_per_row_mean`, `_max` and `_limit`, padding included; `phases`, each with its start,
        first_row, rows, text_tokens, padding_share and sources; `sources` over the whole plan; and
        `warnings`. `sources` maps a name to its share of the text tokens, tokens and epochs.
        """
        phases: list[dict[str, Any]] = []
        cursor = np.zeros(len(self._sources), dtype=np.int64)
        served = np.zeros(len(self._sources))
        rows_sampled = np.zeros(0, dtype=np.int64)
        padded = padded_unlimited = 0.0
        ends = [*self._phase_rows[1:], self.planned_rows]
        for phase, (first_row, end) in enumerate(zip(self._phase_rows, ends, strict=True)):
            quota = self._quotas[phase]
            windows: list[Window] = []
            unlimited: list[Window] = []
            while len(windows) < sample_windows or not any(window.rows for window in windows):
                n = len(windows)
                span = cursor + n * quota // QUOTA_SCALE, cursor + (n + 1) * quota // QUOTA_SCALE
                windows.append(self._pack(n, *span, self.packing.segments_per_row))
                unlimited.append(self._pack(n, *span, self.packing.context))
            text = sum(int(window.pieces.lengths.sum()) for window in windows)
            slots = sum(window.rows for window in windows) * self.packing.context
            padding_share = self._padding_share(windows)
            rows_sampled = np.concatenate([rows_sampled, *(self._segments(window) for window in windows)])

            rows = end - first_row
            tokens = rows * self.packing.context * text / slots * quota / quota.sum()
            padded += rows / self.planned_rows * padding_share
            padded_unlimited += rows / self.planned_rows * self._padding_share(unlimited)
            phases.append(
                {
                    "start": self.phase_starts[phase],
                    "first_row": first_row,
                    "rows": rows,
                    "text_tokens": int(tokens.sum()),
                    "padding_share": padding_share,
                    "sources": self._by_source(tokens, quota / quota.sum()),
                }
            )
            cursor = cursor + tokens.astype(np.int64)
            served += tokens
        sources = self._by_source(served, served / served.sum())
        warnings = list(self.warnings)
        for name, figures in sources.items():
            if figures["epochs"] > MANY_EPOCHS:
                warnings.append(
                    f"source {name!r} is read {figures['epochs']:.1f} times in this plan; text repeated more "
                    f"than {MANY_EPOCHS} times teaches little: lower its weight or add text"
                )
        return {
            "planned_tokens": self.planned_rows * self.packing.context,
            "rows": self.planned_rows,
            "key": self.key,
            "padding_share": padded,
            "padding_share_unlimited": padded_unlimited,
            "segments_per_row_mean": float(rows_sampled.mean()),
            "segments_per_row_max": int(rows_sampled.max()),
            "segments_per_row_limit": self.packing.segments_per_row,
            "phases": phases,
            "sources": sources,
            "warnings": warnings,
        }

    def _by_source(self, tokens: NDArray[np.float64], shares: NDArray[np.float64]) -> dict[str, dict[str, float]]:
        return {
            name: {
                "share": float(shares[i]),
                "tokens": int(tokens[i]),
                "epochs": float(tokens[i]) / max(1, self._sources[i].epoch_tokens),
            }
            for i, name in enumerate(self.dataset.sources)
            if tokens[i] > 0
        }

    def _padding_share(self, windows: list[Window]) -> float:
        used = sum(int(window.pieces.lengths.sum()) + len(window.pieces) for window in windows)
        return 1.0 - used / (sum(window.rows for window in windows) * self.packing.context)

    def _segments(self, window: Window) -> NDArray[np.int64]:
        """Segments of each row, padding included, int64 [rows]."""
        pieces = np.diff(window.bounds)
        row = np.repeat(np.arange(window.rows), pieces)
        text = np.bincount(row, weights=window.pieces.lengths, minlength=window.rows)
        return pieces + (text + pieces < self.packing.context)

    def _key(self, phases: int) -> str:
        decides = {
            "version": ORDER_VERSION,
            "dataset": self.dataset.fingerprint,
            "seed": self.seed,
            "packing": asdict(self.packing),
            "phase_rows": self._phase_rows[:phases],
            "quotas": self._quotas[:phases].tolist(),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def _cursor(self, window: int) -> NDArray[np.int64]:
        """Where every source stands when a window begins: positions in their streams, int64 [sources].

        Quotas are summed over a phase before they are rounded down, so nothing drifts however long it is.
        """
        # A window belongs to the last phase that has begun when it begins.
        first = np.searchsorted(self._index.starts[:window], self._phase_rows, side="left")
        windows = np.diff(first, append=window)  # of each phase, before this window
        return (windows[:, None] * self._quotas // QUOTA_SCALE).sum(axis=0)

    def _extend(self, until: int, progress: Callable[[int, int], None] | None) -> None:
        while self._index.rows < until:
            self._index.append(self._window(self._index.windows).rows)
            if progress is not None:
                progress(min(self._index.rows, until), until)

    def _window(self, number: int) -> Window:
        """A window whose predecessors have been counted. A few are kept, since one serves several batches."""
        if number not in self._windows:
            if len(self._windows) == 4:
                del self._windows[next(iter(self._windows))]
            span = self._cursor(number), self._cursor(number + 1)
            self._windows[number] = self._pack(number, *span, self.packing.segments_per_row)
        return self._windows[number]

    def _pack(self, number: int, begin: NDArray[np.int64], end: NDArray[np.int64], max_segments: int) -> Window:
        """Pack what the sources give between two cursors, and shuffle the rows."""
        spans = zip(self._sources, begin.tolist(), end.tolist(), strict=True)
        pieces = join_pieces([source.pieces(first, stop) for source, first, stop in spans])
        context = self.packing.context
        if self.packing.fill == "concat":
            pieces = merge_adjacent(pieces)
        pieces = pieces[permutation(derive_key(self.seed, SEGMENTS, number), len(pieces))]
        if self.packing.fill == "concat":
            stretch, start, lengths, row = concatenate(pieces.lengths, context, max_segments)
            pieces = Pieces(pieces.docs[stretch], pieces.starts[stretch] + start, lengths)
            rows = int(row[-1]) + 1 if len(row) else 0
        else:
            row, rows = best_fit(pieces.lengths + 1, context, max_segments)
        row = permutation(derive_key(self.seed, ROWS, number), rows)[row]
        bounds = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row, minlength=rows), out=bounds[1:])
        return Window(pieces[np.argsort(row, kind="stable")], bounds)
