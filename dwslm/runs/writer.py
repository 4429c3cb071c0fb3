"""Rows of a run: appended, one line and one write each, so that a kill tears nothing and readers may look on.

A row is in the kernel when its call returns, which outlives this process however it ends. A power cut is
outlived by every event, and by metrics and evals up to the last sync, which rows cause every 30 seconds.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwslm.runs.durable import disk_error, sync, to_json

SCHEMA = 1
SYNC_SECONDS = 30.0


@dataclass(frozen=True)
class Clock:
    """Where rows take their times from, in seconds: `wall` since 1970, `mono` never going back."""

    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = time.monotonic


class RunWriter:
    """Writes one attempt's rows into a run folder.

    An attempt is one process's life in a run, numbered from 1 (`RunFolder.next_attempt`); it opens its own
    `metrics-<attempt>.jsonl` and `events-<writer>-<attempt>.jsonl` and never appends to an older one.
    `evals-<writer>.jsonl` is appended to by all attempts of a writer. Only the trainer's main process writes
    metrics. A metrics file is made by its first row, so a writer that has none leaves none.

    Every row carries `schema`, `attempt`, `step`, `tokens`, `time` (wall) and `mono`, both in seconds.
    Non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        attempt: int,
        *,
        writer: str = "trainer",
        clock: Clock | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._]+(-[A-Za-z0-9._]+)*", writer):
            raise ValueError(f"writer name {writer!r}: letters, digits, dot, dash and underscore only")
        self.folder = Path(folder)
        self.attempt = attempt
        self._clock = clock or Clock()
        self._step: int | None = None
        self._tokens: int | None = None
        # The events file is made at once: it marks the attempt as taken, and O_EXCL refuses a second taker.
        self._events = _Lines(self.folder / f"events-{writer}-{attempt}.jsonl", self._clock, new=True)
        self._metrics = _Lines(self.folder / f"metrics-{attempt}.jsonl", self._clock, new=True, lazy=True)
        self._evals = _Lines(self.folder / f"evals-{writer}.jsonl", self._clock, new=False, lazy=True)

    def metrics(self, row: dict[str, Any]) -> None:
        """One report of a training step; `row` holds at least `step` and `tokens`, counted after it.

        Raises OSError, one line with the file's name, where the disk refuses the row.
        """
        self._step, self._tokens = int(row["step"]), int(row["tokens"])
        self._metrics.append(self._stamp(row))

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something that happened, on disk when this returns; step and tokens are the last known or given."""
        self._step = fields.get("step", self._step)
        self._tokens = fields.get("tokens", self._tokens)
        self._events.append(self._stamp({"event": kind, **fields}), sync=True)

    def evals(self, row: dict[str, Any]) -> None:
        """One slice of an evaluation; `row` holds at least `step` and `tokens`, those of what was scored."""
        self._evals.append(self._stamp({"step": int(row["step"]), "tokens": int(row["tokens"])} | row))

    def close(self) -> None:
        for lines in (self._metrics, self._evals, self._events):
            lines.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stamp(self, row: dict[str, Any]) -> dict[str, Any]:
        head = {"schema": SCHEMA, "attempt": self.attempt, "step": self._step, "tokens": self._tokens}
        return head | {"time": self._clock.wall(), "mono": self._clock.mono()} | row


class _Lines:
    """One append-only file of JSON lines."""

    def __init__(self, path: Path, clock: Clock, *, new: bool, lazy: bool = False) -> None:
        self.path = path
        self._clock = clock
        self._new = new
        self._fd = -1
        self._synced = clock.mono()
        self._unsynced = False
        self._torn = False  # the file ends in a part of a line
        if not lazy:
            self._open()

    def _open(self) -> None:
        try:
            exclusive = os.O_EXCL if self._new else 0
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | exclusive, 0o644)
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            sync(self.path.parent)
        except FileExistsError as error:
            raise ValueError(f"{self.path} is already there: this attempt was started before") from error
        except OSError as error:
            raise disk_error(f"cannot create {self.path}", error) from error

    def append(self, row: dict[str, Any], *, sync: bool = False) -> None:
        try:
            line = to_json(row).encode() + b"\n"
        except ValueError as error:
            raise ValueError(f"row for {self.path.name} {error}") from error
        if self._fd < 0:
            self._open()
        if self._torn:  # left by a crash or a full disk: start a line of our own, readers drop the part
            line = b"\n" + line
        try:
            rest = memoryview(line)
            while rest:  # a second turn only where the disk took a part
                rest = rest[os.write(self._fd, rest) :]
                self._torn = bool(rest)
        except OSError as error:
            raise disk_error(f"cannot append a row to {self.path}", error) from error
        self._unsynced = True
        if sync or self._clock.mono() - self._synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise disk_error(f"cannot sync {self.path}", error) from error
        self._synced = self._clock.mono()
        self._unsynced = False

    def close(self) -> None:
        if self._fd >= 0:
            try:
                if self._unsynced:
                    self._sync()
            finally:
                os.close(self._fd)
                self._fd = -1
