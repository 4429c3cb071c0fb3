"""Where a run stands, computed from its events, its lock and the clock. Nothing of it is stored.

| state | rule |
| --- | --- |
| queued | not begun, or given back to the queue |
| paused | its last word says that it waits: `paused`, `preempted`, or a supervisor's `retry` |
| running | an attempt is open, and its last report is younger than 10 minutes |
| stale | the same, but silent for 10 minutes or more |
| lost | an attempt is open and no process holds the run; on another machine: silent for an hour |
| failed, done, stopped | its last word |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.reader import LIFECYCLE, METRICS, Row

STATES = ("running", "stale", "paused", "queued", "done", "stopped", "failed", "lost")
STALE_S = 600.0
LOST_S = 3600.0
"""Silence on another machine, whose locks cannot be seen, after which a run is taken for lost."""
GOING_ON_S = 10.0
"""A process that holds a run so long after its last word goes on with it: it loads, and has not said so yet."""


@dataclass(frozen=True)
class Facts:
    """What the state follows from, besides the lock and the clock; times in seconds since 1970."""

    kind: str | None = None
    """The last lifecycle event, or `retry`."""
    at: float | None = None
    """When that was."""
    reason: str = ""
    """What it says of why."""
    until: float | None = None
    """When a wait is meant to end."""
    heard: float | None = None
    """Time of the last report: the newest row or event of the trainer."""


@dataclass(frozen=True)
class Standing:
    """A state, with what can be said of it in a line."""

    state: str
    reason: str
    heard: float | None


def state(run: RunFolder, now: float) -> str:
    """One of `STATES`; `now` in seconds since 1970."""
    return standing(run, now).state


def standing(run: RunFolder, now: float) -> Standing:
    """The state and the reason for it."""
    return confirm(run, gather(run), now)


def confirm(run: RunFolder, facts: Facts, now: float) -> Standing:
    """Judges `facts`; before a run is called lost, its files are read once more, since it may just have ended."""
    found = judge(facts, run.held, now)
    if found.state == "lost" and (newer := gather(run)) != facts:
        return judge(newer, run.held, now)
    return found


def gather(run: RunFolder, events: Sequence[Row] | None = None) -> Facts:
    """The facts on disk. `events` are the run's, where the caller has read them already."""
    events = reader.events(run) if events is None else events
    last = next((row for row in reversed(events) if row["event"] in (*LIFECYCLE, "retry")), None)
    heard = last_report(run, events)
    if last is None:
        return Facts(heard=heard)
    seconds = last.get("seconds")
    at = _time(last)
    until = at + seconds if last["event"] == "retry" and at is not None and isinstance(seconds, int | float) else None
    error, reason = last.get("error"), last.get("reason") or last.get("kind") or ""
    told = f"{error}: {reason}" if error and reason else str(error or reason)
    return Facts(kind=last["event"], at=at, reason=told, until=until, heard=heard)


def last_report(run: RunFolder, events: Sequence[Row]) -> float | None:
    """Wall time of the trainer's last row or event.

    Of the newest attempt's files, the row that was written last by the monotonic clock: the wall clock may have been set back.
    """
    said = [row for row in events if row["writer"] == "trainer"][-1:]
    files = reader.files(run, METRICS)
    for _, path in files[-1:]:
        said += [row for line in _first(reader.lines_backwards(path)) if (row := reader.parse(line))]
    said = [row for row in said if _time(row) is not None]
    if not said:
        return None
    return _time(max(said, key=lambda row: (row.get("attempt") or 0, _number(row.get("mono")))))


def judge(facts: Facts, held: Callable[[], bool | None], now: float) -> Standing:
    """The rules. `held` says whether a process holds the run, None where that can't be told."""
    silent = None if facts.heard is None else max(0.0, now - facts.heard)

    def told(state: str, reason: str = "") -> Standing:
        return Standing(state, reason, facts.heard)

    if facts.kind is None or facts.kind == "queued":
        return told("queued", facts.reason)
    if facts.kind not in ("start", "resume"):
        if facts.at is not None and now - facts.at > GOING_ON_S and held():
            return told("running", "goes on: loads its checkpoint")
        if facts.kind == "retry":
            if facts.until is not None and now > facts.until + STALE_S:
                return told("lost", "was to be tried again, and was not")
            return told("paused", f"will be tried again after: {facts.reason}")
        return told("paused" if facts.kind == "preempted" else facts.kind, facts.reason)
    age = "never heard of" if silent is None else f"silent for {words(silent)}"
    taken = held()
    if taken is False:
        return told("lost", f"its process is gone without a word, {age}")
    if taken is None and (silent is None or silent >= LOST_S):
        return told("lost", f"{age}, on another machine")
    if silent is None or silent >= STALE_S:
        return told("stale", age)
    return told("running")


def words(seconds: float) -> str:
    """A span of time in its two largest units: "3 h 12 min"."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    whole = int(seconds)
    for at, (size, name) in enumerate(units):
        if whole >= size or name == "s":
            rest = whole % size // units[at + 1][0] if name != "s" else 0
            return f"{whole // size} {name}" + (f" {rest} {units[at + 1][1]}" if rest and name in ("d", "h") else "")
    return "0 s"


def _first(lines: Any) -> list[bytes]:
    return [line for line, _ in zip(lines, range(3), strict=False)]


def _time(row: Row) -> float | None:
    return float(row["time"]) if isinstance(row.get("time"), int | float) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
