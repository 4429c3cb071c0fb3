"""What a worker of the queue does: take the next job that its GPUs allow, run it, note how it ended, again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import Claim, Job, JobSpec

PATIENCE_S = 15.0
"""A job of higher priority waits this long for a free worker before others are asked to make room."""


class Held(Protocol):
    """GPUs that a worker holds for one job."""

    @property
    def names(self) -> Sequence[str]: ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a try ended; see `Queue.end`."""

    kind: str
    about: dict[str, Any]


@dataclass
class Worker:
    """One job at a time, from a queue that others work on, too.

    Attributes:
        name, host, boot: of this worker; the lock of this name must be held.
        gpus: names of the GPUs that it may use.
        most: how many of them at a time.
        take: GPUs for a job, without those named; None where too few are free.
        execute: runs a claimed job to its end, with what `take` gave.
        saved: step of the newest checkpoint of a job.
        stop: whether to take no more jobs.
        poll_s: seconds between two looks at an idle queue.
    """

    name: str
    host: str
    boot: str
    gpus: Sequence[str]
    most: int
    take: Callable[[JobSpec, frozenset[str]], Held | None]
    execute: Callable[[Job, Claim, Any], Outcome]
    saved: Callable[[JobSpec], int | None]
    stop: Callable[[], bool] = lambda: False
    poll_s: float = 1.0

    def work(self, queue: Queue, until_empty: bool = False) -> int:
        """Runs jobs until it is told to stop, or with `until_empty` until nothing is left that could still be run.

        Returns:
            How many tries it made.
        """
        tries = 0
        while not self.stop():
            queue.refresh()
            queue.reap(self.host, self.boot, self.saved)
            found = self._next(queue)
            if found is not None:
                tries += 1
                self._run(queue, *found)
            elif until_empty and not queue.may_become_ready(self.fits):
                break
            else:
                time.sleep(self.poll_s)
        return tries

    def fits(self, job: Job) -> bool:
        """Whether a job could run here, were all GPUs free. One that avoids them all is another host's."""
        return job.spec.gpus <= min(self.most, len(set(self.gpus) - job.avoid))

    def _next(self, queue: Queue) -> tuple[Job, Claim, Held] | None:
        """The first job in order that can be had. Behind one that waits for GPUs only those without GPUs may pass it: else a
        job that needs many would wait for ever."""
        waits = False
        for job in queue.in_order():
            if not self.fits(job) or (waits and job.spec.gpus):
                continue
            have = self.take(job.spec, frozenset(job.avoid))
            if have is None:
                waits = True
                continue
            claim = None
            try:
                claim = queue.claim(job.id, self.name, self.host, self.boot, have.names)
            finally:
                if claim is None:
                    have.release()
            if claim is not None:
                return job, claim, have
            if self.stop():
                break
        return None

    def _run(self, queue: Queue, job: Job, claim: Claim, have: Held) -> None:
        try:
            outcome = self.execute(job, claim, have)
        except BaseException as error:
            # Ours to mend, but whoever reads the queue should see it; the job is not tried again by itself.
            queue.end(job.id, claim, "worker_error", reason=f"{type(error).__name__}: {error}"[:500], retries=0)
            raise
        finally:
            have.release()
        queue.end(job.id, claim, outcome.kind, **outcome.about)


def makes_room_for(queue: Queue, job: Job, host: str, gpus: int) -> Job | None:
    """The waiting job for which a running one should save and leave, None if there is none.

    Every worker of a host comes to the same answer: the running jobs of lowest priority make room, the latest started first, as
    many as are needed, and none if all of them together would not do.
    """
    now = queue.clock()
    wanted = next((each for each in queue.in_order() if each.spec.gpus <= gpus), None)
    if wanted is None or wanted.spec.priority <= job.spec.priority:
        return None
    if now - max(wanted.since, wanted.not_before) < PATIENCE_S:
        return None
    here = [each for each in queue.running.values() if each.claim is not None and each.claim.host == host]
    lower = [each for each in here if each.spec.priority < wanted.spec.priority]
    # Those on their way out already come first: they may be enough.
    lower.sort(key=lambda each: (not leaving(each), each.spec.priority, -each.claim.number if each.claim else 0))
    freed, leave = 0, list[Job]()
    for each in lower:
        if leave and freed >= wanted.spec.gpus:
            break
        leave.append(each)
        freed += each.spec.gpus
    return wanted if freed >= wanted.spec.gpus and job in leave and not leaving(job) else None


def leaving(job: Job) -> bool:
    """Whether a running job was told to save and leave."""
    return job.hold is not None or job.dropped is not None or job.preempt_by is not None
