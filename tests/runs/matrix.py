"""Cases 10, 12 and 14 of the fault matrix, counted: `python -m tests.runs.matrix [--out FILE] [--share 0.1]`.

The other cases are `tests/faults/matrix.py`'s. Exit code 1 where anything was lost.
"""

import argparse
import importlib.util
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from dwslm.cli.find import commit
from dwslm.machine.classify import RETRIES, back_off
from dwslm.machine.lease import Lease, Taken
from dwslm.page.export import export
from dwslm.runs.folder import create_run, list_runs, open_run
from dwslm.runs.queue import LOST_RETRIES, Queue
from dwslm.runs.queue_job import LOST
from dwslm.runs.queue_worker import Outcome
from dwslm.runs.reader import metrics, read_rows
from dwslm.runs.track import Trackers, TrackSettings
from dwslm.runs.writer import RunWriter
from tests.cli import test_queue as jobs
from tests.runs import test_queue as states
from tests.runs import test_queue_worker as workers
from tests.runs import test_track as trackers

ROOT = Path(__file__).resolve().parents[2]
FREE_LIMIT_S = 60.0
Told = tuple[int, str]
"""Faults that were put in, and what was found beyond that nothing was lost."""


# ---- 10, the queue --------------------------------------------------------------------------------------


def one_gpu(folder: Path, draw: random.Random) -> Told:
    """Three workers, one GPU, six jobs that take a lock of their own on it."""
    queue, log = Queue(folder / "q"), folder / "log"
    script = f"flock -n {log}.lock sh -c 'echo $CUDA_VISIBLE_DEVICES >> {log}; sleep 0.05' || echo shared >> {log}"
    queue.add([jobs.shell(f"j{i}", script) for i in range(6)])
    processes = [jobs.a_worker(queue.folder, ["GPU-a"]) for _ in range(3)]
    for process in processes:
        process.join()
    assert jobs.lines(log) == [["GPU-a"]] * 6, jobs.lines(log)
    return 6, "jobs on one GPU, never two at a time"


def killed_worker(folder: Path, draw: random.Random) -> Told:
    """kill -9 of a worker in its job; another waits for its GPU."""
    queue, log = Queue(folder / "q"), folder / "log"
    queue.add([jobs.shell("j", f"echo $$ >> {log}; test $(wc -l < {log}) -gt 1 || exec sleep 600")])
    first = jobs.a_worker(queue.folder, ["GPU-a"])
    jobs.until(lambda: jobs.lines(log))
    time.sleep(draw.random() * 0.2)
    began = time.perf_counter()
    os.kill(first.pid, signal.SIGKILL)
    lease = None
    while lease is None:
        assert time.perf_counter() - began < FREE_LIMIT_S
        try:
            lease = Lease("GPU-a", folder=queue.folder / "gpus")
        except Taken:
            time.sleep(0.0005)
    freed = time.perf_counter() - began
    lease.release()
    second = jobs.a_worker(queue.folder, ["GPU-a"])
    second.join()
    queue.refresh()
    kinds = [event["kind"] for _, event in queue.log_of("j")[1::2]]
    assert queue.done("j") and queue.jobs["j"].starts == 2 and kinds == ["lost", "done"], kinds
    return 1, f"ms until the GPU was free: {1e3 * freed:.0f}"


def checkpoint_kept(folder: Path, draw: random.Random) -> Told:
    """The same with a run that trains: its rows are those of a run that nobody disturbed."""
    from tests.tiny_data import make_tiny_data

    jobs.test_a_run_goes_through_the_queue_and_a_killed_worker_costs_it_nothing(make_tiny_data(folder), folder)
    return 1, "runs went on from their checkpoint, every loss as in a run that nobody disturbed"


def two_thousand(folder: Path, draw: random.Random) -> Told:
    workers.test_eight_workers_run_two_thousand_jobs_once_each(folder)
    return workers.JOBS, f"jobs by {workers.WORKERS} workers, each run once"


TAKE = """
import sys, time
from dwslm.runs.folder import open_run
run = open_run(sys.argv[1], ".")
print("ready", flush=True)
sys.stdin.readline()
try:
    with run.lock():
        print("taken", flush=True)
        sys.stdin.readline()
except ValueError as error:
    print("refused" if "in use" in str(error) or "process" in str(error) else error, flush=True)
"""


