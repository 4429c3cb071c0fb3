"""`dwslm queue`: jobs that wait, run and are over; workers; and a test's arms side by side."""

import argparse
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from dwslm.cli import queue_search, queue_slurm
from dwslm.cli.errors import make_console
from dwslm.cli.find import REPOSITORY
from dwslm.cli.queue_add import new_id, runs_of, score_of
from dwslm.cli.queue_job import Place, saved_of
from dwslm.cli.run import VISIBLE, add_deadlines, given_deadlines, visible
from dwslm.cli.runs_tables import said
from dwslm.machine.boot import boot_id
from dwslm.machine.health import list_gpus
from dwslm.machine.lease import Lease
from dwslm.runs.folder import RunFolder
from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import Job, JobSpec
from dwslm.runs.queue_pairs import unpaired_runs
from dwslm.runs.queue_worker import Worker

WHY_CHARACTERS = 60
"""Of the reason in a list; `show` has all of it."""
MANY = {
    "hold": "let jobs wait on purpose; running ones save and leave",
    "release": "end a hold",
    "retry": "let failed, stopped or dropped jobs wait again",
    "drop": "take jobs out for good, with the reason; running ones save and leave",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("queue", help="jobs that wait for a GPU, workers that run them; see docs/queue.md")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
        added.add_argument(
            "--queue", default="queue", metavar="FOLDER", help="folder of the queue; default %(default)s"
        )
        added.set_defaults(run=run)
        return added

    add = action("add", "add a run (words of train.py; commas sweep), or a command of your own, after --", add_job)
    add.add_argument("words", nargs="+", metavar="WORD", help="after --")
    add.add_argument("--gpus", type=int, metavar="N", help="GPUs; default: 1 for a run, 0 for a command")
    add.add_argument("--priority", type=int, default=0, metavar="N", help="higher goes first; default %(default)s")
    add.add_argument("--after", nargs="+", default=[], metavar="JOB", help="jobs that must be done before")
    add.add_argument("--name", help="name of a command of your own")
    ls = action("ls", "list jobs, in the order in which they would run", list_jobs)
    ls.add_argument("--test", help="of this test only")
    work = action("work", "run jobs, one after the other, on GPUs that are free", work_on)
    work.add_argument("--gpus", type=int, metavar="N", help="use so many GPUs at most; default: all that are visible")
    work.add_argument("--until-empty", action="store_true", help="leave when nothing is left that could still be run")
    add_deadlines(work)
    for name, help in MANY.items():
        many = action(name, help, change)
        many.add_argument("jobs", nargs="*", metavar="JOB", help="id, its end, or name")
        many.add_argument("--test", help="all jobs of this test that it fits")
        if name in ("hold", "drop"):
            many.add_argument("--reason", required=True)
        if name == "hold":
            many.add_argument("--hours", type=float, help="end the hold by itself after so many hours")
        if name == "drop":
            many.add_argument("--decision", metavar="K", help="number of the decision that dropped them")
    slurm = action("slurm", "submit workers as Slurm jobs, through submitit", submit_workers)
    queue_slurm.add_arguments(slurm)
    add_deadlines(slurm)
    search = action("search", "let Optuna propose settings, run them, and tell it the bits per byte", run_search)
    queue_search.add_arguments(search)
    show = action("show", "all about a job, or the arms of a test side by side", show_one)
    show.add_argument("which", metavar="JOB_OR_TEST")


def folder(arguments: argparse.Namespace, must_exist: bool = True) -> Path:
    """The queue's folder, absolute.

    Raises:
        ValueError: where there is none.
    """
    path = Path(arguments.queue).resolve()
    if must_exist and not (path / "log").is_dir():
        raise ValueError(f"{path} is no queue yet: add jobs first, see docs/queue.md, or name another with --queue")
    return path


def add_job(arguments: argparse.Namespace) -> None:
    words = list(arguments.words)
    where = folder(arguments, must_exist=False)
    if all("=" in word for word in words):
        more = [f"hydra.launcher.folder={where}", f"hydra.launcher.priority={arguments.priority}"]
        more += [f"hydra.launcher.gpus={arguments.gpus}"] if arguments.gpus is not None else []
        more += [f"hydra.launcher.after=[{','.join(arguments.after)}]"] if arguments.after else []
        done = subprocess.run([sys.executable, str(REPOSITORY / "train.py"), "--multirun", *words, *more])
        if done.returncode:
            sys.exit(done.returncode)
        return
    queue = Queue(where)
    spec = JobSpec(
        id=new_id(),
        name=arguments.name or " ".join(words)[:60],
        program="",
        arguments=words,
        cwd=os.getcwd(),
        gpus=arguments.gpus or 0,
        priority=arguments.priority,
        after=[queue.find(which).id for which in arguments.after],
    )
    queue.add([spec])
    print(spec.id)


def list_jobs(arguments: argparse.Namespace) -> None:
    queue = Queue(folder(arguments))
    jobs = [job for job in queue.jobs.values() if arguments.test in (None, job.spec.test)]
    runs = runs_of([job.spec for job in jobs])
    table = Table(title=f"{len(jobs)} jobs in {queue.folder}", title_justify="left")
    for head in ("job", "name", "state", "GPUs", "priority", "tries", "bits per byte"):
        table.add_column(head, justify="left" if head in ("job", "name", "state") else "right")
    table.add_column("why")
    for job in sorted(jobs, key=lambda job: (job.over, job.claim is None, job.key)):
        run = runs.get(job.id)
        standing = state_of(queue, job, run)
        score = score_of(run) if run else None
        told = "" if score is None else f"{score:.4f}"
        why = textwrap.shorten(standing[1], WHY_CHARACTERS, placeholder=" …")
        cells = (job.id, job.spec.name, standing[0], job.spec.gpus, job.spec.priority, job.starts, told, why)
        table.add_row(*(said(str(cell)) for cell in cells))
    make_console().print(table)


def state_of(queue: Queue, job: Job, run: RunFolder | None) -> tuple[str, str]:
    """A job's state and the reason, its worker's lock looked at."""
    if job.claim is not None and (gone := queue.gone(job.claim, socket.gethostname(), boot_id() or "")) is not None:
        return "lost", f"{gone}; the next worker puts it back"
    standing = queue.standing(job, reported=reported(run) if run else None)
    return standing.state, standing.why


def reported(run: RunFolder) -> float:
    """When a run last wrote metrics or events, in seconds since 1970."""
    return max((path.stat().st_mtime for path in run.path.glob("*.jsonl")), default=0.0)


def change(arguments: argparse.Namespace) -> None:
    queue = Queue(folder(arguments))
    if bool(arguments.jobs) == bool(arguments.test):
        raise ValueError(f"queue {arguments.action}: name jobs, or a test with --test")
    ids = [queue.find(which).id for which in arguments.jobs]
    if arguments.test:
        fits = {"hold": lambda job: not job.over, "release": lambda job: job.hold is not None,
                "drop": lambda job: not job.over, "retry": lambda job: job.over and not queue.done(job.id)}  # fmt: skip
        ids = [job.id for job in queue.jobs.values() if job.spec.test == arguments.test and fits[arguments.action](job)]
        if not ids:
            raise ValueError(f"test {arguments.test} has no job to {arguments.action}")
    for id in ids:
        if arguments.action == "hold":
            until = None if arguments.hours is None else time.time() + 3600 * arguments.hours
            queue.hold(id, arguments.reason, until)
        elif arguments.action == "drop":
            queue.drop(id, arguments.reason, arguments.decision)
        else:
            {"release": queue.release, "retry": queue.retry}[arguments.action](id)
        print(f"{id}: {arguments.action}")


# ---- a worker -------------------------------------------------------------------------------------------


def work_on(arguments: argparse.Namespace) -> None:
    where = folder(arguments, must_exist=arguments.until_empty)
    if not (where / "log").is_dir():
        say(f"{where} is a new queue, without jobs; another is named with --queue")
    gpus = visible(list_gpus(), os.environ.get(VISIBLE))
    if arguments.gpus is not None and arguments.gpus > len(gpus):
        raise ValueError(f"--gpus {arguments.gpus}: {len(gpus)} are visible here")
    deadlines = given_deadlines(arguments)
    host = socket.gethostname()
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)}-{os.getpid()}-{secrets.token_hex(3)}"
    (where / "workers").mkdir(parents=True, exist_ok=True)
    with Lease(name, what="a worker of the queue", folder=where / "workers") as lock:
        place = Place(where, lock, host, gpus, dict(os.environ), say, deadlines=deadlines)

        def stop(number: int, frame: FrameType | None) -> None:
            place.asked_to_stop = True

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, stop)
        signal.signal(signal.SIGUSR1, lambda number, frame: None)  # for a job that has just ended by itself
        worker = Worker(
            name=name,
            host=host,
            boot=boot_id() or "",
            gpus=list(gpus),
            most=len(gpus) if arguments.gpus is None else arguments.gpus,
            take=place.take,
            execute=place.execute,
            saved=saved_of,
            stop=lambda: place.asked_to_stop,
        )
        say(f"{name} works on {where}, GPUs: {', '.join(gpus) or 'none'}")
        tries = worker.work(Queue(where), until_empty=arguments.until_empty)
        say(f"{'told to stop' if place.asked_to_stop else 'nothing left'} after {tries} tries")
    lock.path.unlink(missing_ok=True)


