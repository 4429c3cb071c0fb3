"""A run's figures, events and scores as the cells and sentences of a page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dwslm.page.amounts import amount, duration, moment, shown, visible
from dwslm.page.document import Cell, Table
from dwslm.page.run_data import RunData, Saved, number
from dwslm.page.words import digits
from dwslm.runs.reader import Row
from dwslm.runs.summary import RunSummary

STATES = {
    "queued": ("○", "quiet"), "paused": ("Ⅱ", "s3"), "running": ("●", "s0"), "stale": ("◐", "s1"), "done": ("✓", "s2"),
    "stopped": ("■", "quiet"), "failed": ("✕", "s5"), "lost": ("?", "s4"), "dropped": ("–", "quiet"),
}  # fmt: skip
"""State -> its sign, and the class of its colour. The word always stands beside them."""
ENDED = ("done", "stopped", "failed")
COLUMNS = ("run", "state", "tokens", "loss", "bpb", "tok/s", "finish, UTC")
PLAIN = frozenset({"schema", "attempt", "time", "mono", "event", "writer", "step", "tokens"})
"""Fields of an event that its row shows elsewhere, or nowhere."""


def cells(run: RunSummary) -> tuple[Cell, ...]:
    """The run's row under `COLUMNS`. `value` is what a column is sorted by."""
    tokens, planned, finish = number(run.tokens), number(run.planned_tokens), number(run.finish)
    share = f"{tokens / planned:.0%} of {amount(planned)}" if tokens is not None and planned else ""
    order = list(STATES)
    return (
        Cell(shown(run.name or run.path.name), note=" · ".join(shown(part) for part in (run.test, run.arm) if part)),
        Cell(run.state, float(order.index(run.state)) if run.state in order else None, note=visible(run.reason)),
        _cell(tokens, amount, share),
        _cell(run.loss, lambda value: f"{value:.4f}"),
        _cell(run.bits_per_byte, lambda value: f"{value:.4f}"),
        _cell(run.tokens_per_second, amount),
        Cell("", None)
        if finish is None
        else Cell(moment(finish), finish, note="" if run.state in ENDED else "estimate"),
    )


def _cell(value: Any, text: Any, note: str = "") -> Cell:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return Cell("")
    return Cell(text(float(value)) if np.isfinite(value) else str(float(value)), float(value), note=note)


def outcomes(states: Iterable[str]) -> dict[str, int]:
    """How often each state is there, in the order of `STATES`, without those that are not."""
    found = list(states)
    return {state: found.count(state) for state in [*STATES, *sorted(set(found) - STATES.keys())] if state in found}


def facts(run: RunSummary, data: RunData) -> list[tuple[str, str]]:
    """Name and value of what a reader asks first."""
    record, history = data.run.record, data.history
    hardware = record.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    dropped = f", {history.superseded:,} reports done again" if history.superseded else ""
    spent = next((row for row in reversed(data.events) if number(row.get("joules_per_token")) is not None), None)
    rows = [
        ("state", run.state + (f": {run.reason}" if run.reason else "")),
        ("test", " · ".join(part for part in (run.test, run.arm) if part)),
        ("tags", ", ".join(run.tags)),
        ("tokens", _of(number(run.tokens), number(run.planned_tokens))),
        ("loss, mean of 20", _told(run.loss, 4)),
        (
            "held-out bits per byte",
            _told(run.bits_per_byte, 4) + (f" at step {run.scored_step:,}" if run.scored_step else ""),
        ),
        (
            "speed, mean of 20",
            _told(run.tokens_per_second, 0, " tokens/s") + (f", MFU {run.mfu:.1%}" if number(run.mfu) else ""),
        ),
        ("began", f"{moment(run.created)} UTC"),
        ("last report", f"{moment(heard)} UTC" if (heard := number(run.heard)) is not None else ""),
        (
            "finish",
            f"{moment(ends)} UTC" + ("" if run.state in ENDED else ", estimated")
            if (ends := number(run.finish))
            else "",
        ),
        ("training alone", duration(float(history["hours"][-1]) * 3600) if len(history) else ""),
        ("attempts", f"{run.attempts}{dropped}" if run.attempts else ""),
        ("steps left out", f"{run.skips:,}" if run.skips else ""),
        ("energy", f"{spent['joules_per_token'] * 1e3:.3g} mJ per token, GPU alone" if spent else ""),
        ("peak learning rate", f"{value:.3g}" if (value := number(record.get("lr"))) is not None else ""),
        ("seed", str(record.get("seed", ""))),
        ("device", " on ".join(str(hardware[key]) for key in ("device", "host") if hardware.get(key))),
        ("commit", str(record.get("commit") or "")),
        ("configuration", str(run.config_hash)[:12]),
        (
            "command",
            " ".join(str(word) for word in record["command"]) if isinstance(record.get("command"), list) else "",
        ),
        ("folder", data.run.path.name),
    ]
    return [(name, value) for name, value in rows if value]


