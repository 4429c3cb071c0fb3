"""Running one job of the queue: its command, its supervisor, and what it is told while it runs."""

import json
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dwslm.cli.child import ANNOUNCE, cache_folders, cache_key, cache_root
from dwslm.cli.find import REPOSITORY
from dwslm.cli.queue_add import OF_JOB, fingerprint, runs_of
from dwslm.cli.run import VISIBLE, open_log, sync
from dwslm.machine import compiler_cache
from dwslm.machine.classify import CACHE, HARDWARE, RETRIES, STOPPED, back_off
from dwslm.machine.health import Gpu
from dwslm.machine.lease import Lease, Taken, take
from dwslm.machine.supervisor import Job as Supervised
from dwslm.machine.supervisor import Supervisor, SupervisorSettings
from dwslm.machine.watch import Deadlines
from dwslm.runs.folder import RunFolder
from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import DONE, PREEMPTED, Claim, Job, JobSpec
from dwslm.runs.queue_worker import Outcome, leaving, makes_room_for
from dwslm.runs.reader import events, last_lifecycle

WATCH_S = 1.0
HARDWARE_RETRIES = 2
"""A GPU that failed is not given to the job again, so another one may do."""
HEAD = """# Every setting of a job, as it was when it was added to the queue.
defaults:
  - run_schema
  - _self_
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none
hydra:
  output_subdir: null
  run:
    dir: .
"""


@dataclass
class Leases:
    """GPUs held for one job."""

    held: list[Lease] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [lease.gpu for lease in self.held]

    def release(self) -> None:
        for lease in self.held:
            lease.release()


@dataclass
class Place:
    """Where a worker works."""

    queue: Path
    """Folder of the queue, absolute."""
    lock: Lease
    """The worker's own lock; handed to all it starts, so that its jobs are free only when nothing of them is left."""
    host: str
    gpus: Mapping[str, Gpu | None]
    """GPUs that it may lease, by UUID."""
    environment: Mapping[str, str]
    say: Callable[[str], None]
    lease_folder: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    """How long a training may be silent."""
    asked_to_stop: bool = False
    """A signal came that ends the worker, not only its job."""

    def take(self, spec: JobSpec, avoid: frozenset[str]) -> Leases | None:
        """GPUs for a job; None where too few are free."""
        if not spec.gpus:
            return Leases()
        fit = [gpu for gpu in self.gpus if gpu not in avoid]
        try:
            return Leases(take(fit, spec.gpus, what=f"queue job {spec.id} {spec.name}", folder=self.lease_folder))
        except Taken:
            return None

    def execute(self, job: Job, claim: Claim, leases: Leases) -> Outcome:
        """Runs a job to its end, whatever that is."""
        spec = job.spec
        run = runs_of([spec]).get(spec.id)
        if run is not None and (last := last_lifecycle(run)) is not None and last["event"] == "done":
            return Outcome(DONE, {"run": str(run.path), "reason": "was done already"})
        try:
            command = self.command(spec, run)
        except ValueError as error:
            return Outcome("bad_configuration", {"reason": str(error), "retries": 0})
        self.say(f"{spec.id} {spec.name}: {'goes on' if run else 'starts'}, GPUs {', '.join(claim.gpus) or 'none'}")
        kind, about = self.supervise(job, claim, leases, command, run)
        run = runs_of([spec]).get(spec.id)
        self.say(f"{spec.id} {spec.name}: {kind}" + (f", {about['reason']}" if kind != DONE else ""))
        return Outcome(kind, about | {"run": str(run.path) if run else None, "saved": newest_step(run)})

    def command(self, spec: JobSpec, run: RunFolder | None) -> list[str]:
        """What starts a job, or goes on with its run.

        Raises:
            ValueError: where a scoring's run is not there, or the text is another than when the job was added.
        """
        script = [sys.executable, str(REPOSITORY / spec.program)]
        if not spec.program:
            return list(spec.arguments)
        if spec.program == "eval.py":
            return [*script, *(self._with_run(word) for word in spec.arguments)]
        if run is not None:
            return [*script, f"resume={quoted(run)}"]
        assert spec.config is not None
        data = Path(spec.cwd, spec.config["data"]["path"])
        if spec.data is not None and fingerprint(data) != spec.data:
            raise ValueError(
                f"{data} is not the text that it was when the job was added: drop the job and add it again"
            )
        folder = self.queue / "configs"
        folder.mkdir(parents=True, exist_ok=True)
        # JSON is YAML; the keys of a mapping after another's are one mapping.
        body = "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in spec.config.items())
        (folder / f"{spec.id}.yaml").write_text(HEAD + body, encoding="utf-8")
        return [*script, "--config-dir", str(folder), "--config-name", spec.id]

    def _with_run(self, word: str) -> str:
        name, _, value = word.partition("=")
        if not value.startswith(OF_JOB):
            return word
        of = value.removeprefix(OF_JOB)
        run = runs_of([Queue(self.queue).find(of).spec]).get(of)
        if run is None:
            raise ValueError(f"job {of} has left no run to score")
        return f"{name}={quoted(run)}"

    def supervise(
        self, job: Job, claim: Claim, leases: Leases, command: list[str], run: RunFolder | None
    ) -> tuple[str, dict[str, Any]]:
        """Runs a command under a supervisor. Returns how it ended, for `Queue.end`."""
        spec = job.spec
        root = cache_root() / cache_key()
        folders = list(cache_folders(root, self.environment).values())
        output = self.queue / "output" / f"{spec.id}.log"
        output.parent.mkdir(parents=True, exist_ok=True)
        watched = {name: gpu for name in claim.gpus if (gpu := self.gpus[name]) is not None}
        for gpu in watched.values():
            gpu.watch_xid()  # codes from now on: earlier ones are of other jobs
        before = os.getcwd()
        with open(output, "ab") as out, redirected(out.fileno()):
            try:
                os.chdir(spec.cwd)
                supervisor = Recording(
                    Supervised(
                        command=command,
                        resume=lambda folder: command,  # never asked for: what is tried again goes through the queue
                        environment={**self.environment, VISIBLE: ",".join(claim.gpus)},
                        announce=ANNOUNCE,
                        open_log=open_log,
                        run=run.path.resolve() if run else None,
                        history=[row for row in events(run) if row["writer"] == "supervisor"] if run else [],
                        sync_caches=lambda: sync(folders),
                    ),
                    # Only training says how far it is.
                    SupervisorSettings(
                        self.deadlines if spec.program == "train.py" else Deadlines(start=math.inf), retries=0
                    ),
                    gpus=watched,
                    leases=[*leases.held, self.lock],
                    say=lambda text: print(f"supervisor: {text}", flush=True),
                    stderr=out,
                )
                with Watcher(self, job, claim, supervisor) as watcher:
                    supervisor.run()
            finally:
                os.chdir(before)
        if set(supervisor.signals) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            self.asked_to_stop = True
        kind, reason = supervisor.ended["kind"], supervisor.ended["reason"]
        code = supervisor.ended["code"]
        if kind == STOPPED or (supervisor.signals and code in {-number for number in supervisor.signals}):
            return PREEMPTED, {"reason": watcher.why or reason, "code": code}
        if kind == CACHE:
            self.say(f"a compiler cache is damaged: moved {compiler_cache.move_all(folders)} parts aside")
        about = {"reason": reason, "code": code, "retries": RETRIES[kind], "wait_s": back_off(job.failures[kind] + 1)}
        if kind == HARDWARE:
            about |= {"retries": HARDWARE_RETRIES, "avoid": list(claim.gpus)}
        if kind == CACHE:
            about["wait_s"] = 0.0
        return (DONE, {"code": code}) if kind == DONE else (kind, about)


