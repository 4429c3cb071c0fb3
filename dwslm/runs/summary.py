"""One line for every run of a folder, quickly: what has not changed since the last look is taken from a cache.

The cache is `<runs_dir>/.summaries.json`. It is derived, may be deleted at any time, and is not written where the folder is
read-only. Files that have grown are read again: metrics from their ends, events and scores whole.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dwslm.runs import reader
from dwslm.runs.durable import from_json, to_json
from dwslm.runs.folder import RunFolder, list_runs
from dwslm.runs.reader import Row
from dwslm.runs.state import Facts, confirm, gather

CACHE = ".summaries.json"
CACHE_VERSION = 1
REPORTS = 20
"""Loss and speed are means of so many of the last reports."""
OVER = ("done", "stopped", "failed")


@dataclass(frozen=True)
class RunSummary:
    """What a list shows of a run. None where the run has said nothing of it yet; times in seconds since 1970."""

    path: Path
    """Its folder."""
    id: str
    name: str
    """As it was given: any text."""
    test: str
    """Test that it belongs to, "" for none."""
    arm: str
    """Arm of that test."""
    state: str
    """See `dwslm.runs.state`."""
    reason: str
    """Why it is in that state, in a line; may be empty."""
    created: float
    step: int | None
    """Of the last report."""
    tokens: int | None
    planned_tokens: int | None
    loss: float | None
    """Nats a token, mean of the last `REPORTS` reports."""
    bits_per_byte: float | None
    """Of the held-out set, the trainer's last score."""
    scored_step: int | None
    tokens_per_second: float | None
    """Mean of the last `REPORTS` reports."""
    mfu: float | None
    finish: float | None
    """When it ended; while it runs, when it will at its present speed; None where nobody knows."""
    heard: float | None
    """Time of its last report."""
    attempts: int
    skips: int
    """Steps that were left out."""
    rollbacks: int
    tags: tuple[str, ...]
    seed: int | None
    config_hash: str
    job: str = ""
    """Job of a queue that it was started by, "" for none."""


def summaries(runs_dir: str | os.PathLike[str], now: float | None = None) -> list[RunSummary]:
    """All runs under `runs_dir`, newest first; folders whose run.json can't be read are left out (see `list_runs`).

    now: seconds since 1970, for states and finishes; this moment if not given.
    """
    now = time.time() if now is None else now
    root = Path(runs_dir)
    before = _load(root / CACHE)
    after: dict[str, dict[str, Any]] = {}
    found = []
    for run in list_runs(root)[0]:
        try:
            entry = _entry(run, before.get(run.path.name, {}))
            try:
                one = _summary(run, entry, now)
            except (KeyError, TypeError):  # somebody has written into the cache
                entry = _entry(run, {})
                one = _summary(run, entry, now)
        except FileNotFoundError:
            continue  # it was deleted at this moment
        after[run.path.name] = entry
        found.append(one)
    if after != before:
        _store(root / CACHE, after)
    return found


def summary(run: RunFolder, now: float | None = None) -> RunSummary:
    """The same of one run, without the cache."""
    return _summary(run, _entry(run, {}), time.time() if now is None else now)


