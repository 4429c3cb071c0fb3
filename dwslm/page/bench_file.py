"""Reads the JSON of `dwslm bench` (described in docs/benchmark.md) and joins pieces of one run.

Strict about what a file is, tolerant of what it leaves out: a part that was not measured is None or empty. Times are
milliseconds, rates TFLOP/s and GB/s, memory bytes, shares fractions of one.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dwslm.runs.durable import from_json

FORMAT = 1
NO_CAP = "no clock cap stated"
"""A cap on the clock's range cannot be read back from the driver, so that none may only mean that nobody said."""
STATUSES = ("ok", "failed", "missing", "refused", "error", "skipped")


@dataclass(frozen=True)
class Measured:
    """A measured value: the median of `n` repetitions and their spread, both in the unit of the field that holds it."""

    median: float
    spread: float = 0.0
    n: int | None = None

    def differs(self, other: "Measured") -> bool:
        """Whether the medians lie further apart than either spread."""
        return abs(self.median - other.median) > max(self.spread, other.spread)


@dataclass(frozen=True)
class Record:
    """An engine as a CUDA graph. `status` is `ok`, `fails` or `differs`; None is what was not measured."""

    status: str
    reason: str
    identical: bool | None
    padding_identical: bool | None
    recorded: Measured | None
    launched: Measured | None


Key = tuple[str, str, str, int | None, int | None, int | None]


@dataclass(frozen=True)
class Row:
    """One engine on one piece of work."""

    op: str
    case: str
    engine: str
    tokens: int | None
    context: int | None
    heads: int | None
    dtype: str
    status: str
    reason: str
    errors: Mapping[str, tuple[float, float]]
    """Tensor -> relative error against float32, and the bound it is held to."""
    checks: Mapping[str, bool | None]
    forward: Measured | None
    both: Measured | None
    """Forward and backward."""
    forward_tflops: float | None
    tflops: float | None
    """Of forward and backward, as are the next three."""
    gb_s: float | None
    floor_ms: float | None
    floor_share: float | None
    peak_bytes: float | None
    extra: Mapping[str, Measured]
    """Work beside the kernel: `mask` building, `graph` building."""
    first_call_s: float | None
    record: Record | None
    commit: str

    @property
    def key(self) -> Key:
        return (self.op, self.case, self.engine, self.tokens, self.context, self.heads)

    @property
    def timed(self) -> bool:
        return self.status == "ok" and (self.both is not None or self.forward is not None)


