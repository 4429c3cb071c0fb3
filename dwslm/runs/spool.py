"""Lines on their way to disk: handed over at once, and written in order by a thread."""

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from dwslm.runs.durable import disk_error, sync

POLL_SECONDS = 0.1
"""How often the thread looks for lines: so long may a line be in this process only."""
SYNC_SECONDS = 30.0
"""How long a line may be in the kernel's memory only."""
LIMIT = 10_000
"""Lines that may wait. So many wait only where the disk has refused or blocked for hours."""
RETRY_SECONDS = 1.0
PATIENCE = 3
"""Refusals in a row that a caller sits out: a disk that is full for a moment must not end a run."""


class Lines:
    """One append-only file of lines. It is made with its first line, or by `open`."""

    def __init__(self, path: Path, *, new: bool):
        """new: refuse a file that is already there."""
        self.path = path
        self._new = new
        self._fd = -1
        self._torn = False  # the file ends in a part of a line
        self.unsynced = False

    def open(self) -> None:
        """Raises ValueError for a file that should be new and isn't, OSError where the disk refuses."""
        if self._fd >= 0:
            return
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

    def append(self, line: bytes) -> None:
        """One write, into the kernel. What a refused one has left of a line is closed off by the next, and readers drop it."""
        if self._torn:
            line = b"\n" + line
        try:
            rest = memoryview(line)
            while rest:  # a second turn only where the disk took a part
                rest = rest[os.write(self._fd, rest) :]
                self._torn = bool(rest)
        except OSError as error:
            raise disk_error(f"cannot append a row to {self.path}", error) from error
        self.unsynced = True

    def sync(self) -> None:
        if self.unsynced:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise disk_error(f"cannot sync {self.path}", error) from error
            self.unsynced = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Spool:
    """The thread. `put` costs microseconds and loses nothing: a line that the disk refuses is tried again until it is taken.

    Where `limit` lines wait, `put` waits for room, or raises the disk's error if it has one: rows are never dropped.
    """

    def __init__(self, mono: Callable[[], float], limit: int = LIMIT):
        self._mono, self._limit = mono, limit
        # Putting takes no lock and wakes nobody: on a busy machine either could cost the caller its core.
        self._handed: deque[tuple[Lines, Callable[[], bytes]]] = deque()
        self._wake = threading.Event()
        self._waiting: deque[tuple[Lines, bytes]] = deque()  # the thread's own: taken over, and not written yet
        self._put = self._written = self._synced = self._wanted = 0  # counts of lines; wanted: to be synced at once
        self._dirty: dict[Path, Lines] = {}
        self._dirty_since = 0.0
        self._change = threading.Condition()  # of what the thread has done, for those who wait for it
        self._error: OSError | None = None
        self._failures = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, lines: Lines, line: Callable[[], bytes]) -> None:
        """Hands a line over, to be made by the thread; one caller at a time. The file is open already. `line` may not raise."""
        if self._put - self._written >= self._limit:
            with self._change:
                while self._put - self._written >= self._limit:
                    if self._error is not None:
                        raise self._error
                    self._change.wait()
        self._put += 1
        self._handed.append((lines, line))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="run-writer", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Returns once all that was put before is on disk.

        Raises OSError, one line with the file's name, where the disk refuses `PATIENCE` times. The lines are kept all the
        same, and tried again.
        """
        with self._change:
            target, failures = self._put, self._failures
            self._wanted = max(self._wanted, target)
            self._wake.set()
            while self._synced < target:
                if self._failures - failures >= PATIENCE and self._error is not None:
                    raise self._error
                self._change.wait()

    def close(self) -> None:
        """Flushes and ends the thread, also where the disk refuses."""
        try:
            self.flush()
        finally:
            self._closing = True
            self._wake.set()
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._closing = False
            self._waiting.clear()  # what the disk has refused to the end: the error tells
            self._dirty.clear()
            self._written = self._synced = self._put

    def _run(self) -> None:
        pause = POLL_SECONDS
        while not self._closing or self._waiting or self._handed:
            if not self._closing:
                self._wake.wait(pause)
            self._wake.clear()
            while self._handed:
                lines, line = self._handed.popleft()
                self._waiting.append((lines, line()))
            try:
                self._write()
                pause = POLL_SECONDS
            except OSError as error:
                with self._change:
                    self._error = error
                    self._failures += 1
                    self._change.notify_all()
                if self._closing:
                    return
                pause = RETRY_SECONDS

    def _write(self) -> None:
        while self._waiting:
            lines, line = self._waiting[0]
            if not self._dirty:
                self._dirty_since = self._mono()
            lines.append(line)
            self._dirty[lines.path] = lines
            self._waiting.popleft()
            self._written += 1
        written = self._written
        overdue = bool(self._dirty) and self._mono() - self._dirty_since >= SYNC_SECONDS
        if overdue or self._wanted > self._synced:
            for path, dirty in list(self._dirty.items()):
                dirty.sync()
                del self._dirty[path]
            self._synced = written
        with self._change:
            self._error = None
            self._change.notify_all()
