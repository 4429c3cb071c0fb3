"""Run folders as the trainer writes them, with what a test wants in them."""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dwslm.page.server import PageServer
from dwslm.page.site import Site
from dwslm.runs.folder import RunFolder, create_run
from dwslm.runs.writer import Clock, RunWriter

BEGAN = 1_795_980_000.0
BATCH = 1024
PLANNED = 100 * BATCH


class Now:
    """A clock that a test sets."""

    def __init__(self, now: float = BEGAN):
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_run(
    root: Path,
    name: str = "one",
    *,
    losses: Sequence[float] = (),
    test: str = "",
    arm: str = "",
    job: str = "",
    seed: int = 0,
    began: float = BEGAN,
    seconds: float = 10.0,
    end: str | None = "done",
    **record: Any,
) -> RunFolder:
    """A run of one attempt with a report a step, `seconds` apart; `end` is its last event, None where it goes on."""
    config = {"proxy": {"test": test, "arm": arm, "job": job or None}, "checkpoint": {"keep_last": 3}}
    run = create_run(
        root,
        name,
        {"planned_tokens": PLANNED, "steps": 100, "config": config, "seed": seed, "config_hash": "abc", **record},
        clock=lambda: began,
    )
    now = Now(began)
    with RunWriter(run, 1, clock=Clock(wall=now, mono=now)) as writer:
        writer.event("start", step=0, tokens=0)
        for i, loss in enumerate(losses, 1):
            now.now += seconds
            writer.metrics(report(i, loss, seconds))
        if end is not None:
            writer.event(end, step=len(losses), tokens=len(losses) * BATCH)
    (run.path / "lock").touch()
    return run


def copy_run(run: RunFolder, name: str, *, began: float, test: str) -> None:
    """The same run under another name, without the care for power cuts that makes `make_run` slow."""
    record = run.record | {"name": name, "id": name, "created": began, "config": {"proxy": {"test": test, "arm": name}}}
    folder = run.path.with_name(f"copy-{name}")
    shutil.copytree(run.path, folder)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")


def report(step: int, loss: float, seconds: float = 10.0, **fields: Any) -> dict[str, Any]:
    speed = BATCH / seconds
    row = {"loss": loss, "grad_norm": 1 + loss / 10, "lr": 0.01, "skipped": 0, "tokens_per_second": speed, "mfu": None}
    return {"step": step, "tokens": step * BATCH, **row, **fields}


def append(run: RunFolder, rows: Sequence[dict[str, Any]], now: float, attempt: int = 1) -> None:
    """More reports in a file that is there already."""
    with open(run.path / f"metrics-{attempt}.jsonl", "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"schema": 1, "attempt": attempt, "time": now, "mono": now, **row}) + "\n")


def add_scores(run: RunFolder, step: int, overall: float, **slices: float) -> None:
    """A scoring of sources: name=bits per byte."""
    text = {"bytes": 100_000, "documents": 10, "context": 64, "dataset": "d", "small": False}
    with RunWriter(run, 99 + step, clock=Clock(wall=lambda: BEGAN, mono=lambda: 0.0)) as writer:
        for name, value in slices.items():
            row = {
                "slice": "source",
                "source": name,
                "language": None,
                "bits_per_byte": value,
                "interval": [value - 0.1, value + 0.1],
            }
            writer.evals({"step": step, "tokens": step * BATCH, **row, **text})
        row = {"slice": "overall", "source": None, "language": None, "bits_per_byte": overall, "interval": None}
        writer.evals({"step": step, "tokens": step * BATCH, **row, **text})
    (run.path / f"events-trainer-{99 + step}.jsonl").unlink()


@contextmanager
def served(runs: Path, now: Now, decisions: Path | None = None, queue: Path | None = None) -> Iterator[PageServer]:
    """A server on a free port, in a thread."""
    runs.mkdir(exist_ok=True)
    with PageServer(Site(runs, decisions, queue), "127.0.0.1", 0, clock=now) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