@dataclass(frozen=True)
class Piece:
    """One file. `raw` holds the parts that are only shown: machine, versions, shape, data, work, products, noise, stability."""

    path: str
    command: str
    commit: str
    device: str
    clock_cap: str
    complete: bool
    raw: Mapping[str, Any]
    ceilings: Mapping[str, Measured]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Bench:
    """Pieces of one device, joined. `notes` say what a reader must know of the joining."""

    pieces: tuple[Piece, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def device(self) -> str:
        return self.pieces[0].device

    @property
    def clock_cap(self) -> str:
        return self.pieces[0].clock_cap

    @property
    def source(self) -> str:
        """Command, commit (shortened), device and clock cap, as one line."""
        commands = "; ".join(unique(piece.command for piece in self.pieces))
        commits = ", ".join(unique(short_commit(piece.commit) for piece in self.pieces))
        return f"{commands} · commit {commits} · {self.device} · {self.clock_cap}"

    @property
    def without_gpu(self) -> bool:
        """Whether the CPU's forms were measured: their products run in float32, and nothing else has a rate."""
        return self.ceiling("float32_tflops") is not None and self.ceiling("bf16_tflops") is None

    @property
    def shape(self) -> Mapping[str, Any]:
        """Sizes of the model that the work is for, as the first piece that knows them has them."""
        return next((piece.raw["shape"] for piece in self.pieces if piece.raw["shape"]), {})

    def select(self, op: str, case: str | None = None, *, tokens: int | None = None, context: int | None = None,
               heads: int | None = None) -> list[Row]:  # fmt: skip
        """Rows of an op; `case` is the start of theirs. An argument of None does not ask."""
        return [
            row
            for row in self.rows
            if row.op == op
            and (case is None or row.case.startswith(case))
            and (tokens is None or row.tokens == tokens)
            and (context is None or row.context == context)
            and (heads is None or row.heads == heads)
        ]

    def ceiling(self, name: str) -> float | None:
        """`copy_gb_s`, `bf16_tflops` or `fp8_tflops`: the highest of all pieces, since it is what can be reached."""
        return max((piece.ceilings[name].median for piece in self.pieces if name in piece.ceilings), default=None)


def short_commit(commit: str) -> str:
    """Twelve digits of the hash, and what follows a `+` (a checkout with changes)."""
    name, plus, rest = commit.partition("+")
    return f"{name[:12]}{plus}{rest}"


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def join(paths: Sequence[str | os.PathLike[str]]) -> Bench:
    """Reads the files and joins them; where two hold the same row, the one that started later has it.

    Raises ValueError where they come from different devices or clock caps, and what `read` raises.
    """
    pieces = sorted((read(path) for path in paths), key=lambda piece: str(piece.raw.get("started", "")))
    if not pieces:
        raise ValueError("give at least one benchmark JSON")
    first = pieces[0]
    notes = []
    for piece in pieces[1:]:
        if piece.device != first.device:
            raise ValueError(
                f"{piece.path}: measured on {piece.device}, but {first.path} on {first.device}; one page is one device"
            )
        if piece.clock_cap != first.clock_cap:
            raise ValueError(
                f"{piece.path}: {piece.clock_cap}, but {first.path}: {first.clock_cap}; one page is one clock cap"
            )
    commits = unique(piece.commit for piece in pieces)
    if len(commits) > 1:
        notes.append(f"The pieces come from different commits: {', '.join(commits)}. Compare them with care.")
    versions = unique(str(sorted(dict(piece.raw.get("versions") or {}).items())) for piece in pieces)
    if len(versions) > 1:
        notes.append("The pieces were measured with different versions of the libraries; the setup lists each.")
    notes += [
        f"{piece.path} ended before its time: what it had not reached is missing here."
        for piece in pieces
        if not piece.complete
    ]
    rows: dict[Key, Row] = {}
    replaced = 0
    for piece in pieces:
        for row in piece.rows:
            replaced += row.key in rows
            rows[row.key] = row
    if replaced:
        notes.append(f"{replaced} rows stand in more than one piece; the later measurement is shown.")
    return Bench(tuple(pieces), tuple(rows.values()), tuple(notes))


def read(path: str | os.PathLike[str]) -> Piece:
    """One file.

    Raises:
        OSError: it cannot be read.
        ValueError: naming the file and what is wrong: torn, not such a report, another format, a value of the wrong kind.
    """
    try:
        data = from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not whole JSON (torn, or another kind of file): {error}") from error
    try:
        return _piece(str(path), data)
    except _Wrong as wrong:
        raise ValueError(f"{path}: {wrong}") from wrong


class _Wrong(Exception):
    """What is wrong in a file, without its name."""


def _piece(path: str, data: Any) -> Piece:
    if isinstance(data, dict) and data.get("kind") == "step":
        raise _Wrong("is of `dwslm bench step`; this takes reports of `dwslm bench` on kernels only")
    if not isinstance(data, dict) or "format" not in data or "rows" not in data:
        raise _Wrong("not a report of `dwslm bench`: it has no `format` and `rows`")
    if data["format"] != FORMAT:
        raise _Wrong(f"is of format {data['format']!r}, and this version reads format {FORMAT}")
    raw: dict[str, Any] = {
        name: _mapping(data.get(name), name)
        for name in ("machine", "versions", "shape", "data", "noise", "stability", "ceilings")
    }
    # Lists of products by shape are for showing; a ceiling is one figure.
    ceilings = {name: given for name, given in raw["ceilings"].items() if not isinstance(given, list)}
    machine = raw["machine"]
    device = str(machine.get("device") or machine.get("cpu") or "unknown device")
    raw["work"] = [_mapping(work, f"work[{i}]") for i, work in enumerate(_items(data.get("work"), "work"))]
    for name in ("started", "seconds", "seed", "kind", "notes"):
        raw[name] = data.get(name)
    commit = str(data.get("commit") or "unknown")
    command = data.get("command") or "unknown command"
    rows = [_row(row, f"rows[{i}]", commit) for i, row in enumerate(_items(data["rows"], "rows"))]
    return Piece(
        path=path,
        command=command if isinstance(command, str) else " ".join(map(str, command)),
        commit=commit,
        device=device,
        clock_cap=_clock_cap(machine),
        complete=data.get("complete") is not False,
        raw=raw,
        ceilings=_figures(ceilings, "ceilings"),
        rows=tuple(rows),
    )


def _clock_cap(machine: Mapping[str, Any]) -> str:
    cap = _number(machine.get("clock_cap_mhz"), "machine.clock_cap_mhz")
    return f"clock cap {cap:,.0f} MHz" if cap else NO_CAP


def _row(value: Any, where: str, commit: str) -> Row:
    row = _mapping(value, where)
    names = {name: row.get(name) for name in ("op", "engine", "status")}
    for name, given in names.items():
        if not isinstance(given, str):
            raise _Wrong(f"{where}.{name}: expected text, got {given!r}")
    if names["status"] not in STATUSES:
        raise _Wrong(f"{where}.status: {names['status']!r} is none of {', '.join(STATUSES)}")
    gate = _mapping(row.get("gate"), f"{where}.gate")
    size = _mapping(gate.get("size"), f"{where}.gate.size")  # a second gate at the timed size, of the same tensors
    errors = _errors(gate.get("errors"), f"{where}.gate.errors")
    for tensor, (value, bound) in _errors(size.get("errors"), f"{where}.gate.size.errors").items():
        if tensor not in errors or not value * errors[tensor][1] <= errors[tensor][0] * bound:
            errors[tensor] = (value, bound)
    numbers = {
        name: _number(row.get(name), f"{where}.{name}")
        for name in ("forward_tflops", "tflops", "gb_s", "floor_ms", "floor_share", "peak_bytes", "first_call_s")
    }
    return Row(
        op=str(names["op"]),
        case=str(row.get("case") or ""),
        engine=str(names["engine"]),
        dtype=str(row.get("dtype") or ""),
        status=str(names["status"]),
        reason=str(row.get("reason") or ""),
        errors=errors,
        checks={name: _passed(given) for name, given in _mapping(gate.get("checks"), f"{where}.gate.checks").items()},
        forward=_figure(row.get("forward_ms"), f"{where}.forward_ms"),
        both=_figure(row.get("forward_backward_ms"), f"{where}.forward_backward_ms"),
        extra=_figures(row.get("extra_ms"), f"{where}.extra_ms"),
        record=_record(row.get("record"), f"{where}.record"),
        commit=commit,
        **numbers,
        tokens=_whole(row.get("tokens"), f"{where}.tokens"),
        context=_whole(row.get("context"), f"{where}.context"),
        heads=_whole(row.get("heads"), f"{where}.heads"),
    )


def _errors(value: Any, where: str) -> dict[str, tuple[float, float]]:
    found = {}
    for tensor, given in _mapping(value, where).items():
        pair = _mapping(given, f"{where}.{tensor}")
        error, bound = (_number(pair.get(name), f"{where}.{tensor}.{name}") for name in ("value", "bound"))
        if error is not None and bound is not None:
            found[tensor] = (error, bound)
    return found


def _record(value: Any, where: str) -> Record | None:
    record = _mapping(value, where)
    if not record.get("status"):
        return None
    return Record(
        status=str(record["status"]),
        reason=str(record.get("reason") or ""),
        identical=_passed(record.get("identical")),
        padding_identical=_passed(record.get("padding_identical")),
        recorded=_figure(record.get("recorded_ms"), f"{where}.recorded_ms"),
        launched=_figure(record.get("launched_ms"), f"{where}.launched_ms"),
    )


def _passed(value: Any) -> bool | None:
    """A check as the file has it: true or false, a word, or an object with `ok`."""
    if isinstance(value, dict):
        value = value.get("ok", value.get("passed"))
    return None if value is None or value == "skipped" else value is True or value in ("ok", "passed")


def _figures(value: Any, where: str) -> dict[str, Measured]:
    found = {name: _figure(given, f"{where}.{name}") for name, given in _mapping(value, where).items()}
    return {name: figure for name, figure in found.items() if figure is not None}


def _figure(value: Any, where: str) -> Measured | None:
    """A bare number is a median without a spread."""
    if value is None:
        return None
    if isinstance(value, dict):
        median = _number(value.get("median"), f"{where}.median")
        spread = _number(value.get("spread"), f"{where}.spread")
        n = _number(value.get("n"), f"{where}.n")
        return None if median is None else Measured(median, spread or 0.0, None if n is None else int(n))
    median = _number(value, where)
    return None if median is None else Measured(median)


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong(f"{where}: expected a number, got {value!r}")
    return value


def _whole(value: Any, where: str) -> int | None:
    number = _number(value, where)
    return None if number is None else int(number)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Wrong(f"{where}: expected an object, got {value!r:.60}")
    return value


def _items(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Wrong(f"{where}: expected a list, got {value!r:.60}")
    return value