def say(text: str) -> None:
    print(f"queue: {text}", file=sys.stderr, flush=True)


def submit_workers(arguments: argparse.Namespace) -> None:
    for job in queue_slurm.submit(arguments, folder(arguments)):
        print(f"worker submitted as job {job.job_id}, output in {job.paths.stdout}")


def run_search(arguments: argparse.Namespace) -> None:
    study = queue_search.search(arguments, folder(arguments, must_exist=False))
    print(f"best of {len(study.trials)}: {study.best_value:.4f} bits per byte, {study.best_params}")


# ---- looking closer -------------------------------------------------------------------------------------


def show_one(arguments: argparse.Namespace) -> None:
    queue = Queue(folder(arguments))
    console = make_console()
    specs = [job.spec for job in queue.jobs.values() if job.spec.test == arguments.which and job.spec.config]
    if specs:
        show_test(queue, specs, console)
    else:
        show_job(queue, queue.find(arguments.which), console)


def show_job(queue: Queue, job: Job, console: Console) -> None:
    spec, run = job.spec, runs_of([job.spec]).get(job.id)
    state, why = state_of(queue, job, run)
    facts = {
        "name": spec.name,
        "state": state + (f": {why}" if why else ""),
        "command": " ".join([spec.program, *spec.arguments]).strip() or "",
        "test, arm, seed": ", ".join(str(part) for part in (spec.test, spec.arm, spec.seed) if part is not None),
        "GPUs": str(spec.gpus),
        "priority": str(spec.priority),
        "after": ", ".join(spec.after),
        "tries": str(job.starts),
        "failures": ", ".join(f"{kind} {count}" for kind, count in job.failures.items()),
        "avoids": ", ".join(sorted(job.avoid)),
        "decision": job.decision or "",
        "worker": f"{job.claim.worker}, GPUs {', '.join(job.claim.gpus) or 'none'}" if job.claim else "",
        "run": str(run.path) if run else "",
        "output": str(queue.folder / "output" / f"{spec.id}.log") if job.starts else "",
    }
    table = Table(title=job.id, title_justify="left", show_header=False)
    for name, value in facts.items():
        if value:
            table.add_row(name, said(value))
    console.print(table)
    for _, event in queue.log_of(job.id):
        told = {key: value for key, value in event.items() if key not in ("event", "time", "job", "claim") and value}
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(event["time"]))
        console.print(said(f"{when}  {event['event']}  " + ", ".join(f"{key} {value}" for key, value in told.items())))


