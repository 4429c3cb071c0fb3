"""What `dwslm runs` shows, as tables. Names of runs are text of their owners and never markup."""

import math
import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dwslm.page.amounts import amount, duration, moment, visible
from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.reader import Row
from dwslm.runs.summary import RunSummary
from dwslm.runs.verdict import Verdict

STYLES = {"running": "green", "stale": "yellow", "lost": "red", "failed": "red", "paused": "cyan", "queued": "cyan"}
NAME_LIMIT = 40  # characters of a name in a table of several runs
WHOLE = ("id", "state")  # columns that a narrow terminal must not cut: the one is typed, the other looked for
ALWAYS = ("schema", "attempt", "step", "tokens", "time", "mono", "event", "writer")


def said(text: str, style: str = "") -> Text:
    """What runs and people say, as text: no markup, and nothing that steers the terminal."""
    return Text(visible(text), style=style)


def table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table; columns in `right` hold numbers."""
    made = Table(title=said(title), title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in WHOLE)
    return made


def figure(value: float | None, places: int = 4) -> str:
    return "-" if value is None else f"{value:.{places}f}" if math.isfinite(value) else str(value)


def progress(run: RunSummary) -> str:
    """Tokens, and the share of the plan."""
    if run.tokens is None:
        return "-"
    share = f" ({100 * run.tokens / run.planned_tokens:.0f} %)" if run.planned_tokens else ""
    return amount(run.tokens) + share


def finish(run: RunSummary, now: float) -> str:
    if run.finish is None:
        return "-"
    return f"in {duration(run.finish - now)}" if run.state == "running" else moment(run.finish)


def runs_table(runs: Iterable[RunSummary], unreadable: int, now: float) -> Table:
    """Every run, newest first."""
    rows = list(runs)
    told = f"{len(rows)} run{'s' * (len(rows) != 1)}" + (f", {unreadable} folders unreadable" if unreadable else "")
    columns = ("run", "id", "test", "state", "tokens", "loss", "bpb", "tok/s", "finish", "tags")
    cells = [
        (
            said(_short(run.name, NAME_LIMIT)),
            run.id,
            said(" / ".join(_short(part, NAME_LIMIT) for part in (run.test, run.arm) if part)),
            said(run.state, style=STYLES.get(run.state, "")),
            progress(run),
            figure(run.loss),
            figure(run.bits_per_byte),
            "-" if run.tokens_per_second is None else amount(run.tokens_per_second),
            said(finish(run, now)),
            said(", ".join(run.tags)),
        )
        for run in rows
    ]
    # Where nobody has one, a column would only take room from the others.
    held = [i for i, name in enumerate(columns) if name in WHOLE or any(str(row[i]) not in ("", "-") for row in cells)]
    made = table(told, [columns[i] for i in held], right=("tokens", "loss", "bpb", "tok/s"))
    for row in cells:
        made.add_row(*(row[i] for i in held))
    return made


def facts_table(run: RunFolder, found: RunSummary, now: float) -> Table:
    """One run, its figures and where they come from."""
    made = Table(title=said(f"{found.name} ({found.id})"), title_justify="left", show_header=False)
    record = run.record
    hardware = record.get("hardware") or {}
    rows = {
        "folder": str(run.path),
        "state": found.state + (f": {found.reason}" if found.reason else ""),
        "last report": "-" if found.heard is None else f"{moment(found.heard)}, {duration(now - found.heard)} ago",
        "test": " / ".join(part for part in (found.test, found.arm) if part),
        "tags": ", ".join(found.tags),
        "step": "-" if found.step is None else f"{found.step:,} of {record.get('steps', '?')}",
        "tokens": progress(found),
        "loss": figure(found.loss),
        "bits per byte": figure(found.bits_per_byte) + (f" at step {found.scored_step:,}" if found.scored_step else ""),
        "tokens per second": "-" if found.tokens_per_second is None else amount(found.tokens_per_second),
        "MFU": figure(found.mfu, 3),
        "finish": finish(found, now),
        "attempts": str(found.attempts),
        "left out": f"{found.skips} steps, {found.rollbacks} rollbacks",
        "seed": str(found.seed),
        "peak rate": str(record.get("lr", "-")),
        "commit": str(record.get("commit") or "-"),
        "hardware": f"{hardware.get('device', '?')} on {hardware.get('host', '?')}",
    }
    for name, told in rows.items():
        if told:
            made.add_row(name, said(told))
    return made


def slices_table(run: RunFolder) -> Table | None:
    """The last scores of training by slice; None where there are none."""
    rows = [row for row in reader.evals(run) if row["writer"] == "trainer" and "bits_per_byte" in row]
    if not rows:
        return None
    last = [row for row in rows if (row["attempt"], row["step"]) == (rows[-1]["attempt"], rows[-1]["step"])]
    before = [row for row in rows if row["step"] < rows[-1]["step"]]
    older = {_slice(row): row["bits_per_byte"] for row in before}
    columns = ("slice", "source", "language", "bits per byte", "change")
    made = table(f"Bits per byte at step {rows[-1]['step']:,}", columns, right=columns[3:])
    for row in sorted(last, key=lambda row: row.get("slice") != "overall"):
        kind, source, language = _slice(row)
        change = older.get(_slice(row))
        made.add_row(
            said(kind), said(source), said(language), figure(row["bits_per_byte"]),
            "-" if change is None else f"{row['bits_per_byte'] - change:+.4f}",
        )  # fmt: skip
    return made


def _slice(row: Row) -> tuple[str, str, str]:
    return str(row.get("slice") or ""), str(row.get("source") or ""), str(row.get("language") or "")


def events_table(rows: Sequence[Row], title: str) -> Table:
    """Events in the order given."""
    made = table(title, ("when (UTC)", "step", "event", "by", "what"), right=("step",))
    for row in rows:
        when = row.get("time")
        step = row.get("step")
        made.add_row(
            moment(when) if isinstance(when, int | float) else "?",
            f"{step:,}" if isinstance(step, int) else "",
            said(row["event"]),
            said(row["writer"]),
            said(event_words(row)),
        )
    return made


def event_words(row: Row) -> str:
    """What an event holds besides its head, in a line."""
    parts = [_fact(key, value) for key, value in row.items() if key not in ALWAYS and value not in (None, {})]
    return " ".join(parts)


def _fact(key: str, value: Any) -> str:
    if not isinstance(value, dict):
        return f"{key}={_short(value)}"
    words = ", ".join(f"{name}={_short(one)}" for name, one in value.items())
    return f"{key} ({words})" if len(words) <= 80 else f"{key} ({len(value)} facts)"


def _short(value: Any, limit: int = 80) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def report_line(row: Row) -> str:
    """A row of metrics in a line."""
    parts = [f"step {row['step']:,}", f"{amount(row['tokens'])} tokens" if isinstance(row.get("tokens"), int) else ""]
    for key, name, places in (("loss", "loss", 4), ("grad_norm", "norm", 3), ("lr", "rate", 6)):
        if isinstance(row.get(key), int | float):
            parts.append(f"{name} {figure(row[key], places)}")
    if isinstance(row.get("tokens_per_second"), int | float):
        parts.append(f"{amount(row['tokens_per_second'])} tok/s")
    return ", ".join(part for part in parts if part)


def compare_table(runs: Sequence[tuple[RunSummary, float | None]]) -> Table:
    """Runs side by side, with their distance from the first; each comes with its hours of training."""
    columns = ("run", "id", "arm", "seed", "state", "tokens", "hours", "loss", "bpb", "bpb against first", "tok/s")
    made = table("Runs side by side", columns, right=columns[5:])
    first = runs[0][0].bits_per_byte
    for run, hours in runs:
        distance = None if first is None or run.bits_per_byte is None else run.bits_per_byte - first
        made.add_row(
            said(_short(run.name, NAME_LIMIT)), run.id, said(_short(run.arm, NAME_LIMIT)), str(run.seed), said(run.state),
            progress(run), figure(hours, 2),
            figure(run.loss), figure(run.bits_per_byte), "-" if distance is None else f"{distance:+.4f}",
            "-" if run.tokens_per_second is None else amount(run.tokens_per_second),
        )  # fmt: skip
    return made


def verdict_view(found: Verdict) -> RenderableType:
    """Arms by tokens and by hours, and what follows."""
    name = "bits per byte" if found.metric == "bits_per_byte" else "loss, mean of 20 reports"
    columns = ("arm", "seeds", "by tokens", "seeds apart", "hours there", "by hours")
    made = table(f"Arms at {amount(found.tokens)} tokens: {name}", columns, right=columns[1:])
    for arm in found.arms:
        apart = max(arm.values) - min(arm.values) if len(arm.values) > 1 else None
        by_hours = None if arm.by_hours is None else fmean(arm.by_hours)
        made.add_row(
            said(arm.name), str(len(arm.runs)), figure(fmean(arm.values)), figure(apart), figure(fmean(arm.hours), 2),
            figure(by_hours),
        )  # fmt: skip
    clock = f"By hours: each arm after {found.hours:.2f} h of training. " if found.hours is not None else ""
    return Group(made, said(f"{clock}Verdict: {found.words()}."))


def diff_table(a: RunFolder, b: RunFolder, differing: Sequence[tuple[str, Any, Any]]) -> Table:
    """Settings and facts in which two runs differ."""
    made = table(f"{len(differing)} differences", ("what", a.path.name, b.path.name))
    for name, one, other in differing:
        made.add_row(said(name), said(_short(one)), said(_short(other)))
    return made


def updated(now: float) -> Text:
    return said(f"Updated {time.strftime('%H:%M:%S', time.gmtime(now))} UTC.")
