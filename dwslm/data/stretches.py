"""The run cut into stretches in which rows have one shape and the text flows in the same streams."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dwslm.data.mixture import MixtureSettings, Past
from dwslm.data.packing_settings import PackingSettings, Rung, first_step
from dwslm.data.shards import Dataset
from dwslm.data.shares import Stream, make_streams, phase_shares


@dataclass
class Stretch:
    """Rows first_row .. until_row of the run."""

    rung: Rung
    streams: list[Stream]
    first_row: int
    until_row: int
    first_slot: int
    """Slots of all rows before."""
    mixtures: list[tuple[MixtureSettings, int]]
    """Each with the row that it holds from; it is the first one's first_row or later."""

    def phases(self, tokens: list[int], planned_tokens: int) -> tuple[list[float], list[int], NDArray[np.float64]]:
        """The phases that hold in this stretch, in order.

        Args:
            tokens: text that each stream holds.

        Returns where each begins, as a fraction of the plan and as a row counted from `first_row`, the first being 0,
        and the shares, float64 [phases, streams]. Raises ValueError as `phase_shares` does.
        """
        starts: list[float] = []
        rows: list[int] = []
        kept: list[NDArray[np.float64]] = []
        for mixture, first in self.mixtures:
            for phase, shares in zip(mixture.all_phases(), phase_shares(mixture, self.streams, tokens), strict=True):
                slots = phase.start * planned_tokens - self.first_slot
                row = max(math.ceil(slots / self.rung.context - 1e-9), first - self.first_row)
                if row >= self.until_row - self.first_row:
                    continue
                while rows and rows[-1] >= row:  # it had no time
                    starts.pop(), rows.pop(), kept.pop()
                if not kept or not np.array_equal(kept[-1], shares):
                    slot = self.first_slot + row * self.rung.context
                    starts.append(phase.start if slots >= 0 and row > 0 else slot / planned_tokens)
                    rows.append(row)
                    kept.append(shares)
        return starts, rows, np.array(kept)


def make_stretches(
    dataset: Dataset,
    packing: PackingSettings,
    mixture: MixtureSettings,
    past: Sequence[Past],
    planned_tokens: int,
    step_tokens: int | None,
) -> list[Stretch]:
    """Cuts the run where a rung of the ladder begins, and where a branch gives slices streams of their own.

    Raises ValueError for a plan or a ladder that doesn't come out in whole rows and steps, for past mixtures beyond the
    plan, and for names that are not in the dataset.
    """
    rungs = _rungs(packing, planned_tokens, step_tokens)
    planned_rows = sum(rows for _, rows in rungs)
    for before, after in pairwise([0, *(one.until_row for one in past), planned_rows]):
        if not before < after:
            raise ValueError(
                f"past mixtures must end at rising rows below the plan's {planned_rows}: {before}, {after}"
            )
    mixtures: list[tuple[MixtureSettings, list[Stream], int]] = []
    names: dict[str, str] = {}
    for number, one in enumerate([*past, Past(planned_rows, mixture)]):
        where = f"data.past[{number}].mixture" if number < len(past) else "data.mixture"
        names = one.mixture.names(where) | names  # what was read apart stays apart
        mixtures.append((one.mixture, make_streams(dataset, names), one.until_row))

    stretches: list[Stretch] = []
    row = slot = 0
    for rung, rows in rungs:
        end = row + rows
        own: list[Stretch] = []
        for used, streams, until in mixtures:
            stop = min(until, end)
            if row >= stop:
                continue
            if own and own[-1].streams == streams:
                own[-1].mixtures.append((used, row))
                own[-1].until_row = stop
            else:
                own.append(Stretch(rung, streams, row, stop, slot, [(used, row)]))
            slot += (stop - row) * rung.context
            row = stop
        stretches += own
    return stretches


def _rungs(packing: PackingSettings, planned_tokens: int, step_tokens: int | None) -> list[tuple[Rung, int]]:
    """The rungs with their rows."""
    first = Rung(0.5, packing.context, packing.segments_per_row)
    if not packing.ladder:
        rows = -(-planned_tokens // packing.context)
        if rows < 1:
            raise ValueError(f"planned tokens {planned_tokens}: a run needs at least one row of {packing.context}")
        return [(first, rows)]
    if step_tokens is None:
        raise ValueError("a ladder needs the tokens of a step, with which its rungs begin")
    steps = -(-planned_tokens // step_tokens)
    bounds = [0, *(first_step(rung.start, steps) for rung in packing.ladder), steps]
    rungs = []
    for rung, begin, end in zip([first, *packing.ladder], bounds, bounds[1:], strict=False):
        if step_tokens % rung.context:
            raise ValueError(f"a step of {step_tokens} tokens is not a multiple of the ladder's context {rung.context}")
        if begin == end:
            raise ValueError(
                f"the ladder's rung of context {rung.context} has no step: of {steps} steps it begins with number {begin}, as "
                "the next one or the end does"
            )
        rungs.append((rung, (end - begin) * step_tokens // rung.context))
    return rungs
