"""Ranks that died or hang: every rank says four times a second how far it is, one judges, and all leave when one is lost.

A rank's beat holds how many meetings (collectives and messages) it has come to, and where its main thread is. Rank 0
judges the others and rank 1 judges rank 0, by their own clocks: who has ended without saying so, who is silent, and who
keeps the others waiting. The verdict goes to all through the store; each then writes the stacks of all its threads and
leaves. A process that holds the interpreter's lock can't beat: a timer that needs no lock writes its stacks and ends it.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

BEAT_SECONDS = 0.25
LEAVE_SECONDS = 5.0
"""Between a verdict and the end of the process, where its main thread has not left by itself."""
FRAMES, INNERMOST = 12, 3  # most frames that a beat carries: ours, and the last few whosever they are
PACKAGE = Path(__file__).resolve().parents[1]
STALL_FACTOR = 10.0
COMPILER_SECONDS = 300.0
"""How long a rank may say nothing while it starts or compiles: compilers may hold the interpreter's lock, and so the beat."""
LOST, FAILED, LEFT = "lost", "failed", "left"
"""Kinds of verdicts: a rank that others found lost, one that has given its own reason, one that a signal asked to leave."""


class Store(Protocol):
    """What is used of torch's key-value store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Beat:
    """How far a rank was a moment ago."""

    rank: int
    serial: int
    meetings: int
    """How many it has come to."""
    patience: float
    """Seconds that it may keep the others waiting."""
    quiet: float
    """Seconds that it may say nothing."""
    host: str
    pid: int
    stack: list[str]
    """Of its main thread, innermost first."""
    left: bool = False
    """It has ended as it should."""


@dataclass(frozen=True)
class Verdict:
    """Why all ranks leave."""

    kind: str
    rank: int
    """Which one it is about."""
    reason: str
    stack: list[str]

    def __str__(self) -> str:
        at = f"; last seen in {' < '.join(self.stack)}" if self.stack else ""
        return f"{self.reason}{at}"


class Judge:
    """Decides from beats; pure but for its memory. Times in seconds, by the judge's own clock."""

    def __init__(self, ranks: Sequence[int], silence: float):
        """ranks: those that are judged, and the judge; silence: the patience of a step."""
        self.ranks, self.silence = list(ranks), silence
        self._beats: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}  # last beat
        self._moved: dict[int, float] = {}  # last meeting
        self._passed: dict[int, float] = {}  # since when others have been to more meetings
        self._began: float | None = None
        self._longest = 0.0  # between two moves of anyone, while all were as impatient as they get

    def hear(self, beat: Beat, now: float) -> None:
        """Takes note of a beat, new or not."""
        before = self._beats.get(beat.rank)
        if before is None or beat.serial != before.serial:
            self._heard[beat.rank] = now
        if before is None or beat.meetings != before.meetings:
            if self._moved and all(b.patience <= self.silence for b in self._beats.values()):
                self._longest = max(self._longest, now - max(self._moved.values()))
            self._moved[beat.rank] = now
            self._passed.pop(beat.rank, None)
        self._beats[beat.rank] = beat

    def verdict(self, now: float, ended: Callable[[Beat], bool]) -> Verdict | None:
        """None while all is well. `ended` tells whether a rank's process is known to be gone."""
        self._began = now if self._began is None else self._began
        for rank in self.ranks:
            if rank not in self._beats and now - self._began > COMPILER_SECONDS:
                return Verdict(LOST, rank, f"rank {rank} has not come within {now - self._began:.0f} s", [])
        here = [self._beats[rank] for rank in self.ranks if rank in self._beats and not self._beats[rank].left]
        most = max((beat.meetings for beat in here), default=0)
        for beat in here:
            who = f"rank {beat.rank} (pid {beat.pid} on {beat.host})"
            if ended(beat):
                return Verdict(LOST, beat.rank, f"{who} has died", beat.stack)
            silent = now - self._heard[beat.rank]
            if silent > beat.quiet:
                told = f"{who} has not been heard of for {silent:.0f} s"
                return Verdict(LOST, beat.rank, told, beat.stack)
            if beat.meetings < most:
                waited = now - self._passed.setdefault(beat.rank, now)
                if waited > beat.patience:
                    return Verdict(LOST, beat.rank, f"{who} has kept the others waiting for {waited:.0f} s", beat.stack)
        if here and self._longest and all(beat.patience <= self.silence for beat in here):
            still = now - max(self._moved.values())
            if still > max(self.silence, STALL_FACTOR * self._longest):
                last = max(here, key=lambda beat: self._moved[beat.rank])
                told = f"no rank has moved for {still:.0f} s; rank {last.rank} was the last that did"
                return Verdict(LOST, last.rank, told, last.stack)
        return None


class RankLost(OSError):
    """A rank has died, hangs, or failed, so the others can't go on."""

    def __init__(self, verdict: Verdict):
        super().__init__(str(verdict))
        self.verdict = verdict


