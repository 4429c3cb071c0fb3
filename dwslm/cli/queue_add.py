"""Putting jobs into the queue: what Hydra's --multirun composed, checked as a start would check it, and paired by test."""

import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose
from rich.table import Table
from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.config import (
    CONFIG_ERRORS,
    RunConfig,
    ScoreConfig,
    explain,
    flatten,
    to_object,
    to_plain,
)
from dwslm.runs.folder import RunFolder, list_runs
from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import JobSpec
from dwslm.runs.queue_pairs import check_paired
from dwslm.runs.reader import evals

SEED = "train.seed"
OF_JOB = "job:"
"""`checkpoint=job:ID` in a scoring means the run of that job."""


@dataclass
class Composed:
    """One job of a --multirun."""

    config: Any
    """As Hydra composed it."""
    words: list[str]
    """The sweep's overrides of this job."""
    arm: str
    """Name of the arm where the arms are listed; "" where the sweep makes them."""


def enqueue(
    composed: Sequence[Composed],
    *,
    folder: str,
    gpus: int | None,
    priority: int,
    after: Sequence[str],
    then: Sequence[Sequence[str]],
) -> list[JobSpec]:
    """Adds the jobs, all or none, and prints them. With `dry_run=true` they are only printed.

    Returns:
        The training jobs, in the order given.

    Raises:
        ValueError: where a configuration does not hold together, or arms of a test are not paired.
    """
    trains, scores = [], []
    varying = vary([one.words for one in composed])
    for one in composed:
        config = to_object(one.config, RunConfig)
        for name in ("resume", "branch"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"{name}= in the queue: the queue resumes its own runs by itself; start this with train.py"
                )
        if (gpus or 0) > 1:
            raise ValueError(
                f"hydra.launcher.gpus={gpus}: a run of the queue has one GPU; start it on more with torchrun"
            )
        spec = training_job(config, arm_name(one, varying), gpus, priority, after)
        trains.append(spec)
        scores += [scoring_job(spec, words) for words in then]
    dry = any(spec.config is not None and spec.config["dry_run"] for spec in trains)
    queue = Queue(folder)

    def check() -> None:
        for test in {spec.test for spec in trains} - {None}:
            mine = [spec for spec in trains if spec.test == test]
            check_paired([*in_test(queue, str(test)), *mine], flatten)

    check()
    console = make_console()
    table = Table(title=f"{'Would add' if dry else 'Added'} to {folder}", title_justify="left")
    for head in ("job", "test", "arm", "seed", "GPUs", "after"):
        table.add_column(head, justify="right" if head in ("seed", "GPUs") else "left")
    for spec in [*trains, *scores]:
        cells = (spec.id, spec.test, spec.arm or spec.name, spec.seed, spec.gpus, ", ".join(spec.after))
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
    if not dry:
        queue.add([*trains, *scores], check)
    console.print(table)
    if not dry:
        console.print(Text(f"start a worker for each GPU: dwslm queue work --queue {folder}"))
    return trains


def training_job(config: RunConfig, arm: str, gpus: int | None, priority: int, after: Sequence[str]) -> JobSpec:
    """A job out of a configuration, which gets the job's id and its place in the test."""
    id = new_id()
    seed = config.train.seed
    test = config.proxy.test
    if test is not None:
        arm = config.proxy.arm or arm or "base"
        config = replace(config, name=f"{test}-{arm}-s{seed}", proxy=replace(config.proxy, arm=arm, job=id))
    else:
        config = replace(config, proxy=replace(config.proxy, job=id))
    return JobSpec(
        id=id,
        name=config.name,
        program="train.py",
        cwd=os.getcwd(),
        runs_dir=config.runs_dir,
        config=to_plain(config),
        data=fingerprint(Path(config.data.path)),
        test=test,
        arm=config.proxy.arm,
        seed=seed,
        gpus=gpus if gpus is not None else int(config.train.device != "cpu"),
        priority=priority,
        after=list(after),
    )


