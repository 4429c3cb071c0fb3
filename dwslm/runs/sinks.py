"""What trackers are sent of a run: each a small object that takes its rows, used in a process of its own (`follow`)."""

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from dwslm.runs.folder import RunFolder
from dwslm.runs.reader import Row

HEAD = ("schema", "attempt", "step", "tokens", "time", "mono")
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}
"""Sink -> the package that it needs."""
WANDB_MODES = ("offline", "online")


class Sink(Protocol):
    """A tracker. Whatever it raises, or however long it takes, is its own affair."""

    def metrics(self, row: Row) -> None: ...
    def evals(self, row: Row) -> None: ...
    def close(self, failed: bool) -> None: ...


class Wandb:
    """Weights & Biases: a run of the same name, its curves over tokens. Offline it writes into the run's folder, `wandb/`."""

    def __init__(self, run: RunFolder, settings: dict[str, Any]):
        """settings: `mode` ("offline" or "online"), `project`, `entity`."""
        import wandb

        self._run = wandb.init(
            project=settings["project"],
            entity=settings["entity"],
            mode=settings["mode"],
            id=run.path.name,
            name=run.name,
            dir=str(run.path),
            config=run.record.get("config"),
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        )
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def metrics(self, row: Row) -> None:
        at = {key: row[key] for key in ("step", "tokens") if key in row}
        self._run.log(at | {f"train/{name}": value for name, value in numbers(row).items()})

    def evals(self, row: Row) -> None:
        if found := score(row):
            self._run.log({"step": row["step"], "tokens": row.get("tokens"), found[0]: found[1]})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TensorBoard:
    """Event files in the run's folder, `tensorboard/attempt-N/`, a run of TensorBoard for each attempt. Needs no TensorFlow."""

    def __init__(self, run: RunFolder, settings: dict[str, Any]):
        """settings: none."""
        self._root = run.path / "tensorboard"
        self._attempt: int | None = None
        self._writer: Any = None

    def metrics(self, row: Row) -> None:
        self._add(row, {f"train/{name}": value for name, value in numbers(row).items()})

    def evals(self, row: Row) -> None:
        if found := score(row):
            self._add(row, dict([found]))

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, row: Row, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if row["attempt"] != self._attempt:
            folder = self._root / f"attempt-{row['attempt']}"
            if self._attempt is None and folder.exists():
                raise ValueError(f"{folder} is there already: delete it to send these rows again")
            self.close(False)
            self._attempt = row["attempt"]
            self._writer = EventFileWriter(str(folder))
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=summary))


SINKS: dict[str, Callable[[RunFolder, dict[str, Any]], Sink]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def require(name: str) -> None:
    """Raises ValueError where the package of a sink is not installed."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise ValueError(
            f"{name} is not installed: python -m pip install {PACKAGES[name]}, or leave track.{name} off; "
            "`dwslm runs send` sends a run later"
        )


def numbers(row: Row) -> dict[str, float]:
    """The figures of a row, not finite ones among them."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in HEAD and isinstance(value, int | float) and not isinstance(value, bool)
    }


def score(row: Row) -> tuple[str, float] | None:
    """Name and value of a score: "eval/bits_per_byte", "eval/crossed/wiki/de/bits_per_byte"."""
    value = row.get("bits_per_byte")
    if not isinstance(value, int | float):
        return None
    kind = str(row.get("slice", "overall"))
    parts = [] if kind == "overall" else [kind, *(str(row[key]) for key in ("source", "language") if row.get(key))]
    return "/".join(["eval", *parts, "bits_per_byte"]), float(value)
