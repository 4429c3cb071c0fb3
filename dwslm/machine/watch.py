"""How far a run is, read from its growing files; and which of its deadlines has passed."""

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ENDS = ("start", "resume", "paused", "preempted", "failed", "stopped", "done")
"""Events that say where a run stands."""
LENGTHENS = ("resume", "rung", "checkpoint", "score", "rollback")
"""Events of an interval between two rows that holds more than steps."""


@dataclass
class Deadlines:
    """How long a run may be silent, in seconds, by what it is doing. What is over is a hang."""

    start: float = 900.0
    """From the start of the process to its first row of metrics: data, compilation, first steps. Also from a change of the
    context, for which all compiles again, to the next row; and between two rows while no usual interval is known."""
    step: float = 60.0
    """Between two rows of metrics, at least; `step_factor` times the usual interval where that is longer."""
    step_factor: float = 10.0
    """Times the median interval between rows."""
    save: float = 300.0
    """For one save, at least; `save_factor` times the last one where that is longer."""
    save_factor: float = 3.0
    """Times the seconds of the last save."""
    evaluation: float = 1800.0
    """For one scoring, which follows a save, at least; `save_factor` times the last one where that is longer."""

    def __post_init__(self) -> None:
        for name in ("start", "step", "step_factor", "save", "save_factor", "evaluation"):
            if not getattr(self, name) > 0:
                raise ValueError(f"deadline {name}={getattr(self, name)} must be above 0")


class Tail:
    """Rows of a growing file of JSON lines, each given once. A line without its newline is not there yet."""

    def __init__(self, path: Path):
        self.path = path
        self._at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except OSError:
            return
        whole, newline, _ = new.rpartition(b"\n")
        self._at += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


class Progress:
    """Follows one attempt of a run. Times are of one clock, which the caller reads (`now`), never of the rows.

    Attributes:
        last: the last event that says where the run stands, None before the first.
        step, tokens: of the last row of metrics, None before the first; rows: how many there were.
        saved: step of the last checkpoint of this attempt.
    """

    def __init__(self, deadlines: Deadlines, now: float):
        self.deadlines = deadlines
        self.last: Mapping[str, Any] | None = None
        self.step: int | None = None
        self.saved: int | None = None
        self.tokens: int | None = None
        self.rows = 0
        self._alive = now  # when it last gave a sign of life
        self._after = "start"  # what may take its time since then
        self._row_by = "start"  # the deadline of the next row where nothing else goes on: start or step
        self._row_at: float | None = None  # of the last row, while nothing but steps came after it
        self._intervals: deque[float] = deque(maxlen=50)
        self._seconds: dict[str, float] = {}  # of the last save and scoring
        self._saving: dict[str, float] = {}  # temporary folder -> when it was first seen
        self._folder: Path | None = None
        self._known: set[str] = set()
        self._tails: list[Tail] = []

    def follow(self, folder: Path, known: set[str]) -> None:
        """The run's folder; `known` are names of files that were there before the attempt began."""
        if self._folder is None:
            self._folder, self._known = folder, known

    def look(self, now: float) -> None:
        """Reads what is new."""
        if self._folder is None:
            return
        following = {tail.path.name for tail in self._tails}
        for path in sorted(self._folder.glob("events-trainer-*.jsonl")) + sorted(self._folder.glob("metrics-*.jsonl")):
            if path.name not in self._known | following:
                self._tails.append(Tail(path))
        # A row and what began right after it are often seen at once, and the last of them says what goes on now. Events
        # are read first: what they show, the rows from before them are there for.
        tails = sorted(self._tails, key=lambda tail: tail.path.name)
        new = [(_number(row.get("mono")), tail.path.name, row) for tail in tails for row in tail]
        for _, name, row in sorted(new, key=lambda found: found[0]):
            if name.startswith("events"):
                self._event(row, now)
            else:
                self._row(row, now)
        there = set()
        checkpoints = self._folder / "checkpoints"
        if checkpoints.is_dir():
            there = {name for name in os.listdir(checkpoints) if name.startswith("tmp-step-")}
        self._saving = {name: self._saving.get(name, now) for name in there}

    def _event(self, row: dict[str, Any], now: float) -> None:
        kind = row.get("event")
        self._alive = now
        if kind in LENGTHENS:
            self._row_at = None
        if kind in ENDS:
            self.last = row
        elif kind == "rung":
            self._after = self._row_by = "start"
        elif kind == "checkpoint":
            self.saved = row.get("step")
            self._seconds["save"] = _number(row.get("seconds"))
            self._after = "evaluation"  # which may follow a save, without a word before its end
        elif kind == "score":
            self._seconds["evaluation"] = _number(row.get("seconds"))
            self._after = self._row_by

    def _row(self, row: dict[str, Any], now: float) -> None:
        if self._row_at is not None:
            self._intervals.append(now - self._row_at)
        self._alive = self._row_at = now
        self._after = self._row_by = "step"
        self.rows += 1
        if isinstance(step := row.get("step"), int):
            self.step = step
        if isinstance(tokens := row.get("tokens"), int):
            self.tokens = tokens

    def allowed(self, what: str) -> float:
        """Seconds that `what` may take: start, step, save or evaluation."""
        d = self.deadlines
        if what == "start":
            return d.start
        if what == "step":
            return max(d.step, d.step_factor * median(self._intervals) if self._intervals else d.start)
        return max(d.save if what == "save" else d.evaluation, d.save_factor * self._seconds.get(what, 0.0))

    def overdue(self, now: float) -> str | None:
        """What is over its deadline, in a line; None while all is well."""
        for name, since in self._saving.items():
            if now - since > self.allowed("save"):
                return f"save: {name} is not done after {now - since:.0f} s; {self.allowed('save'):.0f} s are allowed"
        if self.last is not None and self.last["event"] not in ("start", "resume"):
            what, limit = "end", self.allowed("save")  # it has said its last word and should be gone
        else:
            what, limit = self._after, self.allowed(self._after)
            if self._saving:  # held up by a save, which has its own deadline
                limit = max(limit, self.allowed("save"))
            if what == "evaluation":
                limit = max(limit, self.allowed(self._row_by))
        silent = now - self._alive
        if silent <= limit:
            return None
        at = "before the first row" if self.step is None else f"after step {self.step:,}"
        return f"{what}: silent for {silent:.0f} s {at}; {limit:.0f} s are allowed"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
