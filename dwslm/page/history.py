"""A run's reports over all its attempts as arrays, and the points of them that a figure needs."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dwslm.page.columns import Columns
from dwslm.runs.durable import from_json

FIELDS = ("step", "tokens", "attempt", "loss", "grad_norm", "lr", "tokens_per_second", "mfu", "peak_memory")
PART = "_seconds"
"""Fields of a report with this ending are parts of the step's time."""
MEAN_OF = 20  # reports
POINTS = 2000  # of a curve that are drawn; more would not be seen
EXTREMES = ("loss", "grad_norm", "tokens_per_second")
"""Whose lowest and highest value of each stretch are among the points, so that no spike is lost."""


@dataclass(frozen=True)
class History:
    """Rows that stand, in step order, as `runs.reader.metrics` has them.

    Besides the fields of `FIELDS`: `hours` of training and `mean_loss`, the mean of the last 20 reports.
    `begun` is the step and tokens that it began with, not 0 where it branched off another run.
    `parts` names the fields of the step's time. `resumed` are the steps that later attempts began from.
    """

    columns: Mapping[str, np.ndarray]
    parts: tuple[str, ...]
    resumed: tuple[int, ...]
    superseded: int
    begun: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def points(self, limit: int = POINTS) -> np.ndarray:
        """Indices of the rows to draw."""
        return pick([self[name] for name in EXTREMES], limit)


class Reports:
    """The metrics files of a run, read on as they grow."""

    def __init__(self, run: str | os.PathLike[str]):
        self.run = Path(run)
        self._files: dict[int, Columns] = {}

    def read(self, resumes: Mapping[int, int], begun: tuple[int, int] = (0, 0)) -> History:
        """resumes: attempt -> step of the checkpoint that it began from; begun: step and tokens of the run's first start.

        Raises OSError where a file cannot be read.
        """
        for path in self.run.iterdir():
            match = re.fullmatch(r"metrics-(\d+)\.jsonl", path.name)
            if match and int(match[1]) not in self._files:
                fields = FIELDS + parts_of(path)
                self._files[int(match[1])] = Columns(path, fields, needs=("step", "attempt"))
        for columns in self._files.values():
            columns.read()
        return overlay(self._files, resumes, begun)


def parts_of(path: Path) -> tuple[str, ...]:
    """Names of the parts of a step's time that a file's first row has."""
    with open(path, "rb") as file:
        line = file.readline()
    try:
        row = from_json(line.decode("utf-8"))
    except ValueError:
        return ()
    return tuple(name for name in row if name.endswith(PART) and "." not in name) if isinstance(row, dict) else ()


def overlay(files: Mapping[int, Columns], resumes: Mapping[int, int], begun: tuple[int, int]) -> History:
    """Merges attempts: a row stands unless a later one, or the resume of a later attempt, goes back to its step or before."""
    names = list(FIELDS) + sorted({name for columns in files.values() for name in columns.fields} - set(FIELDS))
    steps: list[np.ndarray] = []
    attempts = sorted(files.keys() | resumes.keys())
    for attempt in attempts:
        if attempt in resumes:
            steps.append(np.array([resumes[attempt] + 1.0]))  # stands for all rows after that checkpoint
        if attempt in files:
            steps.append(files[attempt]["step"])
    every = np.concatenate([np.empty(0), *steps])
    # The lowest step of all that come later: whatever is not below it was done again.
    later = np.append(np.minimum.accumulate(every[::-1])[::-1][1:], np.inf) if len(every) else every
    keep, at, marks = [], 0, []
    for attempt in attempts:
        if attempt in resumes:
            marks.append(resumes[attempt])
            at += 1
        if attempt in files:
            n = len(files[attempt])
            keep.append((attempt, every[at : at + n] < later[at : at + n]))
            at += n
    columns = {
        name: np.concatenate(
            [np.empty(0)]
            + [
                files[attempt][name][stands] if name in files[attempt].fields else np.full(stands.sum(), np.nan)
                for attempt, stands in keep
            ]
        )
        for name in names
    }
    columns["attempt"] = np.concatenate(
        [np.empty(0)] + [np.full(stands.sum(), float(attempt)) for attempt, stands in keep]
    )
    columns["hours"] = training_hours(columns["tokens"], columns["tokens_per_second"], begun[1])
    columns["mean_loss"] = trailing_mean(columns["loss"])
    superseded = sum(int((~stands).sum()) for _, stands in keep)
    return History(columns, tuple(names[len(FIELDS) :]), tuple(marks), superseded, begun)


def training_hours(tokens: np.ndarray, speed: np.ndarray, begun: int) -> np.ndarray:
    """Hours of training at each report: its tokens at the speed that it reports, so that saves, scores and pauses don't count.

    The same as `runs.figures.hours`: tokens of a report without a speed count with the next that has one.
    """
    known = np.isfinite(tokens) & (speed > 0)
    spent = np.zeros(len(tokens))
    spent[known] = np.maximum(np.diff(tokens[known], prepend=float(begun)), 0.0) / speed[known] / 3600
    return np.cumsum(spent)


def trailing_mean(values: np.ndarray, count: int = MEAN_OF) -> np.ndarray:
    """Mean of the last `count` values up to each, of those that are finite; NaN where none is."""
    finite = np.isfinite(values)
    if not len(values):
        return values
    # Differences to one value, so that long sums lose no digits.
    anchor = values[finite][0] if finite.any() else 0.0
    sums = np.cumsum(np.where(finite, values - anchor, 0.0))
    counts = np.cumsum(finite)
    sums[count:] -= sums[:-count].copy()
    counts[count:] -= counts[:-count].copy()
    return np.where(counts > 0, anchor + sums / np.maximum(counts, 1), np.nan)


def pick(series: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """At most about `limit` indices, in order: first, last, and of each stretch of each series its lowest, its highest, and the
    first that is not finite."""
    n = len(series[0])
    if n <= limit:
        return np.arange(n)
    buckets = max(1, (limit - 2) // (2 * len(series)))
    width = -(-n // buckets)
    buckets = -(-n // width)
    chosen = [np.array([0, n - 1])]
    starts = np.arange(buckets) * width
    for values in series:
        padded = np.full(buckets * width, np.nan)
        padded[:n] = values
        grid = padded.reshape(buckets, width)
        finite = np.isfinite(grid)
        some = finite.any(1)
        chosen.append((starts + np.where(finite, grid, np.inf).argmin(1))[some])
        chosen.append((starts + np.where(finite, grid, -np.inf).argmax(1))[some])
        odd = ~finite
        odd[-1, n - starts[-1] :] = False
        odd = odd & some[:, None]  # a series that is empty for long has nothing to mark
        chosen.append((starts + odd.argmax(1))[odd.any(1)])
    return np.unique(np.concatenate(chosen))
