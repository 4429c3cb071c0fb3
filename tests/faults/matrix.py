"""Runs the fault matrix and writes its page: `python -m tests.faults.matrix [--out FILE] [--only 3,8] [--share 0.1]`.

Exit code 1 where anything was lost.
"""

import argparse
import collections
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dwslm.cli.find import commit
from tests.faults.caches import WarmCache, damaged_cache
from tests.faults.cases import Lost, Try, plan
from tests.faults.pins import Life
from tests.tiny_data import make_tiny_data

WORKERS = 2
CACHE_TRIES, LIVES = 12, 40

WHAT_IS_LOST = {
    1: "nothing but time: steps after the last checkpoint are done again",
    2: "nothing but time; no half checkpoint is ever listed",
    3: "nothing: not a step after one signal; after a second one, the steps since the last checkpoint are done again",
    4: "nothing but time; the next start warns that the grace period is too short",
    5: "nothing but time; a save that fails leaves training and older checkpoints alone",
    6: "nothing but time; damaged ones are passed over by name, and where all are damaged the run refuses to begin again",
    7: "nothing but the time to compile again",
    8: "the steps that were poisoned, and only those; NaN for ever ends as failed, with the reason",
    11: "nothing",
    13: "nothing: every pin and the newest valid checkpoint are there",
}


@dataclass
class Result:
    """What came of one case."""

    title: str
    tries: int = 0
    faults: int = 0
    lost: list[str] = field(default_factory=list)
    redone: int = 0
    seconds: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)


Job = tuple[int, str, Callable[[Path, random.Random], tuple[str, int, int]]]
"""Number and title of the case, and a function from a folder to (what was done, faults put in, steps done again)."""


def jobs(data: Path, root: Path, share: float, only: set[int]) -> list[Job]:
    """All tries, the cases in turn, so that what is slow does not come last."""
    straight = Try(data, root / "straight", random.Random(0), None)  # type: ignore[arg-type]
    ended = straight.child()
    assert ended.code == 0, ended.said

    def times(tries: int) -> int:
        return max(1, round(tries * share))

    def of_run(case: Callable[[Try, int], str], n: int) -> Callable[[Path, random.Random], tuple[str, int, int]]:
        def job(folder: Path, draw: random.Random) -> tuple[str, int, int]:
            one = Try(data, folder, draw, straight.run())
            return case(one, n), max(1, one.faults), one.redone

        return job

    found: list[Job] = []
    for number, title, case, tries in plan():
        if number in only:
            found += [(number, title, of_run(case, n)) for n in range(times(tries))]
    if 7 in only:
        warm = WarmCache(root / "warm")
        for n in range(times(CACHE_TRIES)):
            found.append((7, "compiler cache", lambda folder, draw, n=n: (damaged_cache(warm, folder, n, draw), 1, 0)))
    if 13 in only:
        found += [(13, "pins", life)] * times(LIVES)
    return found


def life(folder: Path, draw: random.Random) -> tuple[str, int, int]:
    """A life of a run by chance, with crashes."""
    one = Life(folder / "checkpoints")
    kinds = ["crash", "crash", "train", "resume", "pin", "longer", "shorter"]
    try:
        one.live([(draw.choice(kinds), draw.randint(1, 60 if draw.random() < 0.5 else 9)) for _ in range(12)])
    except AssertionError as error:
        raise Lost(str(error)) from error
    return "crash", one.crashes, 0


def work(job: Job, root: Path, index: int, seed: int, until: float, results: dict[int, Result]) -> None:
    number, title, do = job
    if time.monotonic() > until:
        return
    result = results.setdefault(number, Result(title))
    folder = root / f"{number}-{index}"
    started = time.monotonic()
    try:
        kind, faults, redone = do(folder, random.Random(f"{seed} {index}"))
        result.kinds[kind] += 1
        result.faults += faults
        result.redone = max(result.redone, redone)
        shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:  # whatever it is, the matrix goes on and tells
        result.faults += 1
        result.lost.append(f"try {index}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
        print(f"case {number}, {result.lost[-1]}", file=sys.stderr, flush=True)
    result.tries += 1
    result.seconds += time.monotonic() - started


def page(results: dict[int, Result], planned: int, seconds: float, seed: int) -> str:
    """The page, in Markdown."""
    tries, faults = sum(r.tries for r in results.values()), sum(r.faults for r in results.values())
    lost = sum(len(r.lost) for r in results.values())
    left = f" {planned - tries} of {planned} tries were not begun for want of time." if tries < planned else ""
    lines = [
        "# Faults",
        "",
        "What a run survives, by `make faults`: each try puts faults into small runs on a CPU and holds what comes of it to a "
        "run that nothing happened to, bit for bit: weights, optimizer state, every logged figure, every score, every pin.",
        "",
        f"{faults} faults in {tries} tries, {lost} with a loss. {time.strftime('%-d %B %Y', time.gmtime())}, commit "
        f"{(commit() or 'unknown')[:12]}{'+changes' if (commit() or '').endswith('+changes') else ''}, {platform.machine()}, "
        f"{WORKERS} processes, torch {torch.__version__}, {seconds / 60:.1f} min, seed {seed}.{left}",
        "",
        "| case | | tries | faults | survived | most steps done again | what was lost |",
        "|---:|---|---:|---:|---:|---:|---|",
    ]
    for number, r in sorted(results.items()):
        survived = r.tries - len(r.lost)
        told = WHAT_IS_LOST[number] if not r.lost else "; ".join(r.lost)
        lines.append(f"| {number} | {r.title} | {r.tries} | {r.faults} | {survived} | {r.redone} | {told} |")
    lines += ["", "## What was done", ""]
    for number, r in sorted(results.items()):
        kinds = ", ".join(f"{kind} ({n})" if n > 1 else kind for kind, n in sorted(r.kinds.items()))
        lines.append(f"- **{number}, {r.title}**: {kinds}.")
    lines += [
        "",
        "Cases are numbered as in the plan that they come from; 9 and 10 (ranks, queue), 12 (rows) and 14 (trackers) are in "
        "[another count](faults-runs.md). The runs have 24 steps in two micro-batches; they save after every fourth and at three "
        "quarters of the plan, and score after every eighth. Instants are hooked by the tests (`tests/faults/inject.py`); the "
        "library has no hooks.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the page here; without it, print it")
    parser.add_argument("--only", help="numbers of cases, with commas")
    parser.add_argument("--share", type=float, default=1.0, help="part of the tries")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further try after that many")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="another one draws other instants")
    arguments = parser.parse_args()
    only = {int(n) for n in arguments.only.split(",")} if arguments.only else set(WHAT_IS_LOST)
    started = time.monotonic()
    until = started + 60 * arguments.minutes
    where = (
        "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )  # a kill leaves the same there, and a sync costs nothing
    with tempfile.TemporaryDirectory(dir=where) as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # the children's, that of this user stays out of it
        results: dict[int, Result] = {}
        todo = jobs(make_tiny_data(root), root, arguments.share, only)
        random.Random(0).shuffle(todo)
        with ThreadPoolExecutor(WORKERS) as pool:
            for done, _ in enumerate(
                pool.map(lambda pair: work(pair[1], root, pair[0], arguments.seed, until, results), enumerate(todo)), 1
            ):
                if done % 20 == 0:
                    print(
                        f"{done} of {len(todo)} tries, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
                    )
    text = page(results, len(todo), time.monotonic() - started, arguments.seed)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if any(r.lost for r in results.values()) else 0)


if __name__ == "__main__":
    main()
