"""Keeps a training run going: starts it, watches it, and when it ends decides why and whether it is tried again."""

import os
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Protocol

from dwslm.machine.attempt import Attempt
from dwslm.machine.boot import boot_id, oom_kills
from dwslm.machine.classify import CACHE, DONE, STOPPED, XID, Evidence, Verdict, back_off, classify
from dwslm.machine.clocks import breaks_cap, command, service
from dwslm.machine.health_log import HealthLog, Watched
from dwslm.machine.lease import Lease
from dwslm.machine.leash import FORWARDED
from dwslm.machine.notify import notify
from dwslm.machine.watch import Deadlines, Progress

KILLED_CODE = 128


@dataclass
class SupervisorSettings:
    """How patient the supervisor is, and whom it tells."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    """How long a run may be silent."""
    retries: int = 20
    """Tries after the first one, of all kinds together; each kind of end has its own limit, see `RETRIES`."""
    notify: list[str] = field(default_factory=list)
    """Words of the command that is told of failures, stalls and the end; empty for none."""
    clock_cap_mhz: int | None = None
    """The cap that the GPUs' clocks are expected to have; None where none is."""
    back_off: Callable[[int], float] = back_off
    """Seconds to wait after so many failures in a row."""
    poll_s: float = 0.2
    """Seconds between two looks at the run's files."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries={self.retries} must be 0 or more")
        if self.clock_cap_mhz is not None and self.clock_cap_mhz < 1:
            raise ValueError(f"clock_cap_mhz={self.clock_cap_mhz} must be above 0")


class EventLog(Protocol):
    """Where events go: the run folder's writer."""

    def event(self, kind: str, /, **fields: Any) -> None: ...
    def close(self) -> None: ...


@dataclass
class Job:
    """What is supervised, and what of it only the caller knows."""

    command: list[str]
    """Starts the run."""
    resume: Callable[[Path], list[str]]
    """The command that goes on with the run in this folder."""
    environment: dict[str, str]
    """Of the process. The name `announce` is added to it."""
    announce: str
    """Variable that names the file into which the process writes its run folder."""
    open_log: Callable[[Path], EventLog]
    """Opens the supervisor's own events of a run."""
    run: Path | None = None
    """The run folder, where it is known before the start."""
    history: Sequence[Mapping[str, Any]] = ()
    """Events that earlier supervisors wrote of this run."""
    heal_caches: Callable[[], int] = lambda: 0
    """Moves damaged compiler caches aside; returns how many parts."""
    sync_caches: Callable[[], None] = lambda: None
    """Brings compiler caches to disk."""