def scoring_job(of: JobSpec, words: Sequence[str]) -> JobSpec:
    """A scoring by eval.py of what a training job will have made."""
    if any(word.split("=", 1)[0].lstrip("+") in ("checkpoint", "runs_dir") for word in words):
        raise ValueError(f"hydra.launcher.then={list(words)}: the checkpoint is the job's own, leave it out")
    check_scoring(words)
    device = [] if of.config is None else [f"device={of.config['train']['device']}"]
    arguments = [f"checkpoint={OF_JOB}{of.id}", f"runs_dir={of.runs_dir}", *device, *words]
    return replace(
        of,
        id=new_id(),
        name=f"{of.name}-score",
        program="eval.py",
        config=None,
        data=None,
        arguments=arguments,
        after=[of.id],
    )


def check_scoring(words: Sequence[str]) -> None:
    """Raises ValueError for what eval.py would refuse, hours before it is started. Hydra's --multirun must be under way."""
    try:
        to_object(compose("score", overrides=list(words)), ScoreConfig)
    except (ValueError, *CONFIG_ERRORS) as error:
        said = explain(error, "checkpoint", words) if isinstance(error, CONFIG_ERRORS) else error
        raise ValueError(f"hydra.launcher.then={list(words)}: {said}") from error


def fingerprint(data: Path) -> str | None:
    """Of a prepared folder's training and held-out text; None where it is not there."""
    try:
        manifests = [(data / split / "manifest.json").read_bytes() for split in ("train", "valid")]
    except OSError:
        return None
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in manifests)).hexdigest()


def new_id() -> str:
    """Time and chance; sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def vary(sweep: Sequence[Sequence[str]]) -> set[str]:
    """Names of the overrides that differ between the jobs of a sweep."""
    values: dict[str, set[str]] = {}
    for words in sweep:
        for word in words:
            name, _, value = word.partition("=")
            values.setdefault(name, set()).add(value)
    return {name for name, found in values.items() if len(found) > 1}


def arm_name(one: Composed, varying: set[str]) -> str:
    """The listed arm, and what the sweep varies besides the seed, without the groups where that is clear."""
    leaves = [name.rpartition(".")[2] for name in varying]
    swept = []
    for word in one.words:
        name, _, value = word.partition("=")
        if name in varying - {SEED}:
            leaf = name.rpartition(".")[2]
            swept.append(f"{leaf if leaves.count(leaf) == 1 else name}={value}")
    return ",".join([*([one.arm] if one.arm else []), *swept])


def in_test(queue: Queue, test: str) -> list[JobSpec]:
    """Training jobs of a test that count: those that were dropped before they ran don't."""
    jobs = [job for job in queue.jobs.values() if job.spec.test == test and job.spec.program == "train.py"]
    return [job.spec for job in jobs if job.dropped is None]


def runs_of(specs: Sequence[JobSpec]) -> dict[str, RunFolder]:
    """Job -> its run, the newest where there are several, for jobs whose run is there."""
    found: dict[str, RunFolder] = {}
    for root in {Path(spec.cwd, spec.runs_dir) for spec in specs}:
        for run in reversed(list_runs(root)[0]):
            job = ((run.record.get("config") or {}).get("proxy") or {}).get("job")
            if job:
                found[job] = run
    return {spec.id: found[spec.id] for spec in specs if spec.id in found}


def score_of(run: RunFolder) -> float | None:
    """Bits per byte of the run's last scoring during training, None before the first."""
    overall = [row for row in evals(run) if row.get("slice") == "overall" and row["writer"] == "trainer"]
    return float(overall[-1]["bits_per_byte"]) if overall else None


def wait_for(folder: str, specs: Sequence[JobSpec], poll_s: float = 2.0) -> list[float | None]:
    """Waits until the jobs are over. Returns their bits per byte.

    Raises:
        ValueError: naming the first that failed or was dropped.
    """
    queue = Queue(folder)
    while not all(queue.jobs[spec.id].over and queue.jobs[spec.id].claim is None for spec in specs):
        time.sleep(poll_s)
        queue.refresh()
    for spec in specs:
        if not queue.done(spec.id):
            standing = queue.standing(queue.jobs[spec.id])
            raise ValueError(f"job {spec.id} ({spec.name}) is not done but {standing.state}: {standing.why}")
    runs = runs_of(specs)
    return [score_of(runs[spec.id]) if spec.id in runs else None for spec in specs]