class Watch:
    """A rank's own beat, its judge where it has that office, and its end where there is a verdict."""

    def __init__(self, store: Store, rank: int, world: int, *, silence: float, patience: float):
        """store: for this thread alone; silence: see `RankSettings`; patience: what it begins with."""
        self.rank, self.patience, self.quiet, self.meetings = rank, patience, COMPILER_SECONDS, 0
        self.found: Verdict | None = None
        """Once it has come."""
        self.on_lost: Callable[[Verdict], None] = lambda verdict: None
        """Called once, from another thread, where the main thread doesn't leave by itself."""
        self._store, self._serial = store, 0
        judged = range(1, world) if rank == 0 else [0] if rank == 1 else []
        self._judged = list(judged)
        self._judge = Judge([*self._judged, rank], silence)
        self._host, self._main = socket.gethostname(), threading.main_thread().ident
        self._visible: set[int] = set()
        self._leaving = threading.Event()
        self._came = threading.Event()
        self._stacks: IO[str] | None = None
        self._dump_more: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def silence(self) -> float:
        return self._judge.silence

    @silence.setter
    def silence(self, seconds: float) -> None:
        self._judge.silence = seconds

    def write_to(self, stacks: Path, dump_more: Callable[[], None] = lambda: None) -> None:
        """Where stacks go from now on, and what else is to be written at a verdict."""
        self._stacks = open(stacks, "w", encoding="utf-8")  # noqa: SIM115 (kept open: a hung process writes into it)
        self._dump_more = dump_more

    def wait(self, seconds: float) -> Verdict | None:
        """The verdict, as soon as there is one."""
        self._came.wait(seconds)
        return self.found

    def end(self, verdict: Verdict) -> None:
        """Makes all other ranks leave. The first verdict counts."""
        with contextlib.suppress(Exception), self._lock:  # the store may be what is gone
            if not self._store.check(["end"]):
                self._store.set("end", json.dumps(asdict(verdict)))

    def close(self) -> None:
        """This rank ends as it should; its silence means nothing from here on."""
        self._leaving.set()
        self._thread.join(2 * BEAT_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception), self._lock:
            self._beat(left=True)
        if self._stacks is not None:
            path = Path(self._stacks.name)
            self._stacks.close()
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    def _work(self) -> None:
        while not self._leaving.is_set():
            if self._stacks is not None:  # from a thread of C's, which needs no interpreter lock
                faulthandler.dump_traceback_later(self.quiet, file=self._stacks, exit=True)
            try:
                with self._lock:
                    self._beat()
                    verdict = self._look()
            except Exception as error:
                time.sleep(2 * BEAT_SECONDS)  # it goes with rank 0, where that one keeps it, whose end then shows
                verdict = self._judge.verdict(time.monotonic(), self._ended) or Verdict(
                    LOST,
                    0,
                    f"rank 0 or its launcher is gone, and the ranks' meeting place with it: {text_of(error)}",
                    [],
                )
            if verdict is not None:
                self._leave(verdict)
                return
            self._leaving.wait(BEAT_SECONDS)

    def _beat(self, left: bool = False) -> None:
        self._serial += 1
        frame = sys._current_frames().get(self._main or 0)
        stack: list[str] = []
        depth = 0
        while frame is not None and len(stack) < FRAMES:
            path = Path(frame.f_code.co_filename)
            if depth < INNERMOST or PACKAGE in path.parents:
                stack.append(f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}")
            frame, depth = frame.f_back, depth + 1
        limits, place = (self.patience, self.quiet), (self._host, os.getpid())
        beat = Beat(self.rank, self._serial, self.meetings, *limits, *place, stack, left)
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _look(self) -> Verdict | None:
        """The verdict that somebody gave, or one of our own, which is then known to all."""
        if not self._store.check(["end"]) and self._judged:
            now = time.monotonic()
            for rank in [*self._judged, self.rank]:
                if self._store.check([f"beat/{rank}"]):
                    self._judge.hear(Beat(**json.loads(self._store.get(f"beat/{rank}"))), now)
            own = self._judge.verdict(now, self._ended)
            if own is not None:
                self._store.set("end", json.dumps(asdict(own)))
        return Verdict(**json.loads(self._store.get("end"))) if self._store.check(["end"]) else None

    def _ended(self, beat: Beat) -> bool:
        """Whether a process of this machine is gone. One that was never visible from here can't be told of."""
        if beat.host != self._host:
            return False
        alive = _alive(beat.pid)
        if alive:
            self._visible.add(beat.pid)
        return not alive and beat.pid in self._visible

    def _leave(self, verdict: Verdict) -> None:
        self.found = verdict
        self._came.set()
        if verdict.kind == LEFT:
            os.kill(os.getpid(), signal.SIGTERM)  # the main thread leaves as if it had been asked itself
        elif self._stacks is not None:
            print(f"rank {self.rank}: {verdict}\n", file=self._stacks, flush=True)
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            faulthandler.dump_traceback_later(2 * LEAVE_SECONDS, file=self._stacks, exit=True)
            with contextlib.suppress(Exception):
                self._dump_more()
        if self._leaving.wait(LEAVE_SECONDS):
            return
        telling = threading.Thread(target=self.on_lost, args=(verdict,), daemon=True)
        telling.start()
        telling.join(LEAVE_SECONDS / 2)  # it writes to a disk, which may be what hangs
        os._exit(75 if verdict.kind == LEFT else 1)


def _alive(pid: int) -> bool:
    """Whether a process of this machine runs. One that has ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def text_of(error: BaseException) -> str:
    """An error in one line."""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}"[:500] if line else type(error).__name__