class Recording(Supervisor):
    """A supervisor that keeps how its attempt ended."""

    ended: Mapping[str, Any] = {"kind": "crash", "reason": "never started", "code": 1}

    def event(self, kind: str, /, **fields: Any) -> None:
        if kind == "attempt_ended":
            self.ended = fields
        super().event(kind, **fields)


class Watcher:
    """While a job runs: shows that its worker lives, and asks it to save and leave where it is to."""

    def __init__(self, place: Place, job: Job, claim: Claim, supervisor: Supervisor, poll_s: float = WATCH_S):
        self.place, self.id, self.claim, self.supervisor, self.poll_s = place, job.id, claim, supervisor, poll_s
        self.why = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        queue = None
        while not self._over.wait(self.poll_s):
            try:
                queue = queue or Queue(self.place.queue)
                queue.refresh()
                os.utime(self.place.lock.path)
                self.why = self.why or self._reason(queue)
            except OSError as error:  # a network disk that is away for a moment
                self.place.say(f"the queue cannot be read: {error}")
            # Again and again until it is heard: the supervisor may not listen yet.
            if self.why and not self.supervisor.signals:
                os.kill(os.getpid(), signal.SIGUSR1)

    def _reason(self, queue: Queue) -> str:
        job = queue.jobs[self.id]
        if job.claim is None or job.claim.number != self.claim.number:
            return "another worker took the job over"
        if leaving(job):
            return job.dropped or (job.hold["reason"] if job.hold else f"makes room for {job.preempt_by}")
        other = makes_room_for(queue, job, self.place.host, len(self.place.gpus))
        if other is not None and queue.preempt(self.id, self.claim, by=other.id):
            return f"makes room for {other.id} ({other.spec.name})"
        return ""


class redirected:  # noqa: N801 (used like contextlib's)
    """What this process and its children print goes to a file meanwhile."""

    def __init__(self, fd: int):
        self.fd = fd

    def __enter__(self) -> None:
        sys.stdout.flush()
        self.kept = os.dup(1)
        os.dup2(self.fd, 1)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        os.dup2(self.kept, 1)
        os.close(self.kept)


def newest_step(run: RunFolder | None) -> int | None:
    """Step of a run's newest whole checkpoint, None where there is none."""
    if run is None or not run.checkpoints.is_dir():
        return None
    steps = [re.fullmatch(r"step-(\d+)", path.parent.name) for path in run.checkpoints.glob("step-*/manifest.json")]
    return max((int(step[1]) for step in steps if step), default=None)


def saved_of(spec: JobSpec) -> int | None:
    """Step of the newest checkpoint that a job has made."""
    return newest_step(runs_of([spec]).get(spec.id)) if spec.program == "train.py" else None


def quoted(run: RunFolder) -> str:
    """A run's path as a value of Hydra's grammar."""
    path = str(run.path.resolve())
    escaped = path.replace("'", "\\'")
    return path if re.fullmatch(r"[\w./:+-]+", path) else f"'{escaped}'"
