"""One run as a page needs it, read on as its files grow."""

import math
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dwslm.page.health import Health
from dwslm.page.history import History, Reports
from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.reader import Row

Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Saved:
    """One checkpoint: what its events say of it, and why it is kept; `kept` is empty where it is gone."""

    step: int
    tokens: float | None
    time: float | None
    seconds: float | None
    kept: tuple[str, ...]
    deleted: bool


@dataclass(frozen=True)
class RunData:
    """What a run's folder holds, at one moment. Events are in the order in which they happened."""

    run: RunFolder
    history: History
    health: Mapping[str, np.ndarray]
    events: tuple[Row, ...]
    evals: tuple[Row, ...]
    saved: tuple[Saved, ...]

    @property
    def planned_tokens(self) -> float | None:
        return number(self.run.record.get("planned_tokens"))

    @property
    def clock_cap(self) -> float | None:
        """MHz that the supervisor expected of the GPUs, where one said so."""
        caps = [number(row.get("clock_cap_mhz")) for row in self.events if row["event"] == "supervised"]
        return next((cap for cap in reversed(caps) if cap is not None), None)

    def place(self, steps: Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and hours of training at these steps, in between reports in proportion."""
        at = np.asarray(list(steps), float)
        h = self.history
        known = np.isfinite(h["tokens"])
        if not known.any():
            return np.full(len(at), np.nan), np.full(len(at), np.nan)
        x = np.insert(h["step"][known], 0, float(h.begun[0]))
        return (
            np.interp(at, x, np.insert(h["tokens"][known], 0, float(h.begun[1]))),
            np.interp(at, x, np.insert(h["hours"][known], 0, 0.0)),
        )


class RunReader:
    """Reads a run again and again, each time what is new of its long files. Threads may share one."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._reports, self._health = Reports(run), Health(run)
        self._lock = threading.Lock()
        self._read: tuple[Signature, RunData] | None = None

    def read(self) -> tuple[Signature, RunData]:
        """The signature is that of the files before they were read. Raises OSError where one cannot be read."""
        with self._lock:
            now = signature(self.run)
            if self._read is None or self._read[0] != now:
                self._read = (now, self._load())
            return self._read

    def _load(self) -> RunData:
        events = tuple(reader.events(self.run))
        resumes: dict[int, int] = {}
        for row in events:
            if row["event"] == "resume" and row["writer"] == "trainer" and isinstance(row.get("step"), int):
                resumes.setdefault(row["attempt"], row["step"])
        start = next((row for row in events if row["event"] == "start"), {})
        begun = tuple(value if isinstance(value := start.get(name), int) else 0 for name in ("step", "tokens"))
        return RunData(
            run=self.run,
            history=self._reports.read(resumes, (begun[0], begun[1])),
            health=self._health.read(float(self.run.record["created"])),
            events=events,
            evals=tuple(reader.evals(self.run)),
            saved=checkpoints(self.run, events),
        )


def signature(run: str | os.PathLike[str]) -> Signature:
    """Name, size and time of change of every file that a page of this run is made from."""
    found = []
    for folder in (Path(run), Path(run, "checkpoints")):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat()
                    size = status.st_size if entry.is_file() else 0
                    if entry.name != "lock":  # taken and freed without a change to what is known
                        found.append(
                            (f"{folder.name}/{entry.name}" if entry.is_dir() else entry.name, size, status.st_mtime_ns)
                        )
        except OSError:
            continue
    return tuple(sorted(found))


def checkpoints(run: RunFolder, events: Iterable[Row]) -> tuple[Saved, ...]:
    """Those on disk and those that events tell of, newest step first."""
    told: dict[int, Row] = {}
    gone: set[int] = set()
    for row in events:
        step = _step(str(row.get("path")))
        if row["event"] == "checkpoint" and step is not None:
            told[step] = row
            gone.discard(step)
        elif row["event"] == "checkpoint_deleted" and step is not None:
            gone.add(step)
    there, reasons = _on_disk(run.checkpoints)
    keep_last = _keep_last(run.record)
    last = sorted(there - reasons.keys())[-keep_last:] if keep_last else []
    found = []
    for step in sorted(told.keys() | there, reverse=True):
        row = told.get(step, {})
        why = list(reasons.get(step, []))
        if step in last:
            why.append(f"one of the last {keep_last}")
        if (
            not there and step not in gone and isinstance(row.get("pinned"), str)
        ):  # a folder that was copied without them
            why.append(row["pinned"].replace("-", " "))
        found.append(
            Saved(
                step,
                number(row.get("tokens")),
                number(row.get("time")),
                number(row.get("seconds")),
                tuple(why),
                step in gone,
            )
        )
    return tuple(found)


def _on_disk(folder: Path) -> tuple[set[int], dict[int, list[str]]]:
    there: set[int] = set()
    reasons: dict[int, list[str]] = {}
    for name in os.listdir(folder) if folder.is_dir() else []:
        if match := re.fullmatch(r"step-(\d+)\.pin-(.+)", name):
            reasons.setdefault(int(match[1]), []).append(match[2].replace("-", " "))
        elif (step := _step(name)) is not None and (folder / name / "manifest.json").is_file():
            there.add(step)
    return there, {step: sorted(why) for step, why in reasons.items() if step in there}


def _step(name: str) -> int | None:
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


def _keep_last(record: Mapping[str, Any]) -> int | None:
    config = record.get("config")
    part = config.get("checkpoint") if isinstance(config, dict) else None
    keep = part.get("keep_last") if isinstance(part, dict) else None
    return keep if isinstance(keep, int) and keep > 0 else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