def _of(tokens: float | None, planned: float | None) -> str:
    if tokens is None:
        return f"0 of {planned:,.0f}" if planned else ""
    return f"{tokens:,.0f}" + (f" of {planned:,.0f}, {tokens / planned:.0%}" if planned else "")


def _told(value: Any, places: int, unit: str = "") -> str:
    return f"{value:,.{places}f}{unit}" if number(value) is not None else "" if value is None else str(value)


def checkpoint_table(saved: Sequence[Saved]) -> Table:
    rows = tuple(
        (
            Cell(f"step {one.step:,}"),
            _cell(one.tokens, amount),
            Cell(moment(one.time) if one.time is not None else ""),
            _cell(one.seconds, lambda value: f"{value:.1f} s"),
            Cell("deleted" if one.deleted else ", ".join(one.kept) or "not here"),
        )
        for one in saved
    )
    return Table("Checkpoints", ("checkpoint", "tokens", "saved, UTC", "took", "why it is kept"), rows)


def event_rows(events: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Newest first: moment, kind, step, and the rest in words."""
    found = []
    for row in reversed(events):
        step, when = number(row.get("step")), number(row.get("time"))
        rest = "; ".join(
            f"{key} {_value(value)}"
            for key, value in row.items()
            if key not in PLAIN and value not in (None, {}, [], "")
        )
        writer = row["writer"] if row["writer"] != "trainer" else ""
        found.append((
            moment(when) if when is not None else "",
            str(row["event"]).replace("_", " ") + (f" ({writer})" if writer else ""),
            f"{step:,.0f}" if step is not None else "",
            rest if len(rest) <= 400 else f"{rest[:400]}…",
        ))  # fmt: skip
    return found


def _value(value: Any) -> str:
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_value(item)}" for key, item in value.items()) + ")"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value[:8]) + (f" and {len(value) - 8} more" if len(value) > 8 else "")
    return str(value)


def latest_scores(evals: Sequence[Row]) -> tuple[list[Row], dict[tuple[Any, ...], float]]:
    """The rows of the last scoring by slice, and what the one before it of the same text gave, by `slice_key`.

    A scoring ends with its overall row.
    """
    scorings: list[list[Row]] = [[]]
    for row in evals:
        if (
            row.get("slice") in ("source", "language", "crossed", "overall")
            and number(row.get("bits_per_byte")) is not None
        ):
            scorings[-1].append(row)
        if row.get("slice") == "overall":
            scorings.append([])
    whole = sorted(
        (one for one in scorings if one and one[-1].get("slice") == "overall"), key=lambda one: one[-1]["step"]
    )
    if not whole:
        return [], {}
    last = whole[-1]
    same = [
        one
        for one in whole[:-1]
        if all(one[-1].get(key) == last[-1].get(key) for key in ("dataset", "context", "documents"))
    ]
    before = {slice_key(row): float(row["bits_per_byte"]) for row in same[-1]} if same else {}
    return last, before


def slice_key(row: Row) -> tuple[Any, ...]:
    return (row.get("slice"), row.get("source"), row.get("language"))


def slice_name(row: Row) -> str:
    return (
        visible(" · ".join(str(row[key]) for key in ("source", "language") if row.get(key) is not None)) or "all text"
    )


def slice_table(rows: Sequence[Row], before: Mapping[tuple[Any, ...], float]) -> Table:
    """Bits per byte of every slice, the interval, and the change since the scoring before."""
    made = []
    for row in rows:
        value = float(row["bits_per_byte"])
        change = value - before[slice_key(row)] if slice_key(row) in before else None
        spread = f"{ends[0]:.4f} to {ends[1]:.4f}" if (ends := interval(row)) else ""
        made.append((
            Cell(slice_name(row), note="little text" if row.get("small") else ""),
            Cell(f"{value:.4f}", value, strong=row.get("slice") == "overall"),
            Cell(spread),
            Cell("") if change is None else Cell(f"{change:+.4f}".replace("-", "−"), change),
            _cell(row.get("bytes"), amount),
        ))  # fmt: skip
    columns = ("slice", "bits per byte", "95 % interval", "change", "bytes")
    return Table("Bits per byte by slice", columns, tuple(made))


def interval(row: Row) -> tuple[float, float] | None:
    """Where a slice's bits per byte may lie, if that is known."""
    ends = row.get("interval")
    known = [end for end in map(number, ends) if end is not None] if isinstance(ends, list) else []
    return (known[0], known[1]) if len(known) == 2 else None
