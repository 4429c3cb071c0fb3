"""Reads what `writer` wrote, whatever became of it.

Torn and zero-filled tails are left out, overlapping attempts merged, clocks that were set back put right.
A file may grow while it is read; what has no newline yet is not there yet. Keys that this version does not
know are passed on.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dwslm.runs.durable import from_json

Row = dict[str, Any]

LIFECYCLE = ("queued", "start", "resume", "paused", "preempted", "failed", "stopped", "done")
"""Kinds of event that say where a run stands. `start` and `resume` open an attempt, and `resume` carries
the `step` of its checkpoint; `preempted` left by a signal to go on later, `queued` went back to the queue, `stopped` was
ended by a person, `done` reached its plan."""

METRICS, TRAINER_EVENTS = r"metrics-(\d+)\.jsonl", r"events-trainer-(\d+)\.jsonl"
BLOCK = 1 << 16

FINISHED = ("stopped", "done")
"""After these a run is over on purpose. A failed one is not: it is work that waits."""


def read_rows(path: str | os.PathLike[str]) -> tuple[list[Row], int]:
    """The rows of one file in the order written, and the number of damaged lines that were left out.

    A last line without its newline is being written or was torn, and is left out without being counted.
    Raises OSError where the file cannot be read at all.
    """
    rows, damaged = [], 0
    lines = Path(path).read_bytes().split(b"\n")
    for line in lines[:-1]:
        if not line.strip(b"\0"):
            continue
        row = parse(line)
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    return rows, damaged


def parse(line: bytes) -> Row | None:
    """The row that a whole line holds; None where it is empty or damaged."""
    try:
        row = from_json(line.strip(b"\0").decode("utf-8"))  # a power cut may leave zeros where a row was promised
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def last_metrics(run: str | os.PathLike[str], count: int) -> list[Row]:
    """The last `count` of `metrics(run)`, read from the ends of the files: what a list of many runs can afford."""
    resumed, paths = resume_steps(run), dict(files(run, METRICS))
    kept: list[Row] = []
    below = math.inf  # a row stands if all that was written after it is of later steps
    for attempt in sorted(paths.keys() | resumed.keys(), reverse=True):
        for line in lines_backwards(paths[attempt]) if attempt in paths else ():
            row = parse(line)
            if row is None or not _at_step(row) or row["step"] >= below:
                continue
            kept.append({**row, "attempt": attempt})
            below = row["step"]
            if len(kept) == count:
                return kept[::-1]
        below = min(below, resumed.get(attempt, math.inf) + 1)
    return kept[::-1]


def lines_backwards(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a file from the last to the first, without newlines; a last one that has none yet is left out."""
    with open(path, "rb") as file:
        at = file.seek(0, os.SEEK_END)
        rest: bytes | None = None  # the end of a line whose beginning lies further ahead
        while at > 0:
            size = min(BLOCK, at)
            at -= size
            file.seek(at)
            parts = file.read(size).split(b"\n")
            if rest is None:
                if len(parts) == 1:
                    continue
                parts.pop()
                rest = b""
            parts[-1] += rest
            yield from reversed(parts[1:])
            rest = parts[0]
        if rest is not None:
            yield rest


def metrics(run: str | os.PathLike[str], *, superseded: bool = False) -> list[Row]:
    """The run's metric rows in step order, one a step, merged over its attempts.

    A resume goes back to its checkpoint, so the rows that older attempts wrote after that step tell of a
    past that the weights do not contain. An attempt supersedes them: all after the step of its `resume`
    event, or without one all from its first row's step on. They are left out; with `superseded=True` every
    row is returned in the order written, and says under the key `superseded` which it is.
    """
    rows: list[Row] = []
    for attempt, path in files(run, METRICS):
        rows += [{**row, "attempt": attempt} for row in read_rows(path)[0] if _at_step(row)]
    return _overlay(rows, resume_steps(run), several_a_step=False, all_rows=superseded)


