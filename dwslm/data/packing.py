"""The rows of a run as a function of their number.

The run is cut into legs: the rungs of the context ladder, and what a branch began with (`windows.Leg` says how rows are
made inside of one). Rows are numbered through the whole run, and all that a run has to remember is how many rows it has
used.

Everything follows from the seed, the dataset, the mixture and the packing: not from ranks, micro-batches,
prefetching or what was asked for before.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwslm.data.batch import IGNORE, Batch, assemble
from dwslm.data.mixture import MixtureSettings, Past
from dwslm.data.order import Pieces, SourceOrder, derive_key, join_pieces, no_pieces
from dwslm.data.packing_settings import PackingSettings, Rung
from dwslm.data.shards import Dataset
from dwslm.data.shares import Stream, check_sources, stream_of, stream_table
from dwslm.data.stretches import make_stretches
from dwslm.data.text import Text
from dwslm.data.windows import DOCUMENTS, QUOTA_SCALE, Leg, Origin

__all__ = ["IGNORE", "Batch", "PackingSettings", "RowStream", "Rung", "assemble"]

ORDER_VERSION = 2  # part of the key: raise it with any change to which text is in which row
Progress = Callable[[int, int], None]


class RowStream:
    """All rows of a run, in order, from any place on. For one thread at a time.

    Args:
        dataset: the text.
        packing: how rows are filled.
        mixture: what each source gets; weights are shares of text tokens.
        seed: decides the orders.
        planned_tokens: length of the run in slots (rows x context); the starts of phases are fractions of it.
            A phase begins with the first window that starts at or after its row.
        step_tokens: slots of a step, a multiple of every context; rungs begin with one. Needed with a ladder.
        past: mixtures that the rows of a branch's beginning were made with, in order.
        cache_dir: folder for the running count of rows, or None.
        text: the documents as they are to be read; None takes them as they are stored.

    Attributes:
        key: hex digest of all that decides the rows; two streams with one key give the same rows.
        legs: stretches of rows of one shape; first_rows: the row that each begins with.

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
        step_tokens: int | None = None,
        past: Sequence[Past] = (),
        text: Text | None = None,
    ) -> None:
        self.dataset, self.packing, self.mixture, self.seed = dataset, packing, mixture, seed
        self.text = text or Text(dataset)
        self.planned_tokens = planned_tokens
        self._step_tokens, self._past, self._cache_dir = step_tokens, past, cache_dir
        check_sources(mixture, dataset.sources)

        stretches = make_stretches(dataset, packing, mixture, past, planned_tokens, step_tokens)
        self.planned_rows = stretches[-1].until_row
        self.first_rows = [stretch.first_row for stretch in stretches]
        self.partitions = [stretch.streams for stretch in stretches]
        self._tables = [stream_table(dataset, streams) for streams in self.partitions]
        self.phase_starts: list[list[float]] = []
        self.legs: list[Leg] = []
        decides: dict[str, Any] = {
            "version": ORDER_VERSION,
            "dataset": dataset.fingerprint,
            "seed": seed,
            "stochastok": self.text.proportion,
        }
        for number, stretch in enumerate(stretches):
            tokens = np.bincount(stream_of(dataset, stretch.streams), self.text.lengths, len(stretch.streams))
            starts, phase_rows, shares = stretch.phases(tokens.astype(np.int64).tolist(), planned_tokens)
            self.phase_starts.append(starts)
            after = [self.legs[-1].key, self.legs[-1].rows] if self.legs else None
            leg = Leg(
                context=stretch.rung.context,
                segments_per_row=stretch.rung.segments_per_row,
                fill=packing.fill,
                window_tokens=packing.window_tokens,
                seed=seed,
                salt=stretch.first_row,
                phase_rows=phase_rows,
                # Text tokens per window, times QUOTA_SCALE: int64 [phases, streams].
                quotas=np.rint(shares * packing.window_tokens * QUOTA_SCALE).astype(np.int64),
                rows=stretch.until_row - stretch.first_row,
                decides=decides | {"streams": [stream.name for stream in stretch.streams], "after": after},
                make=partial(self._begin, number),
                stream_of=partial(self.streams_of, number),
                cache_dir=cache_dir,
            )
            self.legs.append(leg)
        self.key = self.legs[-1].key

    def _begin(self, number: int) -> tuple[list[SourceOrder], Origin]:
        """The streams of a leg, from where the leg before has ended."""
        streams, leg = self.partitions[number], self.legs[number]
        origin = Origin([0] * len(streams), no_pieces())
        if number > 0:
            before, ended = self.partitions[number - 1], self.legs[number - 1].end()
            names = [stream.name for stream in before]
            begin = []
            for stream, whole in zip(streams, self._orders(streams, origin.begin, leg.context), strict=True):
                if stream.name in names:
                    begin.append(ended.begin[names.index(stream.name)])
                else:  # it was read with the rest of its source
                    n = next(n for n, s in enumerate(before) if s.source == stream.source and s.language is None)
                    begin.append(self.legs[number - 1].streams[n].slice_position(ended.begin[n], whole))
            origin = Origin(begin, ended.carried)
        return self._orders(streams, origin.begin, leg.context), origin

    def _orders(self, streams: list[Stream], begin: list[int], context: int) -> list[SourceOrder]:
        stream_numbers = stream_of(self.dataset, streams)
        has_text = self.text.lengths > 0
        orders = []
        for number, (stream, first) in enumerate(zip(streams, begin, strict=True)):
            source = self.dataset.sources.index(stream.source)
            docs = np.flatnonzero((stream_numbers == number) & has_text)
            places, out_of = None, 0
            if stream.rest or stream.language is not None:
                whole = np.flatnonzero((self.dataset.docs["source"] == source) & has_text)
                places, out_of = np.searchsorted(whole, docs), len(whole)
            orders.append(
                SourceOrder(
                    docs,
                    self.text.lengths[docs],
                    key=derive_key(self.seed, DOCUMENTS, source),
                    longest=context - 1,
                    begin=first,
                    places=places,
                    out_of=out_of,
                )
            )
        return orders

    def stream_numbers(self, number: int) -> NDArray[np.int64]:
        """Which stream of a leg each document is in, int64 [documents]."""
        return stream_of(self.dataset, self.partitions[number])

    def streams_of(self, number: int, docs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which stream of a leg each of some documents is in."""
        sources, languages = self.dataset.docs["source"][docs], self.dataset.docs["language"][docs]
        numbers: NDArray[np.int64] = self._tables[number][sources, languages]
        return numbers

    def leg_of(self, row: int) -> int:
        """Number of the leg that a row is in; the last one has no end."""
        return bisect_right(self.first_rows, row) - 1

    def phase_of(self, row: int) -> int:
        """How many phases of the mixture, and rungs of the ladder, have begun by `row`: those with a row up to it."""
        legs = zip(self.first_rows, self.legs, strict=True)
        return sum(leg.begun(min(row + 1 - first, leg.rows)) for first, leg in legs if first <= row)

    def key_until(self, row: int) -> str:
        """Hex digest of all that decides the rows before `row`: the key, without the phases, rungs and mixtures that
        begin later.
        """
        number = self.leg_of(max(0, row - 1))
        leg = self.legs[number]
        return leg.key_of(max(1, sum(start < row - self.first_rows[number] for start in leg.phase_rows)))

    def key_served(self, row: int) -> str:
        """As `key_until`, without the phases that have no row before `row` either; rows are counted up to it.

        A run that goes on from `row` with another plan keeps its past if this stays the same.
        """
        number = self.leg_of(max(0, row - 1))
        leg = self.legs[number]
        return leg.key_of(leg.begun(max(1, row - self.first_rows[number])))

    def with_plan(self, planned_tokens: int) -> "RowStream":
        """The same text, mixture and packing in a plan of another length. Raises ValueError as a new stream does."""
        return RowStream(
            self.dataset,
            packing=self.packing,
            mixture=self.mixture,
            seed=self.seed,
            planned_tokens=planned_tokens,
            step_tokens=self._step_tokens,
            past=self._past,
            cache_dir=self._cache_dir,
            text=self.text,
        )

    def rows(self, first: int, count: int) -> list[Pieces]:
        """Rows first .. first + count, each as its pieces from left to right."""
        assert first >= 0 and count >= 0
        rows: list[Pieces] = []
        row = first
        while row < first + count:
            number = self.leg_of(row)
            begin = self.first_rows[number]
            stop = first + count
            if number + 1 < len(self.legs):
                stop = min(stop, self.first_rows[number + 1])
            rows += self.legs[number].get(row - begin, stop - row)
            row = stop
        return rows

    def batch(self, first_row: int, rows: int) -> Batch:
        """Rows first_row .. first_row + rows with their text. They must be of one rung."""
        return self.assemble(self.rows(first_row, rows), self.legs[self.leg_of(first_row)])

    def assemble(self, rows: list[Pieces], leg: Leg) -> Batch:
        """Rows that `rows` gave, all of one rung, with their text."""
        return assemble(self.dataset, rows, leg.context, leg.segments_per_row, self.text)

    def scored(self, rows: list[Pieces]) -> int:
        """Positions of these rows that have a loss, from their pieces alone."""
        pieces = join_pieces(rows)
        ends = pieces.starts + pieces.lengths == self.text.lengths[pieces.docs]
        return int(pieces.lengths.sum() + np.count_nonzero(ends))

    def count_rows(self, until: int, progress: Progress | None = None) -> None:
        """Count rows up to row `until` and keep the count; calls `progress(rows counted, until)` on the way.

        `rows` counts on by itself; doing it for the whole plan beforehand makes every later start instant.
        """
        for number, (first, leg) in enumerate(zip(self.first_rows, self.legs, strict=True)):
            if first >= until:
                break
            last = number + 1 == len(self.legs)

            def counted(rows: int, first: int = first) -> None:
                if progress is not None:
                    progress(min(first + rows, until), until)

            leg.extend(until - first if last else min(leg.rows, until - first), counted)
            leg.index.save()

    @property
    def warnings(self) -> list[str]:
        """What the user should hear about the kept running count."""
        return [warning for leg in self.legs for warning in leg.index.warnings]
