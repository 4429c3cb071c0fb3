"""What a user reads of a run: the plan before it, the receipt of a resume, the progress bar."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dwslm.train.plan import Plan

MATRIX_FLOPS = 6  # multiply and add, once forward and twice backward


def count(n: float) -> str:
    """1,234,567 as "1.23M"; exact below ten thousand."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if abs(n) >= size:
            return f"{n / (1e3 if unit == 'K' else size):.1f}{unit}"
    return f"{n:,.0f}"


def gigabytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB"


def rate(lr: float) -> str:
    """Two significant digits: 0.003666 as "3.7e-3"."""
    mantissa, exponent = f"{lr:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def facts(title: str, rows: Mapping[str, str]) -> Table:
    """Two columns, names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def plan_table(plan: Plan) -> Table:
    pins = ", ".join(f"step {step:,} ({reason})" for step, reason in sorted(plan.pins.items()))
    shapes = "; ".join(
        f"{plan.micro_batch_tokens // context} rows of {context:,}" + (f" from step {step:,}" if step else "")
        for step, context in plan.rungs
    )
    return facts(
        "Plan",
        {
            "tokens": f"{plan.tokens:,} ({count(plan.tokens)})",
            "steps": f"{plan.steps:,} of {plan.batch_tokens:,} tokens",
            "micro-batch": f"{plan.micro_batch_tokens:,} tokens, {shapes}, {plan.grad_accum} accumulated"
            + (f" on each of {plan.world} ranks" if plan.world > 1 else ""),
            "peak rate": f"{rate(plan.lr)} ({plan.lr:.6g}), schedule {plan.optim.schedule}",
            "checkpoints": f"every {plan.save_stride:,} steps, pinned: {pins or 'none'}",
            "held-out scores": (f"every {plan.score_stride:,} steps and " if plan.score_stride else "") + "at the end",
        },
    )


def size_table(sizes: Mapping[str, int]) -> Table:
    table = Table(title="Parameters by group", title_justify="left")
    table.add_column("group")
    table.add_column("parameters", justify="right")
    for name, size in [*sizes.items(), ("all", sum(sizes.values()))]:
        table.add_row(name, f"{size:,}")
    return table


def routing_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Which rule takes which parameters; alike ones of all layers share a line."""
    table = Table(title="Routing: who is updated how", title_justify="left")
    for name in ("parameters", "shape", "role", "rule"):
        table.add_column(name, overflow="fold")
    table.add_column("blocks", justify="right")
    table.add_column("peak rate", justify="right")
    groups: dict[tuple[str, ...], int] = {}
    for row in rows:
        name = ".".join("*" if part.isdigit() else part for part in str(row["name"]).split("."))
        shape = " x ".join(str(n) for n in row["shape"]) or "scalar"
        key = (name, shape, str(row["role"]), str(row["rule"]), rate(float(row["lr"])))
        groups[key] = groups.get(key, 0) + 1
    for (name, shape, role, rule, lr), blocks in groups.items():
        table.add_row(Text(name), shape, role, rule, str(blocks), lr)
    return table


def data_table(description: Mapping[str, Any]) -> Table:
    """What `dwslm.data.describe` says about the plan, by phase and source."""
    table = Table(
        title=f"Data: {count(description['planned_tokens'])} slots, {description['padding_share']:.2%} padding",
        title_justify="left",
    )
    names = [("phase", "left"), ("context", "right"), ("source", "left"), ("share", "right"), ("tokens", "right")]
    capped = any(row["cap"] is not None for row in description["sources"].values())
    for name, justify in [*names, ("epochs", "right"), *([("at most", "right")] if capped else [])]:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    phases = description["phases"]
    if len(phases) == 1:  # then it is the whole plan
        whole, phases = {**phases[0], "start": None, "sources": description["sources"]}, []
    else:
        whole = {"start": None, "context": None, "sources": description["sources"]}
    for phase in [*phases, whole]:
        label = "all" if phase["start"] is None else f"from {100 * phase['start']:.4g}%"
        context = "" if phase["context"] is None else f"{phase['context']:,}"
        for name, row in phase["sources"].items():
            original = description["rephrased"].get(name)
            cells: list[str | Text] = [
                label,
                context,
                Text(f"{name}, rephrased from {original}" if original else name),
                f"{row['share']:.2%}",
                count(row["tokens"]),
                f"{row['epochs']:.2f}",
            ]
            if capped:
                cells.append("" if row.get("cap") is None else f"{row['cap']:g}")
            table.add_row(*cells)
            label = context = ""
    return table


def rung_table(description: Mapping[str, Any], micro_batch_tokens: int) -> Table:
    """The shapes of rows and micro-batches: segments, padding, and what the limit of segments costs."""
    table = Table(title=f"Rows, in micro-batches of {micro_batch_tokens:,} slots", title_justify="left")
    micro_batch, row = ("from", "context", "rows", "segments", "of slots"), ("a row", "most", "limit", "needed")
    for name in (*micro_batch, *row, "padding", "without limit"):
        table.add_column(name, justify="right")
    for rung in description["rungs"]:
        rows = micro_batch_tokens // rung["context"]
        table.add_row(
            f"{100 * rung['start']:.4g}%",
            f"{rung['context']:,}",
            str(rows),
            f"{rows * rung['segments_per_row_mean']:,.0f}",
            f"{rows * rung['segments_per_row_limit']:,}",
            f"{rung['segments_per_row_mean']:.1f}",
            str(rung["segments_per_row_max"]),
            str(rung["segments_per_row_limit"]),
            str(rung["segments_per_row_needed"]),
            f"{rung['padding_share']:.2%}",
            f"{rung['padding_share_unlimited']:.2%}",
        )
    return table


def memory_table(estimate: Mapping[str, int]) -> Table:
    table = Table(title="Memory estimate", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for name, size in [*estimate.items(), ("all", sum(estimate.values()))]:
        table.add_row(name, gigabytes(size))
    return table


class _TimeLeft(ProgressColumn):
    """Time left at the speed of this attempt, since what was done before a resume took no time here."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["seconds_left"]
        if seconds is None:
            return Text("-:--:-- left")
        minutes, seconds = divmod(int(seconds), 60)
        return Text(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left", style="cyan")


class TrainProgress:
    """The progress bar; where the output is no terminal, one line a report instead."""

    def __init__(self, console: Console, plan: Plan, first_step: int):
        self.console, self.plan, self.first_step = console, plan, first_step
        self.bar = Progress(
            TextColumn("{task.fields[tokens]}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            _TimeLeft(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(
            "train", total=plan.steps, completed=first_step, tokens="", figures="starting", seconds_left=None
        )

    def __enter__(self) -> "TrainProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def report(self, row: Mapping[str, Any], seconds_per_step: float) -> None:
        """Shows a row of metrics."""
        step = row["step"]
        left = seconds_per_step * (self.plan.steps - step)
        mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
        figures = f"loss {row['loss']:.4f}, {count(row['tokens_per_second'])} tok/s{mfu}"
        tokens = f"{count(row['tokens'])} of {count(self.plan.tokens)} tokens"
        self.bar.update(self.task, completed=step, tokens=tokens, figures=figures, seconds_left=left)
        if not self.console.is_terminal:
            self.console.print(f"step {step:,}: {tokens}, {figures}, {left / 60:.1f} min left", highlight=False)
