"""What the queue says of runs: jobs that have none yet, and why a run that has left waits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import Job
from dwslm.runs.summary import RunSummary

LEFT = ("queued", "paused", "lost", "failed")
"""States of a run whose process is gone and whose job may go on: there the queue knows more than the run's own files."""


@dataclass(frozen=True)
class JobLine:
    """A job without a run: it waits, is held, was dropped, or failed before it began. Times in seconds since 1970."""

    id: str
    name: str
    test: str
    arm: str
    state: str
    reason: str
    since: float
    """When it came to stand so."""
    training: bool
    """Whether it is a run that has not begun; otherwise a scoring or a command of somebody's own."""


class Jobs:
    """The jobs of a queue, again and again: only new events are read. For one thread at a time."""

    def __init__(self, folder: str | os.PathLike[str] | None):
        """folder: None where there is no queue."""
        self.folder = folder
        self._queue: Queue | None = None
        self._first: object = None

    def look(self, runs: Sequence[RunSummary], now: float) -> tuple[tuple[RunSummary, ...], tuple[JobLine, ...]]:
        """The runs with what their jobs say of them, and the jobs without a run, newest first.

        Raises:
            ValueError: where the folder holds no queue, or events of it are missing or no events.
            OSError: where it cannot be read.
        """
        if self.folder is None:
            return tuple(runs), ()
        try:
            queue, known = self._read(Path(self.folder)), {run.job for run in runs}
            lines = [_line(queue, job, now) for job in reversed(queue.jobs.values()) if job.id not in known]
            return tuple(_told(queue, run, now) for run in runs), tuple(line for line in lines if line.state != "done")
        except (OSError, ValueError):
            self._queue = None  # it may have been read in part
            raise
        except (LookupError, TypeError, AttributeError) as error:
            self._queue = None
            raise ValueError(f"an event of {self.folder} lacks what it should say: {error!r}") from error

    def _read(self, folder: Path) -> Queue:
        """The queue as of now; read anew where it is another one, or events that were there are gone."""
        log = folder / "log"
        if not log.is_dir():
            raise ValueError(f"{folder} is no queue; name another with --queue")
        there = sum(name.endswith(".json") and name[:-5].isdigit() for name in os.listdir(log))
        first = _first(log)
        if self._queue is None or first != self._first or there < self._queue.log.last:
            self._queue, self._first = Queue(folder), first
        else:
            self._queue.refresh()
            if self._queue.log.last < there:  # it stopped at a gap, which reading from the beginning names
                self._queue = Queue(folder)
        return self._queue


def _first(log: Path) -> object:
    """Tells one queue from another in the same place: events are never changed, so the first stays as it was made."""
    try:
        found = os.stat(min(log.glob("*.json"), default=log / "none"))
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _line(queue: Queue, job: Job, now: float) -> JobLine:
    spec, standing = job.spec, queue.standing(job, now)
    since = job.claim.time if job.claim is not None else job.since
    return JobLine(
        spec.id, spec.name, spec.test or "", spec.arm or "", standing.state, _why(job, standing.why), since,
        training=spec.program == "train.py",
    )  # fmt: skip


def _told(queue: Queue, run: RunSummary, now: float) -> RunSummary:
    """A run that has left, as its job stands; any other as it is."""
    job = queue.jobs.get(run.job)
    if job is None or job.claim is not None or run.state not in LEFT:
        return run
    standing = queue.standing(job, now)
    if standing.state == "done" or standing.state == run.state == "failed":
        return run
    return replace(run, state=standing.state, reason=_why(job, standing.why), finish=job.since if job.over else None)


def _why(job: Job, why: str) -> str:
    return f"{why} ({job.decision})" if job.decision and job.dropped is not None else why
