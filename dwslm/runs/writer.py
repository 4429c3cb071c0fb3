"""Rows of a run: appended, one line and one write each, so that a kill tears nothing and readers may look on.

A row is handed to a thread, which has it in the kernel within a tenth of a second; there it outlives this process however it
ends. An event is on disk when its call returns, and with it all rows before it, power cut or not; so are they after `flush`. The
rest is synced every 30 seconds. A row that the disk refuses is kept and tried again.
"""

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwslm.runs.durable import to_json
from dwslm.runs.spool import Lines, Spool

SCHEMA = 1
WHOLE = 2**63


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
    Non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity". Threads may share a writer.
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
        self.writer = writer
        self._clock = clock or Clock()
        self._step: int | None = None
        self._tokens: int | None = None
        self._lock = threading.RLock()
        self._spool = Spool(self._clock.mono)
        # A program that ends without `close` leaves its rows on disk all the same.
        weakref.finalize(self, _close_quietly, self._spool)
        self._open(attempt)

    def _open(self, attempt: int) -> None:
        writer, self.attempt = self.writer, attempt
        # The events file is made at once: it marks the attempt as taken, and O_EXCL refuses a second taker.
        self._events = Lines(self.folder / f"events-{writer}-{attempt}.jsonl", new=True)
        self._metrics = Lines(self.folder / f"metrics-{attempt}.jsonl", new=True)
        self._evals = Lines(self.folder / f"evals-{writer}.jsonl", new=False)
        self._events.open()

    def metrics(self, row: dict[str, Any]) -> None:
        """One report of a training step; `row` holds at least `step` and `tokens`, counted after it.

        Returns at once. Raises OSError, one line with the file's name, where the file cannot be made or the disk has refused so
        long that no more rows can wait; ValueError for what is no plain data.
        """
        with self._lock:
            self._step, self._tokens = int(row["step"]), int(row["tokens"])
            self._put(self._metrics, row)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something that happened, on disk when this returns; step and tokens are the last known or given.

        Raises OSError, one line with the file's name, where the disk refuses. The event is kept all the same, and tried again.
        """
        with self._lock:
            self._step = fields.get("step", self._step)
            self._tokens = fields.get("tokens", self._tokens)
            self._put(self._events, {"event": kind, **fields})
        self._spool.flush()

    def evals(self, row: dict[str, Any]) -> None:
        """One slice of an evaluation; `row` holds at least `step` and `tokens`, those of what was scored."""
        with self._lock:
            self._put(self._evals, {"step": int(row["step"]), "tokens": int(row["tokens"])} | row)

    def flush(self) -> None:
        """Returns once all rows so far are on disk: what depends on them may be written then.

        Raises OSError, one line with the file's name, where the disk refuses.
        """
        self._spool.flush()

    def next_attempt(self, attempt: int) -> None:
        """Goes on as another attempt, in files of its own: the run went back to a checkpoint without a new process."""
        with self._lock:
            self.close()
            self._open(attempt)

    def close(self) -> None:
        """Flushes. Raises OSError where the disk refuses what was still waiting."""
        with self._lock:
            try:
                self._spool.close()
            finally:
                for lines in (self._metrics, self._evals, self._events):
                    lines.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that is on its way says more than that its last rows could not be written.
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(OSError):
                self.close()

    def _put(self, lines: Lines, row: dict[str, Any]) -> None:
        stamped = {
            "schema": SCHEMA, "attempt": self.attempt, "step": self._step, "tokens": self._tokens,
            "time": self._clock.wall(), "mono": self._clock.mono(), **row,
        }  # fmt: skip
        lines.open()
        if _plain(stamped):
            # Making the text is most of the work, and for these it cannot fail: the thread does it.
            self._spool.put(lines, lambda: _line(stamped))
            return
        try:
            line = _line(stamped)
        except ValueError as error:
            raise ValueError(f"row for {lines.path.name} {error}") from error
        self._spool.put(lines, lambda: line)


def _line(row: dict[str, Any]) -> bytes:
    return to_json(row).encode() + b"\n"


def _plain(row: dict[str, Any]) -> bool:
    """Whether a row holds numbers and texts alone, which nobody can change meanwhile and any of which JSON can hold."""
    for value in row.values():
        kind = type(value)
        if kind is int:
            if not -WHOLE < value < WHOLE:  # Python refuses to write integers of thousands of digits
                return False
        elif kind is not float and kind is not str and kind is not bool and value is not None:
            return False
    return True


def _close_quietly(spool: Spool) -> None:
    with contextlib.suppress(OSError):
        spool.close()
