"""The fault matrix: ten cases, each a list of tries that put faults into small runs and say what was lost.

A run is held to the straight one, which nothing happened to: weights, optimizer state, every logged figure and every
score, bit for bit.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dwslm.config import RunConfig
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import evals, events, last_lifecycle, metrics
from dwslm.train import checkpoint as checkpoints
from dwslm.train.guard import GuardSettings
from tests.faults.inject import POISONS, SIGNALS, Ended, Fault, run_child
from tests.train.tiny_run import STEPS, tiny_config

SAME = ("step", "tokens", "loss", "grad_norm", "lr", "scored", "segments", "text_share")
SAVES = 7  # of the tiny run: after steps 4, 8, 12, 16, 18, 20, 24
# A window that a run of 24 steps fills; its steps are restless, so that only what is far off is a spike.
GUARD = GuardSettings(sigma=60.0, window=5, off_for=5, max_skips=2, stretch=12, max_rollbacks=2)


class Lost(AssertionError):
    """Something that had been trained, saved or logged is gone, or was not told."""


def need(holds: bool, told: str) -> None:
    if not holds:
        raise Lost(told)


@dataclass
class Try:
    """One run that faults are put into, and what is known of it."""

    data: Path
    folder: Path
    draw: random.Random
    straight: RunFolder
    change: Callable[[RunConfig], None] = lambda config: None
    attempts: int = 0
    redone: int = 0
    """Steps that had been reported and had to be done again."""
    said: list[str] = field(default_factory=list)
    faults: int = 0

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def run(self) -> RunFolder:
        return open_run("latest", self.runs)

    def child(self, *faults: Fault, after: Callable[[float, int], None] | None = None) -> Ended:
        """Begins the run, or goes on with it where it has begun; looks at its checkpoints before and after."""
        begun = self.runs.is_dir() and any(path.name[0] != "." for path in self.runs.iterdir())
        config = tiny_config(self.data, self.runs, eval_documents=6)
        # Faults ask little of the network: two layers have all of its parts.
        config.model = replace(config.model, layers=2, pattern=["local", "global"], depth_block=2)
        self.change(config)
        overrides = ["resume=latest"] if begun else []
        usable = self.listed() if begun else []
        reported = [row["step"] for row in metrics(self.run())][-1:] if begun else []
        self.attempts += 1
        self.faults += len(faults) + (after is not None)
        said = self.folder / f"said-{self.attempts}"
        self.folder.mkdir(parents=True, exist_ok=True)
        ended = run_child(replace(config, resume="latest" if begun else None), overrides, faults, said, after=after)
        self.said.append(ended.said)
        if begun:
            resumed = [event for event in events(self.run()) if event["event"] == "resume"]
            at = resumed[-1]["step"] if resumed else 0
            if usable and ended.code == 0:
                need(at == usable[0], f"went on from step {at}, the newest good checkpoint is of {usable[0]}")
                self.redone = max(self.redone, (reported[0] if reported else 0) - at)
        if self.runs.is_dir() and any(self.runs.iterdir()):
            self.listed()
        return ended

    def listed(self) -> list[int]:
        """Steps of the checkpoints that a resume would see, newest first; each must be whole."""
        try:
            found = checkpoints.find(self.run().checkpoints)
        except ValueError:  # killed before the run had a folder
            return []
        good = []
        for one in found:
            try:
                one.verify()
                good.append(one.step)
            except ValueError as error:
                need(self.damaged, f"a checkpoint is listed that is not whole: {error}")
        return good

    damaged: bool = False
    """Files were damaged on purpose, so that a check of sizes may list what a checksum refuses."""

    def finish(self) -> None:
        """Goes on until the run is done, and holds it to the straight one."""
        ended = self.child()
        need(ended.code == 0, f"the resume ended with code {ended.code}: {ended.said[-400:]}")
        self.compare(self.straight)

    def compare(self, straight: RunFolder, *, without: tuple[int, ...] = (), pins: bool = True) -> None:
        """Raises Lost at the first difference from `straight`; rows of the steps `without` may differ."""
        run = self.run()
        mine, truth = (checkpoints.newest_good(r.checkpoints)[0] for r in (run, straight))
        assert truth is not None
        need(mine is not None and mine.step == truth.step, "the last checkpoint is missing")
        assert mine is not None
        for what, a, b in (
            ("weights", mine.load_model(), truth.load_model()),
            ("optimizer state", mine.load_optimizer(), truth.load_optimizer()),
        ):
            for name in b:
                need(torch.equal(a[name], b[name]) or name == "skipped", f"{what}: {name} differs")

        def rows(r: RunFolder) -> list[dict[str, Any]]:
            return [{key: row[key] for key in SAME} for row in metrics(r) if row["step"] not in without]

        need(rows(run) == rows(straight), "logged figures differ")

        def overall(r: RunFolder) -> dict[int, int]:
            return {row["step"]: row["nats_fixed"] for row in evals(r) if row["slice"] == "overall"}

        need(overall(run) == overall(straight), "scores differ")
        if pins:
            need(checkpoints.pins(run.checkpoints) == checkpoints.pins(straight.checkpoints), "pins differ")
        last = last_lifecycle(run)
        need(last is not None and last["event"] == "done", "the run is not marked as done")

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events(self.run()) if event["event"] == kind]


def kill_after(limit: float) -> Callable[[float, int], None]:
    def kill(seconds: float, pid: int) -> None:
        if seconds > limit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return kill


Case = Callable[[Try, int], str]
"""Makes try number n: puts its faults in, raises Lost, and returns what it did in a word or two."""


def kill_at_random_steps(t: Try, n: int) -> str:
    """1. kill -9 anywhere in a run, up to three times in one."""
    kills = 1 + n % 3
    for _ in range(kills):
        if n % 2:
            at = t.draw.choice(["step", "micro-batch", "metrics", "score"])
            ended = t.child(Fault(at, "kill", t.draw.randint(1, 3 if at == "score" else 8)))
        else:
            ended = t.child(after=kill_after(t.draw.uniform(0.05, 1.2)))
        if ended.code == 0:
            break
        need(ended.code == -signal.SIGKILL, f"ended with code {ended.code}: {ended.said[-400:]}")
    t.finish()
    return "kill at random"


def kill_in_a_save(t: Try, n: int) -> str:
    """2. kill -9 before and after each disk operation of a save, the copy and the deletions included."""
    at, first = ("copy", 1 + n // 8 % SAVES) if n % 8 == 0 else ("save", 1 + n * 8)
    ended = t.child(Fault(at, "kill", first))
    need(ended.code in (0, -signal.SIGKILL), f"ended with code {ended.code}: {ended.said[-400:]}")
    t.finish()
    return f"kill at {at} {first}"


def signals(t: Try, n: int) -> str:
    """3. TERM, INT, USR1 and HUP in every part of a run, once and twice."""
    name = SIGNALS[n % 4]
    where = ("step", "update", "save", "score", "report", "retain", "copy", "first step")[n // 4 % 8]
    twice = n // 32 == 1 or n % 8 == 7
    at, first = where, t.draw.randint(1, 3) if where in ("score", "report") else t.draw.randint(2, 6)
    if where == "first step":
        at, first = "step", 1
    ended = t.child(Fault(at, name + " x2" * twice, first))
    if twice:
        wanted = (-getattr(signal, name), 75)  # the second may find the first one's work done
        need(ended.code in wanted, f"ended with code {ended.code}, not {wanted}: {ended.said[-400:]}")
    else:
        need(ended.code == 75, f"ended with code {ended.code}, not 75: {ended.said[-400:]}")
        [event] = t.told("preempted")
        need(event["signal"] == name, f"the event names {event['signal']}")
        kept = "nothing to save yet" if where == "first step" else "all saved"
        need(f"{kept}; go on with" in ended.said, "nothing was said")
        listed = t.listed()
        need(not event["step"] or listed[:1] == [event["step"]], f"left at step {event['step']}, saved {listed}")
    t.finish()
    need(twice or t.redone == 0, f"{t.redone} steps had to be done again")
    return f"{name}{' twice' if twice else ''} at {where}"


def launcher_without_patience(t: Try, n: int) -> str:
    """4. TERM, and KILL before the save has ended."""
    t.change = lambda config: setattr(config.checkpoint, "grace_seconds", 0.2)
    limit = t.draw.uniform(0.6, 2.0)

    def impatient(seconds: float, pid: int) -> None:
        if seconds > limit:
            with contextlib.suppress(ProcessLookupError):  # it may have left in time
                os.kill(pid, signal.SIGTERM)
                time.sleep(0.2)
                os.kill(pid, signal.SIGKILL)

    ended = t.child(Fault("save", "slow", 1, 10**9), after=impatient)
    need(ended.code in (75, -signal.SIGTERM, -signal.SIGKILL), f"ended with code {ended.code}: {ended.said[-400:]}")
    saved = bool(t.told("checkpoint")) if t.runs.is_dir() and list(t.runs.glob("2*")) else False
    t.finish()
    if saved:
        attempt = t.run().next_attempt() - 1
        warned = [e for e in t.told("slow_save") if e["attempt"] == attempt]
        need(len(warned) == 1 and "give the launcher more time" in t.said[-1], "the next start did not warn")
    return "KILL 0.2 s after TERM"


def full_disk(t: Try, n: int) -> str:
    """5. A disk that is full or fails, in a save, in the metrics, once and for ever."""
    what = "EIO" if n % 4 == 3 else "ENOSPC"
    if n % 3 == 2:
        first = t.draw.randint(1, STEPS)
        if n % 2:
            ended = t.child(Fault("metrics row", what, first, first + 1))
            need(ended.code == 0, f"ended with code {ended.code}: {ended.said[-400:]}")
            t.compare(t.straight)
            return f"{what} twice in the metrics"
        ended = t.child(Fault("metrics row", what, first, 10**9))
        need(ended.code == 1 and "error: cannot " in ended.said, f"ended with code {ended.code}: {ended.said[-400:]}")
        t.finish()
        return f"{what} for ever in the metrics"
    ever = n % 3 == 1
    first = 1 + 7 * n
    ended = t.child(Fault("save", what, first, 10**9 if ever else None))
    if ended.code == 0:  # training went on; the checkpoint that failed, or would not go, is an older one by now
        need(len(t.told("checkpoint_failed")) + len(t.told("retention_failed")) == 1, "no event tells what failed")
        t.compare(t.straight, pins=False)
        need(18 in checkpoints.pins(t.run().checkpoints), "the pinned checkpoint is lost")
        return f"{what} once in a save"
    need(ended.code == 1 and "error: " in ended.said, f"ended with code {ended.code}: {ended.said[-400:]}")
    need(t.told("failed") != [], "the run is not marked as failed")
    t.finish()
    return f"{what} for ever" if ever else f"{what} in the last save"


def damage(t: Try, n: int) -> str:
    """6. A byte flipped, a file cut or gone, a folder renamed: in the newest, the two newest, and all."""
    t.change = lambda config: setattr(config.checkpoint, "keep_last", 3)
    ended = t.child(Fault("step", "kill", t.draw.randint(14, 24)))
    need(ended.code == -signal.SIGKILL, f"ended with code {ended.code}")
    t.damaged = True
    found = checkpoints.find(t.run().checkpoints)
    need(len(found) > 2, "too few checkpoints to damage")
    files = ("model.safetensors", "optimizer-00000-of-00001.safetensors", "state.json", "manifest.json")
    how, name = ("flip", "cut", "gone", "renamed")[n % 4], files[n // 4 % 4]
    many = 1 if n % 5 else (2 if n % 10 else len(found))
    for one in found[:many]:
        path = one.path / name
        if how == "renamed":
            one.path.rename(one.path.with_name(one.path.name.replace("step-0", "step-1") if n % 8 == 3 else "copy"))
            many = 1
            break
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            raw = bytearray(path.read_bytes())
            raw[t.draw.randrange(len(raw) - 2)] ^= 1 << t.draw.randrange(8)
            path.write_bytes(raw)
    if many == len(found):
        ended = t.child()
        need(ended.code == 1 and "none that can be used" in ended.said, f"code {ended.code}: {ended.said[-300:]}")
        need(not t.told("resume"), "it began again")
        return f"{how} in all: refused"
    ended = t.child()
    need(ended.code == 0, f"the resume ended with code {ended.code}: {ended.said[-400:]}")
    if how != "flip":  # a flip may turn a space of the manifest into another one, which changes nothing
        need(len(t.told("checkpoint_rejected")) >= 1, "the damaged checkpoint is not named in an event")
    t.compare(t.straight, pins=how != "renamed")
    return f"{how} in {many}"


def poison(t: Try, n: int) -> str:
    """8. Steps that must not be taken: once, twice, at once after a resume, and for ever."""
    how = POISONS[n // 4 % 4]
    t.change = lambda config: setattr(config, "guard", GUARD)
    reference = replace(t, folder=t.folder / "reference", said=[], attempts=0)
    kind = n % 4
    # Spikes are judged from the sixth step on, and anew after the mixture's phase begins with the 19th.
    if kind == 0:
        step = t.draw.randint(8, 17)
        bad = [step]
        ended, other = t.child(Fault("update", how, step)), reference.child(Fault("step", "unseen", step))
        ended_codes = [ended.code, other.code]
    elif kind == 1:
        bad = sorted(t.draw.sample(range(8, 18), 2))
        ended = t.child(*(Fault("update", how, step) for step in bad))
        other = reference.child(*(Fault("step", "unseen", step) for step in bad))
        ended_codes = [ended.code, other.code]
    elif kind == 2:
        t.child(Fault("step", "kill", 14)), reference.child(Fault("step", "kill", 14))
        first = t.told("checkpoint")[-1]["step"] + 1
        bad = [first]
        ended, other = t.child(Fault("update", how, 1)), reference.child(Fault("step", "unseen", 1))
        ended_codes = [ended.code, other.code]
    else:
        first = t.draw.randint(9, 12)
        ended = t.child(Fault("update", "loss nan" if n % 8 == 3 else "gradient nan", first, 10**9))
        need(ended.code == 1, f"ended with code {ended.code}: {ended.said[-400:]}")
        failed = t.told("failed")[-1]
        wanted = (GUARD.max_skips + 1) * (GUARD.max_rollbacks + 1)
        skips, back = len(t.told("skip")), len(t.told("rollback"))
        need(skips == wanted and back == GUARD.max_rollbacks, f"{skips} skips and {back} ways back")
        need(f"after going back {back} times" in failed["reason"], f"failed for {failed['reason']}")
        t.change = lambda config: setattr(config.guard, "max_rollbacks", 5)
        need(t.child().code == 0, "it does not go on once the cause is gone")
        return "NaN for ever"
    need(ended_codes == [0, 0], f"ended with codes {ended_codes}: {ended.said[-400:]}")
    skips = t.told("skip")
    need([s["step"] for s in skips] == bad, f"left out {[s['step'] for s in skips]}, not {bad}")
    need(all(s["documents"] and s["rows"] for s in skips), "the data of a step left out are not named")
    t.compare(reference.run(), without=tuple(bad))
    return f"{how}, {('once', 'twice', 'after a resume')[kind]}"


def clock_set_back(t: Try, n: int) -> str:
    """11. The wall clock goes back an hour, again and again, with kills between."""
    for _ in range(1 + n % 3):
        t.child(Fault("step", "clock", t.draw.randint(1, 3), 10**9), Fault("step", "kill", t.draw.randint(4, 9)))
    ended = t.child(Fault("step", "clock", 2))
    need(ended.code == 0, f"the resume ended with code {ended.code}: {ended.said[-400:]}")
    t.compare(t.straight)
    found = events(t.run())
    attempts = [event["attempt"] for event in found if event["writer"] == "trainer"]
    need(attempts == sorted(attempts) and found[0]["event"] == "start", "events are out of order")
    need([row["step"] for row in metrics(t.run())] == list(range(1, STEPS + 1)), "rows are out of order")
    return "an hour back"


def plan() -> Iterator[tuple[int, str, Case, int]]:
    """Number, name, case and tries of what runs in children; 7 and 13 have files of their own."""
    yield 1, "kill -9 at random steps", kill_at_random_steps, 20
    yield 2, "kill -9 in a save", kill_in_a_save, 28
    yield 3, "signals", signals, 36
    yield 4, "launcher kills before the save ends", launcher_without_patience, 10
    yield 5, "disk full or failing", full_disk, 15
    yield 6, "damaged checkpoints", damage, 16
    yield 8, "NaN and spikes", poison, 16
    yield 11, "clock set back", clock_set_back, 10


__all__ = ["Lost", "Try", "plan"]
