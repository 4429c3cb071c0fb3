"""Arms of one test beside each other: whether they differ by more than two seeds of one arm do, by tokens and by hours."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from dwslm.runs import reader
from dwslm.runs.figures import SCORE, begun_at, hours
from dwslm.runs.folder import RunFolder
from dwslm.runs.summary import REPORTS, mean

LABELS = ("name", "runs_dir", "resume", "dry_run", "data.verify", "train.seed", "train.device", "train.threads",
          "train.prefetch", "train.log_every", "train.eval_every_tokens", "proxy", "track", "checkpoint")  # fmt: skip
"""Settings, or groups of them, that make no arm: who, where and how often, and the seed."""
LOSS = "loss"


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone. Lower values are better."""

    name: str
    runs: list[RunFolder]
    values: list[float]
    """Of each run, where all runs have come to in tokens."""
    hours: list[float]
    """That each run took to come there."""
    by_hours: list[float] | None
    """Of each run, at the hour where the first run of all had come there; None where that can't be said."""

    @property
    def seeds(self) -> list[Any]:
        return [run.record.get("seed") for run in self.runs]


@dataclass(frozen=True)
class Verdict:
    """The arms, best first by tokens, and how much of their differences is noise."""

    metric: str
    """`bits_per_byte` where all runs are scored, else `loss`, the mean of 20 reports."""
    tokens: int
    """Where the arms are compared: as far as all runs have come."""
    hours: float | None
    """Where they are compared on the clock; None where that makes no sense, see `notes`."""
    arms: list[Arm]
    noise: float | None
    """The largest distance of two seeds of one arm at that point in tokens; None where no arm has two."""
    noise_by_hours: float | None
    notes: list[str]
    """Why the comparison may be unfair; empty where arms are paired."""

    def arm_of(self, run: RunFolder) -> Arm:
        return next(arm for arm in self.arms if run.path in {own.path for own in arm.runs})

    def against(self, arm: Arm) -> list[str]:
        """What stands against calling an arm better than the others; nothing where it is."""
        wrong = list(self.notes)
        for other in self.arms:
            if other is not arm:
                wrong += [told for told in (self._by_tokens(arm, other), self._by_hours(arm, other)) if told]
        return list(dict.fromkeys(wrong))

    def words(self) -> str:
        """The verdict in a sentence."""
        best = self.arms[0]
        wrong = self.against(best)
        if not wrong:
            by = "by tokens and by hours" if self.hours is not None else "by tokens"
            return f"{best.name} is better {by}"
        return "no arm can be called better: " + "; ".join(wrong)

    def _by_tokens(self, arm: Arm, other: Arm) -> str:
        if self.noise is None:
            return "no arm has two seeds, so nobody knows how far two runs of one arm lie apart"
        difference = fmean(other.values) - fmean(arm.values)
        if difference <= self.noise:
            return (
                f"by tokens {arm.name} is {_better(difference)} than {other.name}, "
                f"and two seeds of one arm lie up to {self.noise:.4f} apart"
            )
        mine, theirs = dict(zip(arm.seeds, arm.values, strict=True)), dict(zip(other.seeds, other.values, strict=True))
        for seed in mine.keys() & theirs.keys():
            if mine[seed] >= theirs[seed]:
                return f"with seed {seed} {arm.name} is not better than {other.name}"
        return ""

    def _by_hours(self, arm: Arm, other: Arm) -> str:
        """A slower arm has to win on the clock, too."""
        if arm.by_hours is None or other.by_hours is None or self.noise_by_hours is None:
            return ""
        if fmean(arm.hours) <= fmean(other.hours):
            return ""
        difference = fmean(other.by_hours) - fmean(arm.by_hours)
        if difference > self.noise_by_hours:
            return ""
        return (
            f"by hours {arm.name}, which is slower, is {_better(difference)} than {other.name}, "
            f"and two seeds of one arm lie up to {self.noise_by_hours:.4f} apart"
        )