def double_start(folder: Path, draw: random.Random) -> Told:
    """Five processes start one run folder in the same moment."""
    run = create_run(folder, "one", {})
    about = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    children = [subprocess.Popen([sys.executable, "-c", TAKE, str(run.path)], **about) for _ in range(5)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = sorted(child.stdout.readline().strip() for child in children)
    for child in children:
        child.communicate("\n")
    assert said == ["refused"] * 4 + ["taken"], said
    return 4, "second starts, all refused"


def by_hand(folder: Path, draw: random.Random) -> Told:
    """Hold, release, retry, drop, kills and ends by chance, three jobs, up to 40 deeds; then all of it from the files alone."""
    names = ["claim", "done", "fail", "preempted", "kill", "reap", "hold", "release", "retry", "drop", "later"]
    deeds = [(draw.choice(names), draw.choice("abc")) for _ in range(40)]
    inner = states.test_whatever_happens_a_job_has_one_worker_and_files_tell_all.hypothesis.inner_test
    inner(SimpleNamespace(mktemp=lambda name: folder / name), deeds)
    return len(deeds), "deeds; a job never had two workers, and the files alone tell the same"


def crash_loop(folder: Path, draw: random.Random) -> Told:
    """A job that always ends alike is given up as often as its class says, waits in between, and no more."""

    class Hurried(workers.Clock):
        def __call__(self):
            self.now += 5.0
            return self.now

    kind = draw.choice(sorted(kind for kind in RETRIES if kind not in ("done", "preempted")))
    queue, ran = Queue(folder, Hurried()), []

    def execute(job, claim, have):
        ran.append(queue.clock.now)
        return Outcome(kind, {"retries": RETRIES[kind], "wait_s": back_off(job.failures[kind] + 1), "reason": "again"})

    queue.add([workers.spec("j")])
    workers.a_worker("w", execute=execute, poll_s=0).work(queue, until_empty=True)
    assert len(ran) == 1 + RETRIES[kind] and queue.standing(queue.jobs["j"]).state == "failed"
    assert all(later - before >= back_off(i + 1) for i, (before, later) in enumerate(zip(ran, ran[1:], strict=False)))
    lost = Queue(folder / "lost", Hurried())
    lost.add([workers.spec("j")])
    while not lost.jobs["j"].over:
        if lost.claim("j", "w", "here", "b1") is not None:
            lost.reap("here", "b1", saved=lambda spec: None)
    assert lost.jobs["j"].starts == 1 + LOST_RETRIES and lost.jobs["j"].failures[LOST] == 1 + LOST_RETRIES
    return len(ran) + lost.jobs["j"].starts, "tries that broke; each job was given up after as many as documented"


# ---- 12, rows -------------------------------------------------------------------------------------------


def torn(folder: Path, draw: random.Random) -> Told:
    """A file of rows is cut at every byte of its last three rows, and zeros follow, as after a power cut."""
    values = [1.5, math.nan, math.inf, -math.inf, 0.1]
    with RunWriter(folder, 1) as writer:
        for step in range(1, 13):
            writer.metrics(
                {"step": step, "tokens": step, "loss": draw.choice(values), "note": "ä\0\n" * draw.randint(0, 9)}
            )
    path = folder / "metrics-1.jsonl"
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    truth = [repr(row) for row in read_rows(path)[0]]
    faults = 0
    for cut in range(ends[-4], len(whole) + 1):
        for tail in (b"", b"\0" * draw.choice([1, 7, 512, 4096])):
            path.write_bytes(whole[:cut] + tail)
            # A row whose newline alone is missing is whole, and may be read or left out.
            least, most = sum(end <= cut for end in ends), sum(end - 1 <= cut for end in ends)
            found = [repr(row) for row in metrics(folder)]
            told = [repr(row) for row in read_rows(path)[0]]
            assert told in (truth[:least], truth[:most]) and len(found) == len(told), (cut, tail[:3])
            faults += 1
    return faults, "cuts, zeros after half of them; every whole row came back, no other"


WRITE = """
import sys, time
from dwslm.runs.writer import RunWriter
writer = RunWriter(sys.argv[1], 1)
for step in range(1, 10**9):
    writer.metrics({"step": step, "tokens": step, "loss": 1 / step, "text": "x" * (step % 97)})
    if step % 500 == 0:
        writer.flush()
        print(step, flush=True)
"""


def killed_writer(folder: Path, draw: random.Random) -> Told:
    """kill -9 at a random moment of a process that writes as fast as it can."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )
    said = [int(child.stdout.readline())]
    time.sleep(draw.random() * 0.5)
    child.kill()
    said += [int(line) for line in child.stdout.read().split()]
    child.wait()
    steps = [row["step"] for row in metrics(folder)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= said[-1], (len(steps), said[-1])
    return 1, "kills; no torn row, no gap, no row lost that was flushed"


def names(folder: Path, draw: random.Random) -> Told:
    """Names as long as 10,000 letters, with markup, controls and half of a surrogate pair, and rows that are no numbers."""
    alphabet = [
        "<i>",
        "</td>",
        "&amp;",
        "\"'",
        "\n",
        "\0",
        "\x1b[31m",
        "../",
        "\ud800",
        "ä",
        "計",
        "🙂",
        "[red]",
        "W" * 500,
    ]
    given = ["".join(draw.choices(alphabet, k=draw.randint(1, 12))) for _ in range(8)] + ["W" * 10_000]
    for i, name in enumerate(given):
        run = create_run(
            folder / "runs", name, {"config": {"proxy": {"test": name, "arm": name}}}, clock=lambda i=i: 1e9 + i
        )
        with RunWriter(run, 1) as writer:
            writer.event("start", step=0, tokens=0)
            for step, loss in enumerate([math.nan, math.inf, 4.0, -math.inf], 1):
                writer.metrics(
                    {"step": step, "tokens": step, "loss": loss, "tokens_per_second": draw.choice([loss, 100.0])}
                )
            writer.event("failed", error=name, reason=name)
    runs, odd = list_runs(folder / "runs")
    assert not odd and [run.name for run in reversed(runs)] == given
    assert all(open_run(run.id, folder / "runs").name == run.name for run in runs)
    page = export(folder / "runs", folder / "page", None, now=1e9 + 99)
    text = page.index.read_text(encoding="utf-8") + "".join(
        path.read_text(encoding="utf-8") for path in (folder / "page" / "runs").iterdir()
    )
    assert page.runs == len(given) and "<i>" not in text and "\x1b" not in text
    return len(given), "names, each listed, found again and shown as text"


# ---- 14, trackers ---------------------------------------------------------------------------------------

ROWS = 1000


def tracker(deed: str) -> Callable[[Path, random.Random], Told]:
    """One that does a thing, in the place of wandb: 1,000 rows are all there, and the run ends in time."""

    def case(folder: Path, draw: random.Random) -> Told:
        run = create_run(folder / "runs", "one", {"config": {}})
        with pytest.MonkeyPatch.context() as patch:
            out = trackers.fake_wandb(folder, patch, *trackers.DEEDS.get(deed, ("pass", 'note("log", row=row)')))
            said: list[str] = []
            began, at = time.monotonic(), draw.randint(1, ROWS)
            with Trackers(TrackSettings(wandb="online", finish_seconds=0.3), run, 1, said.append) as beside:
                trackers.wait_until(lambda: bool(trackers.calls(out, "init")))
                with RunWriter(run, 1) as writer:
                    for step in range(1, ROWS + 1):
                        writer.metrics({"step": step, "tokens": step, "loss": 1 / step})
                        if deed == "it is killed" and step == at:
                            os.kill(beside.processes["wandb"].pid, signal.SIGKILL)
            assert len(said) == 1 and time.monotonic() - began < FREE_LIMIT_S / 2, said
        assert [row["step"] for row in metrics(run)] == list(range(1, ROWS + 1))
        return 1, f"runs of {ROWS:,} rows, all there"

    return case


def real_wandb(folder: Path, draw: random.Random) -> Told:
    """wandb itself, offline: killed with its own processes in the middle."""
    run = create_run(folder / "runs", "one", {"config": {}})
    said: list[str] = []
    settings = TrackSettings(wandb="offline", finish_seconds=5)
    with Trackers(settings, run, 1, said.append) as beside, RunWriter(run, 1) as writer:
        at = draw.randint(50, ROWS - 50)
        for step in range(1, ROWS + 1):
            writer.metrics({"step": step, "tokens": step})
            if step == at:
                jobs.until(lambda: any(run.path.glob("wandb/offline-run-*/*.wandb")))
                os.killpg(beside.processes["wandb"].pid, signal.SIGKILL)
    assert len(said) == 1 and "code -9" in said[0], said
    assert [row["step"] for row in metrics(run)] == list(range(1, ROWS + 1))
    return 1, f"runs of {ROWS:,} rows, all there"


CASES: list[tuple[int, str, Callable[[Path, random.Random], Told], int]] = [
    (10, "two workers and more on one GPU", one_gpu, 20),
    (10, "kill -9 of a worker", killed_worker, 20),
    (10, "kill -9 of a worker whose job trains", checkpoint_kept, 3),
    (10, "eight workers, 2,000 jobs", two_thousand, 3),
    (10, "a run folder started by five at once", double_start, 20),
    (10, "hold, release, retry, drop, kills, by chance", by_hand, 300),
    (10, "crash loops", crash_loop, 40),
    (12, "torn and zero-filled tails", torn, 10),
    (12, "kill -9 of a process that writes rows", killed_writer, 40),
    (12, "names, markup, numbers that are not finite", names, 20),
    *((14, f"a tracker: {deed}", tracker(deed), 5) for deed in (*trackers.DEEDS, "it is killed")),
]


def run_case(number: int, what: str, case: Callable, tries: int, root: Path, seed: int) -> tuple[str, int]:
    """A row of the table, and how often something was lost."""
    faults, lost, said, figures = 0, [], "", []
    began = time.monotonic()
    for i in range(tries):
        folder = Path(tempfile.mkdtemp(dir=root))
        try:
            more, told = case(folder, random.Random(f"{seed} {what} {i}"))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            faults += 1
            lost.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
            continue
        faults += more
        said, _, figure = told.partition(": ")
        figures += [float(figure)] if figure else []
    if figures:
        said += f": {median(figures):.0f} in the median, {max(figures):.0f} at most"
    print(
        f"case {number}, {what}: {tries} tries, {faults} faults, {len(lost)} lost, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return f"| {number} | {what} | {tries} | {faults:,} | {tries - len(lost)} | {'; '.join(lost) or said} |", len(lost)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of the tries")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    began = time.monotonic()
    rows, lost = [], 0
    cases = list(CASES)
    wandb = importlib.util.find_spec("wandb") is not None
    if wandb:
        cases.append((14, "wandb itself, offline, killed with its processes", real_wandb, 5))
    # There is one server for all; each test module has asked for itself alone.
    jobs.CHILDREN.set_forkserver_preload([jobs.__name__, workers.__name__])
    with tempfile.TemporaryDirectory() as root:
        for number, what, case, tries in cases:
            row, missing = run_case(
                number, what, case, max(1, round(tries * arguments.share)), Path(root), arguments.seed
            )
            rows.append(row)
            lost += missing
    version = f", wandb {importlib.import_module('wandb').__version__}" if wandb else ", wandb not installed"
    text = "\n".join([
        "# Faults of the store, the queue and trackers",
        "",
        "Cases 10, 12 and 14 of the fault matrix, by `python -m tests.runs.matrix`, a part of `make faults`; the others are in "
        "[faults](faults.md). A try survives where nothing is lost, run twice, shared or read that was not written.",
        "",
        f"{lost} tries with a loss. {time.strftime('%-d %B %Y', time.gmtime())}, commit {(commit() or 'unknown')[:12]}"
        f"{'+changes' if (commit() or '').endswith('+changes') else ''}, {platform.machine()}, {os.cpu_count()} cores{version}, "
        f"{(time.monotonic() - began) / 60:.1f} min, seed {arguments.seed}.",
        "",
        "| case | | tries | faults | survived | what was found |",
        "|---:|---|---:|---:|---:|---|",
        *rows,
        "",
        "What a tracker that blocks costs a step is measured by `tests/runs/measure_cost.py`, see [runs](../runs.md).",
        "",
    ])  # fmt: skip
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