def show_test(queue: Queue, specs: Sequence[JobSpec], console: Console) -> None:
    """Arms by seed in bits per byte, how far seeds lie apart, and whether the runs read the same text."""
    runs = runs_of(specs)
    seeds = sorted({spec.seed for spec in specs if spec.seed is not None})
    table = Table(title=f"{specs[0].test}: held-out bits per byte", title_justify="left")
    table.add_column("arm")
    for head in (*(f"seed {seed}" for seed in seeds), "mean", "seeds apart"):
        table.add_column(head, justify="right")
    for arm in dict.fromkeys(spec.arm for spec in specs):
        of_arm = {spec.seed: spec for spec in specs if spec.arm == arm}
        cells, scores = [], []
        for seed in seeds:
            spec = of_arm.get(seed)
            run = runs.get(spec.id) if spec else None
            done = spec is not None and queue.done(spec.id)
            score = score_of(run) if run is not None and done else None
            scores += [score] if score is not None else []
            cells.append(
                f"{score:.4f}" if score is not None else state_of(queue, queue.jobs[spec.id], run)[0] if spec else ""
            )
        mean = f"{sum(scores) / len(scores):.4f}" if scores else ""
        apart = f"{max(scores) - min(scores):.4f}" if len(scores) > 1 else ""
        table.add_row(*(said(cell) for cell in (str(arm), *cells, mean, apart)))
    console.print(table)
    records = {(str(s.arm), int(s.seed or 0)): runs[s.id].record for s in specs if s.id in runs}
    varies = [name for s in specs if s.config for name in s.config["proxy"]["varies"]]
    for told in unpaired_runs(records, varies):
        console.print(said(f"not paired: {told}"), style="bold red")