def verdict(runs: Sequence[RunFolder]) -> Verdict:
    """Compares the arms that `runs` fall into, as far as all of them have come.

    Between two scores a run's value is interpolated. On the clock, what counts is training time alone; an arm that needs longer
    is looked at before its end, when its rate may still be high: that is the price of being slow.

    Raises:
        ValueError: where there are less than two arms, or a run has no reports.
    """
    groups = group(runs)
    if len(groups) < 2:
        names = ", ".join(run.path.name for run in runs) or "no runs"
        raise ValueError(f"only one arm among {names}: a verdict compares at least two")
    every = [run for members in groups.values() for run in members]
    scored = {run.path: _scores(run) for run in every}
    metric = SCORE if all(len(points) for points in scored.values()) else LOSS
    points = scored if metric == SCORE else {run.path: _losses(run) for run in every}
    for path, found in points.items():
        if not len(found):
            raise ValueError(f"{path.name} has no reports yet")
    end = min(found[-1, 0] for found in points.values())
    notes = unpaired(groups)
    took = {path: float(np.interp(end, found[:, 0], found[:, 1])) for path, found in points.items()}
    clock = min(took.values())
    late = [path.name for path, found in points.items() if found[0, 1] > clock]
    timed = len({str(run.record.get("hardware")) for run in every}) == 1 and not late and clock > 0
    if len({str(run.record.get("hardware")) for run in every}) > 1:
        notes.append("hours cannot be compared: not all runs were made on the same hardware")
    elif not timed:
        name = late[0] if late else every[0].path.name
        way_out = "; scores on the way make it possible (train.eval_every_tokens)" if metric == SCORE else ""
        notes.append(f"hours cannot be compared: {name} has no {metric} by then{way_out}")
    arms = [
        Arm(
            name=name,
            runs=members,
            values=[_at(points[run.path], 0, end) for run in members],
            hours=[took[run.path] for run in members],
            by_hours=[_at(points[run.path], 1, clock) for run in members] if timed else None,
        )
        for name, members in groups.items()
    ]
    return Verdict(
        metric=metric,
        tokens=int(end),
        hours=clock if timed else None,
        arms=sorted(arms, key=lambda arm: fmean(arm.values)),
        noise=_noise([arm.values for arm in arms]),
        noise_by_hours=_noise([arm.by_hours for arm in arms if arm.by_hours is not None]),
        notes=notes,
    )


def group(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Arms by name: as `proxy.arm` says, else by the settings in which the runs differ, without `LABELS`."""
    if all(run.arm for run in runs):
        names = [run.arm for run in runs]
    else:
        flat = [_settings(run.record.get("config") or {}) for run in runs]
        keys = sorted({key for one in flat for key in one})
        differing = [key for key in keys if len({repr(one.get(key)) for one in flat}) > 1]
        names = [", ".join(f"{key}={one.get(key)}" for key in differing) or "the same settings" for one in flat]
    groups: dict[str, list[RunFolder]] = {}
    for name, run in zip(names, runs, strict=True):
        groups.setdefault(name, []).append(run)
    return groups


def unpaired(groups: dict[str, list[RunFolder]]) -> list[str]:
    """What the arms don't share and should: seeds, data order at a seed, planned tokens."""
    wrong = []
    seeds = {name: sorted(str(run.record.get("seed")) for run in members) for name, members in groups.items()}
    if len({tuple(one) for one in seeds.values()}) > 1:
        told = "; ".join(f"{name}: {', '.join(one)}" for name, one in seeds.items())
        wrong.append(f"arms are not paired, their seeds differ ({told})")
    every = [run for members in groups.values() for run in members]
    planned = {run.record.get("planned_tokens") for run in every}
    if len(planned) > 1:
        wrong.append(f"arms are not paired, their planned tokens differ ({', '.join(sorted(map(str, planned)))})")
    orders: dict[Any, set[str]] = {}
    for run in every:
        orders.setdefault(run.record.get("seed"), set()).add(str(run.record.get("stream")))
    for seed, found in orders.items():
        if len(found) > 1:
            wrong.append(f"arms are not paired, the order of their data differs at seed {seed}")
    return wrong


def _settings(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in LABELS:
            continue
        flat |= _settings(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _scores(run: RunFolder) -> np.ndarray:
    """Rows of tokens, hours and bits per byte: training's own overall scores."""
    rows = [row for row in reader.evals(run) if row["writer"] == "trainer" and row.get("slice") == "overall"]
    rows = [row for row in rows if isinstance(row.get(SCORE), int | float) and isinstance(row.get("tokens"), int)]
    reports = reader.metrics(run)
    if not rows or not reports:
        return np.empty((0, 3))
    tokens = [row["tokens"] for row in reports]
    spent = np.interp([row["tokens"] for row in rows], [begun_at(run), *tokens], [0.0, *hours(run, reports)])
    return np.array([[row["tokens"], hour, row[SCORE]] for row, hour in zip(rows, spent, strict=True)], dtype=float)


def _losses(run: RunFolder) -> np.ndarray:
    """Rows of tokens, hours and loss, each the mean of the last `REPORTS` reports."""
    rows = [row for row in reader.metrics(run) if isinstance(row.get(LOSS), int | float)]
    spent = hours(run, rows)
    means = [mean(rows[max(0, at - REPORTS + 1) : at + 1], LOSS) for at in range(len(rows))]
    points = [[row["tokens"], hour, loss] for row, hour, loss in zip(rows, spent, means, strict=True)]
    return np.array(points, dtype=float).reshape(-1, 3)


def _at(points: np.ndarray, column: int, where: float) -> float:
    return float(np.interp(where, points[:, column], points[:, 2]))


def _noise(arms: Sequence[list[float]]) -> float | None:
    spreads = [max(values) - min(values) for values in arms if len(values) > 1]
    return max(spreads) if spreads else None


def _better(difference: float) -> str:
    return f"{abs(difference):.4f} {'better' if difference > 0 else 'worse'}"


__all__ = ["Arm", "Verdict", "group", "unpaired", "verdict"]