class Supervisor:
    """Runs a job to its end. Must be used in the main thread: signals are passed on from there."""

    def __init__(
        self,
        job: Job,
        settings: SupervisorSettings,
        *,
        gpus: Mapping[str, Watched] | None = None,
        leases: Sequence[Lease] = (),
        say: Callable[[str], None] = print,
        stderr: BinaryIO | None = None,
    ):
        self.job, self.settings, self.say, self.leases, self.stderr = job, settings, say, leases, stderr
        self.gpus = dict(gpus or {})
        self.folder: Path | None = None
        self.log: EventLog | None = None
        self.waiting: list[tuple[str, dict[str, Any]]] = []  # events from before the folder was known
        self.signals: list[int] = []
        self.passed_on = 0
        self.attempt: Attempt | None = None
        self.progress = Progress(settings.deadlines, time.monotonic())
        self.health = HealthLog(self.gpus, on_row=self._health_row)
        self.seen: list[dict[str, Any]] = []  # rows of health that the main thread has not looked at
        self.xid: list[int] = []
        self.energy: list[tuple[int, float]] = []  # tokens and joules at the first and the last row of metrics
        self.cap_broken = self.warm = False
        self.dumps = 0
        self.stop = threading.Event()

    def run(self) -> int:
        """Returns the exit code: 0 at the end of the plan, 75 where it was told to leave and has saved, else its own."""
        before = {number: signal.signal(number, self._signal) for number in FORWARDED}
        try:
            with self.health:
                return self._run()
        finally:
            if self.attempt is not None:
                self.attempt.kill()
            if self.log is not None:
                self.log.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        if not self.gpus:
            self.say("no GPU here: no lease, no health samples")
        self.event(
            "supervised", boot_id=boot_id(), pid=os.getpid(), host=socket.gethostname(), gpus=list(self.gpus),
            clock_cap_mhz=self.settings.clock_cap_mhz,
        )  # fmt: skip
        if told := what_happened(self.job.history, boot_id()):
            self.event(told[0], reason=told[1])
            self.say(told[1])
        if self.job.run is not None:
            self._found(self.job.run)
        failures: Counter[str] = Counter()
        tries = 0
        command = self.job.command
        while True:
            verdict, code = self._attempt(command)
            if verdict.kind == DONE or verdict.kind == STOPPED or self.signals:
                self._end("end", verdict)
                return 0 if verdict.kind == DONE else _exit_code(code)
            if self.progress.saved is not None:
                failures.clear()
            failures[verdict.kind] += 1
            if failures[verdict.kind] > verdict.retries or tries >= self.settings.retries:
                self._give_up(verdict, failures[verdict.kind])
                return _exit_code(code)
            tries += 1
            seconds = 0.0 if verdict.kind == CACHE else self.settings.back_off(failures[verdict.kind])
            if verdict.kind == CACHE:
                moved = self.job.heal_caches()
                self.event("cache_healed", parts=moved)
                self.say(f"a compiler cache is damaged: moved {moved} parts aside")
            self.event("retry", kind=verdict.kind, seconds=seconds)
            self.say(f"trying again in {seconds:.0f} s")
            self.tell("failure", verdict.reason, kind=verdict.kind, retry_in=seconds)
            if self.stop.wait(seconds):
                self._end("end", Verdict(STOPPED, f"{signal.Signals(self.signals[0]).name} while waiting to try again"))
                return _exit_code(code)
            command = self.job.resume(self.folder) if self.folder is not None else self.job.command

    # ---- one try ----------------------------------------------------------------------------------------

    def _attempt(self, command: Sequence[str]) -> tuple[Verdict, int]:
        known = set(os.listdir(self.folder)) if self.folder is not None else set()
        started = time.monotonic()
        self.progress = Progress(self.settings.deadlines, started)
        self.xid, self.energy = [], []
        kills = oom_kills()
        hang = None
        with tempfile.TemporaryDirectory(prefix="dwslm-run-") as place:
            announced = Path(place, "run")
            self.event("attempt", command=list(command))
            attempt = Attempt(
                command,
                self.job.environment | {self.job.announce: str(announced)},
                [lease.fileno() for lease in self.leases],
                self.stderr,
            )
            self.attempt = attempt
            while (code := attempt.poll()) is None:
                # Each once: to the training a second one means that it shall not save.
                while self.passed_on < len(self.signals):
                    attempt.send(self.signals[self.passed_on])
                    self.passed_on += 1
                self._look(announced, known)
                hang = self.progress.overdue(time.monotonic())
                if hang is not None:
                    code = self._hang(attempt, hang)
                    break
                time.sleep(self.settings.poll_s)
            text = attempt.close()
            self._look(announced, known)
            self.attempt = None
        last = self.progress.last
        verdict = classify(
            Evidence(
                code=code,
                event=last if last is not None and last["event"] not in ("start", "resume") else None,
                text=text,
                hang=hang,
                xid=self.xid,
                oom_kills=oom_kills() - kills,
            )
        )
        self.event(
            "attempt_ended", kind=verdict.kind, reason=verdict.reason, code=code, seconds=round(time.monotonic() - started, 1),
            joules_per_token=self._joules_per_token(),
        )  # fmt: skip
        self.say(f"{verdict.kind}: {verdict.reason}" if verdict.kind != DONE else "done")
        return verdict, code

    def _look(self, announced: Path, known: set[str]) -> None:
        if self.folder is None and announced.exists():
            self._found(Path(announced.read_text(encoding="utf-8")))
        if self.folder is not None:
            self.progress.follow(self.folder, known)
        rows = self.progress.rows
        self.progress.look(time.monotonic())
        if self.progress.rows > rows:
            self._row()
        seen, self.seen = self.seen, []
        for row in seen:
            self._judge_health(row)

    def _row(self) -> None:
        """A new row of metrics: the compilers have done their work, and the energy counter stands for these tokens."""
        if not self.warm:
            self.warm = True
            self.job.sync_caches()
        told = [gpu.energy_j() for gpu in self.gpus.values()]
        if told and self.progress.tokens is not None and None not in told:
            self.energy = [
                *self.energy[:1],
                (self.progress.tokens, sum(joules for joules in told if joules is not None)),
            ]

    def _joules_per_token(self) -> float | None:
        if len(self.energy) < 2 or self.energy[1][0] <= self.energy[0][0]:
            return None
        (tokens, joules), (more_tokens, more_joules) = self.energy
        return (more_joules - joules) / (more_tokens - tokens)

    def _hang(self, attempt: Attempt, hang: str) -> int:
        self.say(f"hang: {hang}")
        stacks = attempt.stacks()
        place = None
        if self.folder is not None and stacks:
            self.dumps += 1
            place = self.folder / f"stacks-{socket.gethostname()}-{os.getpid()}-{self.dumps}.txt"
            place.write_text(f"{hang}\n\n{stacks}", encoding="utf-8")
        self.event("stall", reason=hang, stacks=place.name if place else None)
        self.tell("stall", hang, stacks=str(place) if place else None)
        return attempt.kill()

    # ---- health -----------------------------------------------------------------------------------------

    def _health_row(self, row: dict[str, Any]) -> None:
        self.seen.append(row)  # in the sampling thread: only kept, for the main thread to look at

    def _judge_health(self, row: Mapping[str, Any]) -> None:
        for code in row["xid"]:
            meaning, what = XID.get(code, ("not in our table", "see NVIDIA's Xid catalog"))
            self.xid.append(code)
            self.event("xid", gpu=row["gpu"], code=code, meaning=meaning, action=what)
            self.say(f"GPU {row['gpu']}: Xid {code}, {meaning}: {what}")
        cap, clock = self.settings.clock_cap_mhz, row["sm_mhz"]
        if cap is not None and clock is not None and breaks_cap(clock["max"], cap) and not self.cap_broken:
            self.cap_broken = True
            self.event("clock_cap", gpu=row["gpu"], expected_mhz=cap, seen_mhz=clock["max"])
            told = f"GPU {row['gpu']} runs at {clock['max']} MHz, above the cap of {cap} MHz that was expected"
            self.say(f"{told}. Set it: {command(cap)}\nAt every boot, as\n{service(cap)}")
            self.tell("clock_cap", told)

    # ---- words ------------------------------------------------------------------------------------------

    def _found(self, folder: Path) -> None:
        self.folder = folder
        self.log = self.job.open_log(folder)
        self.health.write_to(folder / f"health-{socket.gethostname()}.jsonl")
        for kind, fields in self.waiting:
            self.log.event(kind, **fields)
        self.waiting.clear()

    def event(self, kind: str, /, **fields: Any) -> None:
        """Into the run's folder, now or once it is known."""
        if self.log is None:
            self.waiting.append((kind, fields))
        else:
            if self.progress.step is not None:
                fields = {"step": self.progress.step, "tokens": self.progress.tokens} | fields
            try:
                self.log.event(kind, **fields)
            except OSError as error:  # a full disk: the run's own words say so too
                self.say(f"an event is lost: {error}")

    def tell(self, event: str, reason: str, **fields: Any) -> None:
        """Runs the user's command; what goes wrong there is said and noted, no more."""
        if not self.settings.notify:
            return
        wrong = notify(
            self.settings.notify,
            {
                "event": event,
                "run": self.folder.name if self.folder else "",
                "folder": str(self.folder or ""),
                "reason": reason,
                "step": self.progress.step,
                "host": socket.gethostname(),
                "time": time.time(),
                **fields,
            },
        )
        if wrong:
            self.say(f"notify: {wrong}")
            self.event("notify_failed", reason=wrong)

    def _give_up(self, verdict: Verdict, failures: int) -> None:
        if verdict.retries:
            self.say(f"{failures} times without a new checkpoint in between, the last time {verdict.kind}: giving up")
        # The run's last word may be missing (a kill), and then nobody would know that it is not going on.
        self.event("failed", error=verdict.kind, reason=verdict.reason)
        self._end("failed", verdict)

    def _end(self, event: str, verdict: Verdict) -> None:
        self.event("supervisor_ended", kind=verdict.kind, reason=verdict.reason)
        self.tell(event, verdict.reason, kind=verdict.kind)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self.stop.set()


def what_happened(history: Sequence[Mapping[str, Any]], boot: str | None) -> tuple[str, str] | None:
    """What became of the last supervisor of a run, from its events: a kind of event and a line; None if it ended as it should."""
    begun = next((row for row in reversed(history) if row["event"] == "supervised"), None)
    if begun is None or any(row["event"] == "supervisor_ended" for row in history[history.index(begun) :]):
        return None
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(history[-1].get("time", 0)))
    if begun.get("host") != socket.gethostname():
        return "supervisor_lost", f"the run was supervised on {begun.get('host')} and not ended there; last word {when}"
    if boot is not None and begun.get("boot_id") not in (None, boot):
        return "machine_reset", f"the machine was started anew while the run was supervised; last word before it {when}"
    return "supervisor_lost", f"the last supervisor was killed; its last word {when}"


def _exit_code(code: int) -> int:
    return code if code > 0 else KILLED_CODE - code if code < 0 else 1