def evals(run: str | os.PathLike[str], *, superseded: bool = False) -> list[Row]:
    """All evaluation rows with the name of their `writer`, the trainer's first, then by writer.

    The trainer's are merged over attempts as in `metrics`. Those of other writers always stand: they scored a
    checkpoint, and that score stays true whatever became of the run.
    """
    rows: list[Row] = []
    for path in sorted(Path(run).glob("evals-*.jsonl"), key=lambda path: (path.stem != "evals-trainer", path)):
        writer = path.stem.removeprefix("evals-")
        own = [{**row, "writer": writer} for row in read_rows(path)[0] if _at_step(row)]
        if writer == "trainer":
            own = _overlay(own, resume_steps(run), several_a_step=True, all_rows=superseded)
        elif superseded:
            own = [{**row, "superseded": False} for row in own]
        rows += own
    return rows


def events(run: str | os.PathLike[str]) -> list[Row]:
    """All events with the name of their `writer`, in the order in which they happened.

    Within a writer that is the order written, even where the wall clock was set back; between writers the
    wall clock decides, each writer's taken as never going back.
    """
    by_writer: dict[str, list[tuple[int, Path]]] = {}
    for path in Path(run).glob("events-*.jsonl"):
        if match := re.fullmatch(r"events-(.+)-(\d+)\.jsonl", path.name):
            by_writer.setdefault(match[1], []).append((int(match[2]), path))
    timed: list[tuple[float, Row]] = []
    for writer, files in sorted(by_writer.items()):
        latest = float("-inf")
        for attempt, path in sorted(files):
            for row in read_rows(path)[0]:
                if not isinstance(row.get("event"), str):
                    continue
                if isinstance(wall := row.get("time"), int | float):
                    latest = max(latest, wall)
                timed.append((latest, {**row, "writer": writer, "attempt": attempt}))
    return [row for _, row in sorted(timed, key=lambda pair: pair[0])]


def last_lifecycle(run: str | os.PathLike[str]) -> Row | None:
    """The newest event of a kind in `LIFECYCLE`, or None where the run never started."""
    return next((row for row in reversed(events(run)) if row["event"] in LIFECYCLE), None)


def files(run: str | os.PathLike[str], pattern: str) -> list[tuple[int, Path]]:
    """Attempt and path of the files whose name fits `METRICS` or `TRAINER_EVENTS`, in the order of attempts."""
    found = [(re.fullmatch(pattern, path.name), path) for path in Path(run).iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def resume_steps(run: str | os.PathLike[str]) -> dict[int, int]:
    """Attempt -> step of the checkpoint that it began from, for attempts that said so."""
    steps: dict[int, int] = {}
    for attempt, path in files(run, TRAINER_EVENTS):
        for row in read_rows(path)[0]:
            if row.get("event") == "resume" and isinstance(row.get("step"), int):
                steps.setdefault(attempt, row["step"])
    return steps


def _at_step(row: Row) -> bool:
    return isinstance(row.get("step"), int) and isinstance(row.get("attempt"), int)


def _overlay(rows: list[Row], resumed: dict[int, int], *, several_a_step: bool, all_rows: bool) -> list[Row]:
    """Goes through the attempts in order and drops whatever a later row redoes."""
    by_attempt: dict[int, list[Row]] = {attempt: [] for attempt in resumed}
    for row in rows:
        by_attempt.setdefault(row["attempt"], []).append({**row, "superseded": False})
    standing: list[Row] = []

    def drop_from(step: int, spare: int | None = None) -> None:
        while standing and standing[-1]["step"] >= step:
            if standing[-1]["step"] == step and standing[-1]["attempt"] == spare:
                break
            standing.pop()["superseded"] = True

    for attempt in sorted(by_attempt):
        if attempt in resumed:
            drop_from(resumed[attempt] + 1)
        for row in by_attempt[attempt]:
            drop_from(row["step"], spare=attempt if several_a_step else None)
            standing.append(row)
    if all_rows:
        return [row for attempt in sorted(by_attempt) for row in by_attempt[attempt]]
    return [{key: value for key, value in row.items() if key != "superseded"} for row in standing]
