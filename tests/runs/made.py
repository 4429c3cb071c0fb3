"""Runs as they lie on disk, without a trainer."""

import json
from pathlib import Path
from typing import Any

from dwslm.runs.folder import RunFolder, create_run


def make_run(
    root: Path,
    name: str = "run",
    *,
    losses: list[float] | None = None,
    scores: dict[int, float] | None = None,
    speed: float = 1000.0,
    step_tokens: int = 100,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    created: float = 1000.0,
    end: str | None = "done",
    **record: Any,
) -> RunFolder:
    """A run of one attempt: `losses` of steps 1, 2, ..., `scores` by step, in bits per byte; times from `created` on."""
    about = {
        "seed": seed,
        "planned_tokens": step_tokens * len(losses or []),
        "stream": f"order-{seed}",
        "hardware": {"host": "elsewhere", "device": "a GPU"},
        "config": {"name": name, "train": {"seed": seed}, **(settings or {})},
        "config_hash": "abc",
        "lr": 0.01,
    }
    run = create_run(root, name, about | record, clock=lambda: created)
    head = {"schema": 1, "attempt": 1}

    def at(step: int) -> dict[str, Any]:
        return head | {"step": step, "tokens": step * step_tokens, "time": created + step, "mono": float(step)}

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            (run.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    events = [at(0) | {"event": "start"}]
    if end is not None:
        events.append(at(len(losses or [])) | {"event": end})
    write("events-trainer-1.jsonl", events)
    write(
        "metrics-1.jsonl",
        [at(step) | {"loss": loss, "tokens_per_second": speed} for step, loss in enumerate(losses or [], 1)],
    )
    rows = []
    for step, score in (scores or {}).items():
        slices = [("source", "wiki", None, 1.0), ("source", "books", None, 1.0), ("language", None, "de", 2.0)]
        rows += [
            at(step) | {"slice": kind, "source": source, "language": language, "bits_per_byte": score * factor}
            for kind, source, language, factor in [
                *slices,
                ("crossed", "wiki", "de", 3.0),
                ("overall", None, None, 1.0),
            ]
        ]
    write("evals-trainer.jsonl", rows)
    return run