def _entry(run: RunFolder, before: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run in three parts, each with the sizes and times of the files that it was made from."""
    stats: dict[str, dict[str, list[int]]] = {"events": {}, "metrics": {}, "evals": {}}
    with os.scandir(run.path) as listing:
        for item in listing:
            part = item.name.partition("-")[0]
            if part in stats and item.name.endswith(".jsonl"):
                stat = item.stat()
                stats[part][item.name] = [stat.st_size, stat.st_mtime_ns]
    # What stands of metrics and scores depends on the resumes among the events, and the last report on both.
    seen = {
        "events": {**stats["events"], **stats["metrics"]},
        "metrics": {**stats["events"], **stats["metrics"]},
        "evals": {**stats["events"], **stats["evals"]},
    }
    make: dict[str, Callable[[RunFolder], dict[str, Any]]] = {"events": _events, "metrics": _metrics, "evals": _evals}
    entry = {}
    for part, files in seen.items():
        old = before.get(part)
        same = isinstance(old, dict) and old.get("files") == files
        entry[part] = old if same else {"files": files, "figures": make[part](run)}
    return entry


def _events(run: RunFolder) -> dict[str, Any]:
    rows = reader.events(run)
    kinds = [row["event"] for row in rows]
    return {
        "facts": asdict(gather(run, rows)),
        "attempts": max((row["attempt"] for row in rows if row["writer"] == "trainer"), default=0),
        "skips": kinds.count("skip"),
        "rollbacks": kinds.count("rollback"),
        "tags": tags(rows),
    }


def tags(events: list[Row]) -> list[str]:
    """The tags that stand after all `tag` events, in the order of their being given."""
    found: list[str] = []
    for row in events:
        if row["event"] == "tag":
            removed, added = row.get("remove"), row.get("add")
            found = [tag for tag in found if tag not in (removed if isinstance(removed, list) else [])]
            found += [tag for tag in (added if isinstance(added, list) else []) if tag not in found]
    return found


def _metrics(run: RunFolder) -> dict[str, Any]:
    rows = reader.last_metrics(run, REPORTS)
    figures = {name: mean(rows, name) for name in ("loss", "tokens_per_second", "mfu")}
    return figures | {"step": rows[-1]["step"] if rows else None, "tokens": rows[-1].get("tokens") if rows else None}


def _evals(run: RunFolder) -> dict[str, Any]:
    rows = [row for row in reader.evals(run) if row["writer"] == "trainer" and row.get("slice") == "overall"]
    last = rows[-1] if rows else {}
    return {"bits_per_byte": last.get("bits_per_byte"), "step": last.get("step")}


def mean(rows: list[Row], name: str) -> float | None:
    """Of a column, over the rows that have it; None where none does. Not finite where one of them isn't."""
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    if math.inf in values and -math.inf in values:
        return math.nan  # fmean refuses them
    return fmean(values) if values else None


def _summary(run: RunFolder, entry: dict[str, Any], now: float) -> RunSummary:
    events, metrics, scores = (entry[part]["figures"] for part in ("events", "metrics", "evals"))
    facts = Facts(**events["facts"])
    standing = confirm(run, facts, now)
    planned, seed = run.record.get("planned_tokens"), run.record.get("seed")
    finish = None
    if standing.state in OVER:
        finish = facts.at
    elif standing.state == "running" and planned and metrics["tokens"] and metrics["tokens_per_second"]:
        finish = now + max(0, planned - metrics["tokens"]) / metrics["tokens_per_second"]
    return RunSummary(
        path=run.path,
        id=run.id,
        name=run.name,
        test=run.test,
        arm=run.arm,
        state=standing.state,
        reason=standing.reason,
        created=float(run.record["created"]),
        step=metrics["step"],
        tokens=metrics["tokens"],
        planned_tokens=planned,
        loss=metrics["loss"],
        bits_per_byte=scores["bits_per_byte"],
        scored_step=scores["step"],
        tokens_per_second=metrics["tokens_per_second"],
        mfu=metrics["mfu"],
        finish=finish,
        heard=standing.heard,
        attempts=events["attempts"],
        skips=events["skips"],
        rollbacks=events["rollbacks"],
        tags=tuple(events["tags"]),
        seed=seed,
        config_hash=str(run.record.get("config_hash") or ""),
        job=run.job,
    )


def _load(path: Path) -> dict[str, dict[str, Any]]:
    try:
        stored = from_json(path.read_text(encoding="utf-8"))
        runs = stored["runs"] if stored["version"] == CACHE_VERSION else {}
        return {name: entry for name, entry in runs.items() if isinstance(entry, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # made anew


def _store(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(to_json({"version": CACHE_VERSION, "runs": runs}), encoding="utf-8")
        new.replace(path)
    except OSError:  # a read-only or full disk: the next look reads the runs again
        with contextlib.suppress(OSError):
            new.unlink()


__all__ = ["CACHE", "REPORTS", "RunSummary", "mean", "summaries", "summary", "tags"]
