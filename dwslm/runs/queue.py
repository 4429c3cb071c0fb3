"""The queue of runs: what is to run, who runs it, and how that ended, as a folder that any number of workers share.

    queue/
        log/00000001.json ...      what happened, in order; see queue_log
        workers/<worker>.lock      locked by a worker, and by all that it started, for as long as one of them lives
        configs/<job>.yaml         a job's settings, written where it is started

Where a job stands is computed from the log, the locks and the clock, and stored nowhere. A claim is an event, so a job has one
worker at a time; a claim whose worker is gone is closed by whoever sees it first, and the job waits again.
"""

import bisect
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from dwslm.runs.queue_job import DONE, LOST, PREEMPTED, Claim, Job, JobSpec, Standing
from dwslm.runs.queue_log import Event, QueueLog

LOST_RETRIES = 3
"""How often a job whose worker vanished is tried again without a new checkpoint in between."""
LOST_WAIT_S = (0.0, 30.0, 120.0)
SILENT_S = 3600.0
"""After this long without a sign a worker on another host, whose lock says nothing here, counts as gone."""
REBOOT_S = 120.0
"""The same for a worker of this host's earlier start; it might be another machine of the same name."""
STALE_S = 600.0


class Queue:
    """The jobs of a queue's folder, as of the last `refresh`. For one thread."""

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = time.time):
        self.folder = Path(folder)
        self.clock = clock
        self.log = QueueLog(self.folder / "log")
        self.jobs: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self._waiting: list[tuple[int, int, str]] = []  # sorted; jobs that nobody has and that are not over
        self.refresh()

    def refresh(self) -> None:
        """Reads what has happened since."""
        for number, event in self.log.new():
            self._take(number, event)

    # ---- what people and workers do ---------------------------------------------------------------------

    def add(self, specs: Sequence[JobSpec], check: Callable[[], None] = lambda: None) -> None:
        """Adds jobs, all or none. `check` may refuse them, by what the queue holds at that moment."""

        def decide() -> Event:
            ids = [spec.id for spec in specs]
            if taken := {id for id in ids if id in self.jobs} | {id for id in ids if ids.count(id) > 1}:
                raise ValueError(f"job {min(taken)} is in the queue already")
            for spec in specs:
                for other in spec.after:
                    if other not in self.jobs and other not in ids:
                        raise ValueError(f"job {spec.name} waits for {other}, which is not in {self.folder}")
            try:
                TopologicalSorter({spec.id: spec.after for spec in specs}).prepare()
            except CycleError as error:
                raise ValueError(f"jobs wait for each other: {', '.join(error.args[1])}") from None
            check()
            return self._event("add", jobs=[asdict(spec) for spec in specs])

        self._append(decide)

    def claim(self, id: str, worker: str, host: str, boot: str, gpus: Sequence[str] = ()) -> Claim | None:
        """Takes a job for a worker, whose lock must be held by now; None where it is not to be had any more."""

        def decide() -> Event | None:
            if not self.ready(self.jobs[id]):
                return None
            return self._event("claim", job=id, worker=worker, host=host, boot=boot, gpus=list(gpus))

        # Not durable: a power cut that undoes the event has ended the claim as well.
        return self.jobs[id].claim if self._append(decide, durable=False) is not None else None

    def end(self, id: str, claim: Claim, kind: str, **about: Any) -> None:
        """A try is over: `kind` is "done", "preempted" or a class of failure.

        `about` may hold `reason`, `code`, `retries` (how often this class is tried again without a new checkpoint), `wait_s`,
        `saved` (step of the newest checkpoint), `avoid` (GPUs that it must not have again), `run`. Nothing happens where the
        claim was taken away meanwhile.
        """

        def decide() -> Event | None:
            mine = self.jobs[id].claim
            if mine is None or mine.number != claim.number:
                return None
            return self._event("end", job=id, claim=claim.number, kind=kind, **about)

        self._append(decide)

    def reap(self, host: str, boot: str, saved: Callable[[JobSpec], int | None]) -> list[str]:
        """Closes the claims of workers that are gone. Returns their jobs; `saved` tells of a job's newest checkpoint."""
        found = []
        for job in list(self.running.values()):
            claim = job.claim
            assert claim is not None
            gone = self.gone(claim, host, boot)
            if gone is None:
                continue
            about = {"reason": gone, "saved": saved(job.spec), "retries": LOST_RETRIES,
                     "wait_s": LOST_WAIT_S[min(job.failures[LOST], len(LOST_WAIT_S) - 1)]}  # fmt: skip
            self.end(job.id, claim, LOST, **about)
            found.append(job.id)
        return found

    def hold(self, id: str, reason: str, until: float | None = None) -> None:
        """Lets a job wait on purpose; a running one saves and leaves."""
        if self.find(id).over:
            raise ValueError(f"job {id} is over: there is nothing to hold")
        self._change(id, "hold", reason=reason, until=until)

    def release(self, id: str) -> None:
        """Ends a hold."""
        if self.find(id).hold is None:
            raise ValueError(f"job {id} is not held")
        self._change(id, "release")

    def retry(self, id: str) -> None:
        """Lets a failed, stopped or dropped job wait again, its failures forgotten."""
        job = self.find(id)
        if not job.over or (job.ended is not None and job.ended["kind"] == DONE):
            raise ValueError(f"job {id} is not over, or done: only a failed, stopped or dropped one is tried again")
        self._change(id, "retry")

    def drop(self, id: str, reason: str, decision: str | None = None) -> None:
        """Takes a job out for good, with the reason; a running one saves and leaves."""
        if self.find(id).over:
            raise ValueError(f"job {id} is over: there is nothing to drop")
        self._change(id, "drop", reason=reason, decision=decision)

    def preempt(self, id: str, claim: Claim, by: str) -> bool:
        """Notes that a running job makes room for another. False where it no longer runs, or does already."""

        def decide() -> Event | None:
            job = self.jobs[id]
            if job.claim is None or job.claim.number != claim.number or job.preempt_by is not None:
                return None
            return self._event("preempt", job=id, claim=claim.number, by=by)

        return self._append(decide) is not None

    # ---- questions --------------------------------------------------------------------------------------

    def find(self, which: str) -> Job:
        """The job of this id, unique end of an id, or name.

        Raises:
            ValueError: where none or several fit.
        """
        if which in self.jobs:
            return self.jobs[which]
        found = [job for job in self.jobs.values() if which and (job.id.endswith(which) or job.spec.name == which)]
        if len(found) != 1:
            raise ValueError(f"{len(found) or 'no'} jobs {which!r} in {self.folder}: give the id, see `dwslm queue ls`")
        return found[0]

    def in_order(self) -> Iterator[Job]:
        """Jobs that a worker may take now, the next first."""
        now = self.clock()
        for *_, id in list(self._waiting):
            if self.ready(self.jobs[id], now):
                yield self.jobs[id]

    def ready(self, job: Job, now: float | None = None) -> bool:
        """Whether a worker may take it."""
        return not job.over and job.claim is None and self.standing(job, now).why == ""

    def may_become_ready(self, fits: Callable[[Job], bool] = lambda job: True) -> bool:
        """Whether waiting is of use: a job that fits runs, or waits for something else than a person."""
        waiting = (self.jobs[id] for *_, id in self._waiting)
        return any(map(fits, self.running.values())) or any(fits(job) and self._moves(job) for job in waiting)

    def standing(self, job: Job, now: float | None = None, reported: float | None = None) -> Standing:
        """Where a job stands. `reported`: when its run last wrote something, for telling a stale one."""
        now = self.clock() if now is None else now
        if job.claim is not None:
            last = max(job.claim.time, reported or 0.0)
            if job.hold or job.dropped or job.preempt_by:
                return Standing("running", "was asked to save and leave")
            return (
                Standing("running")
                if now - last < STALE_S
                else Standing("stale", f"last report {_ago(now - last)} ago")
            )
        if job.dropped is not None:
            return Standing("stopped" if job.starts else "dropped", job.dropped)
        if job.over:
            assert job.ended is not None
            if job.ended["kind"] == DONE:
                return Standing("done")
            return Standing("failed", f"{job.ended['kind']}: {job.ended.get('reason', '')}")
        if job.hold is not None and (job.hold["until"] is None or now < job.hold["until"]):
            return Standing("paused", f"waiting on purpose: {job.hold['reason']}")
        for id in job.spec.after:
            if not self.done(id):
                other = self.jobs[id]
                return Standing("queued", f"waits for {id}" + (", which will not be done" if other.over else ""))
        if job.not_before > now:
            why = job.ended["kind"] if job.ended else "waiting"
            return Standing("queued", f"{why}; tried again in {job.not_before - now:.0f} s")
        return Standing("queued")

    def log_of(self, id: str) -> list[tuple[int, Event]]:
        """Everything that was done with a job since it was added."""
        return [(number, event) for number, event in QueueLog(self.folder / "log").new() if event.get("job") == id]

    def done(self, id: str) -> bool:
        """Whether a job has come to its end."""
        job = self.jobs[id]
        return job.over and job.dropped is None and job.ended is not None and job.ended["kind"] == DONE

    def gone(self, claim: Claim, host: str, boot: str) -> str | None:
        """Why a claim's worker is no more, None while it may live. Locks are believed on their own host alone."""
        lock = self.lock_path(claim.worker)
        if (claim.host, claim.boot) == (host, boot):
            return None if held(lock) else "its worker was killed"
        try:
            silent = self.clock() - lock.stat().st_mtime
        except OSError:
            return f"its worker on {claim.host} left no lock file"
        if claim.host == host:
            return "the machine was started anew" if silent > REBOOT_S else None
        return f"host {claim.host} is silent for {_ago(silent)}" if silent > SILENT_S else None

    def lock_path(self, worker: str) -> Path:
        """File that a worker holds locked, and touches now and then."""
        return self.folder / "workers" / f"{worker}.lock"

    # ---- inside -----------------------------------------------------------------------------------------

    def _moves(self, job: Job) -> bool:
        """Whether a job that is not over runs, or will without a person's help."""
        if job.claim is not None:
            return True
        others = (self.jobs[id] for id in job.spec.after if not self.done(id))
        return job.hold is None and all(not other.over and self._moves(other) for other in others)

    def _event(self, kind: str, /, **about: Any) -> Event:
        return {"event": kind, "time": self.clock(), **about}

    def _append(self, decide: Callable[[], Event | None], durable: bool = True) -> int | None:
        return self.log.append(decide, self._take, durable)

    def _change(self, id: str, kind: str, **about: Any) -> None:
        self._append(lambda: self._event(kind, job=id, **about))

    def _take(self, number: int, event: Event) -> None:
        """What an event changes."""
        kind, time = event["event"], float(event.get("time", 0.0))
        if kind == "add":
            known = {each.name for each in fields(JobSpec)}
            for plain in event["jobs"]:
                spec = JobSpec(**{key: value for key, value in plain.items() if key in known})
                self.jobs[spec.id] = job = Job(spec, order=len(self.jobs), added=time, since=time)
                self._place(job)
            return
        job_or_none = self.jobs.get(event.get("job", ""))
        if job_or_none is None:
            return  # of a later version of this program, or after a power cut
        job = job_or_none
        if kind == "claim":
            job.claim = Claim(number, event["worker"], event["host"], event["boot"], event["gpus"], time)
            job.starts += 1
            job.hold = None  # it had run out, or nobody could have claimed
        elif kind == "end":
            current = job.claim.number if job.claim else None
            if event["claim"] != current and not (current is None and event["claim"] > job.closed):
                return
            self._end(job, event, time)
        elif kind == "hold":
            job.hold = {"reason": event["reason"], "until": event.get("until")}
            job.since = job.since if job.claim else time
        elif kind == "release":
            job.hold, job.since = None, time
        elif kind == "retry":
            job.failures.clear()
            job.over, job.dropped, job.not_before, job.since = False, None, 0.0, time
            job.avoid.clear()
        elif kind == "drop":
            job.dropped, job.decision = event["reason"], event.get("decision")
            job.over, job.since = True, job.since if job.claim else time
        elif kind == "preempt" and job.claim is not None and job.claim.number == event["claim"]:
            job.preempt_by = event["by"]
        self._place(job)

    def _end(self, job: Job, event: Event, time: float) -> None:
        job.closed, job.claim, job.preempt_by = event["claim"], None, None
        job.ended, job.since = event, time
        saved = event.get("saved")
        if saved is not None and (job.saved is None or saved > job.saved):
            job.saved = saved
            job.failures.clear()
        job.avoid.update(event.get("avoid") or ())
        kind = event["kind"]
        if kind == DONE:
            job.over, job.dropped = True, None
        elif kind != PREEMPTED:
            job.failures[kind] += 1
            job.not_before = time + float(event.get("wait_s") or 0.0)
            job.over = job.over or job.failures[kind] > int(event.get("retries") or 0)

    def _place(self, job: Job) -> None:
        """Puts a job where it now belongs: among the running, the waiting, or neither."""
        entry = (*job.key, job.id)
        at = bisect.bisect_left(self._waiting, entry)
        here = at < len(self._waiting) and self._waiting[at] == entry
        wanted = job.claim is None and not job.over
        if wanted and not here:
            self._waiting.insert(at, entry)
        elif here and not wanted:
            del self._waiting[at]
        if job.claim is not None:
            self.running[job.id] = job
        else:
            self.running.pop(job.id, None)


def held(path: Path) -> bool:
    """Whether a process of this host holds the lock of a file. The kernel frees it with the process, however that ends."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _ago(seconds: float) -> str:
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"
