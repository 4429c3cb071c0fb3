"""What GPUs have shown of a step's pieces, and of whole runs on one and more: the file that predictions start from."""

import json
import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Run:
    """A run of the measured model, with its micro-batch and batch, by so many ranks."""

    ranks: int
    """Processes, each on a GPU; all on one machine."""
    tokens_per_second: float
    """Median over warm rows of metrics, of all ranks together."""
    rank_seconds: tuple[float, ...] = ()
    """The same of `rank_seconds`, rank by rank: seconds of a step that it did not wait for others; empty for one rank."""
    scatter_seconds: float | None = None
    """The sum of gradients in a step, from when all ranks were there."""
    gather_seconds: float | None = None
    """Exchange of compute copies in a step."""
    update_seconds: float | None = None
    """An update without its exchanges, of the rank that takes longest."""
    peak_memory: float | None = None
    """Bytes, as the rows of metrics have it."""


@dataclass(frozen=True)
class Measured:
    """Pieces, from one GPU and two; and runs to check their sum against."""

    device: str
    """Name of the GPU."""
    source: str
    """Date, commit, and how it was measured."""
    settings: tuple[str, ...]
    """Of the measured model, as train.py takes them."""
    micro_batch_seconds: float
    """A micro-batch on one GPU: forward, backward, gradients accumulated."""
    newton_schulz_seconds: float
    """Newton-Schulz of all matrices on one GPU."""
    elementwise_seconds: float
    """What else an update takes on one GPU."""
    copy_rate: float
    """Bytes a second within a GPU's memory, read and written."""
    scatter_rate: float
    """Bytes a second through each rank's links, in one direction: (ranks - 1) x share / seconds of a reduce-scatter alone."""
    gather_rate: float
    """The same of an all-gather."""
    runs: tuple[Run, ...]
    """Runs by one and more ranks."""


def read_measured(path: Path) -> Measured:
    """Reads the JSON file.

    Raises:
        ValueError: naming file and name of what is missing, unknown or of another kind, or a number that is not positive.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    values = _values(found, Measured, str(path))
    runs = [Run(**_values(run, Run, f"{path}: runs[{n}]")) for n, run in enumerate(values["runs"])]
    for n, run in enumerate(runs):
        if run.rank_seconds and len(run.rank_seconds) != run.ranks:
            raise ValueError(
                f"{path}: runs[{n}].rank_seconds has {len(run.rank_seconds)} numbers for {run.ranks} ranks"
            )
    return Measured(**values | {"runs": tuple(runs)})


def _values(found: Any, kind: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: must be an object, with {', '.join(field.name for field in fields(kind))}")
    if unknown := sorted(found.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{where}: unknown name {unknown[0]}")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in found:
            values[field.name] = _value(found[field.name], hints[field.name], f"{where}: {field.name}")
        elif field.default is MISSING:
            raise ValueError(f"{where}: {field.name} is missing")
    return values


def _value(value: Any, kind: Any, what: str) -> Any:
    """A text; a whole or any positive number, or null where that may be; or a list: of texts, numbers, or runs as they are."""
    if kind is str and isinstance(value, str):
        return value
    if kind is int and type(value) is int and value > 0:
        return value
    if kind in (float, float | None) and type(value) in (int, float) and 0 < value < math.inf:
        return float(value)
    if kind == float | None and value is None:
        return None
    if isinstance(value, list) and getattr(kind, "__origin__", None) is tuple:
        inner = kind.__args__[0]
        return tuple(value if inner is Run else (_value(v, inner, f"{what}[{n}]") for n, v in enumerate(value)))
    names = {str: "a text", int: "a whole number above 0", float: "a number above 0"}
    or_null = "a number above 0 or null" if kind == float | None else "a list"
    raise ValueError(f"{what} is {json.dumps(value)}: must be {names.get(kind, or_null)}")
