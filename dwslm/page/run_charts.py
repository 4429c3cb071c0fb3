"""Which figures a run has: what is drawn over what. The same list makes the SVG here and the plots in the browser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dwslm.page.amounts import amount, gigabytes, tick
from dwslm.page.curves import Line, curves
from dwslm.page.history import PART
from dwslm.page.run_data import RunData, number
from dwslm.page.words import digits

COLOURS = ("s0", "s1", "s2", "s3", "s4", "s5")
PARTS = {"data_seconds": "waiting for data", "device_seconds": "waiting for the device"}
KINDS_OF_MARK = {"resume": "resumed", "rollback": "gone back", "skip": "left out"}


@dataclass(frozen=True)
class Series:
    """A column of a set, and how it is drawn (see `curves.Line`). `set` is "" for the chart's own."""

    column: str
    label: str
    colour: str = "s0"
    kind: str = "strong"
    set: str = ""


@dataclass(frozen=True)
class Chart:
    """One panel. `over` is the column of the set that lies along x: `tokens` or `hours`. `marks` names kinds of events."""

    name: str
    title: str
    unit: str
    set: str
    over: str
    series: tuple[Series, ...]
    log: bool = False
    marks: tuple[str, ...] = ("resume", "rollback")


@dataclass(frozen=True)
class Figure:
    """Panels under one heading."""

    name: str
    title: str
    charts: tuple[Chart, ...]
    note: str = ""


@dataclass(frozen=True)
class Plots:
    """All that is drawn of a run: sets of columns over the same x, figures, and marks by kind as (step, tokens, hours)."""

    sets: Mapping[str, Mapping[str, np.ndarray]]
    figures: tuple[Figure, ...]
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)

    def values(self, chart: Chart, series: Series) -> tuple[np.ndarray, np.ndarray]:
        """x and y of one line."""
        columns = self.sets[series.set or chart.set]
        return columns[chart.over], columns[series.column]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite are null."""
        return {
            "sets": {name: {key: plain(values) for key, values in columns.items()} for name, columns in self.sets.items()},
            "charts": {
                chart.name: {
                    "title": chart.title, "unit": chart.unit, "set": chart.set, "over": chart.over, "log": chart.log,
                    "marks": list(chart.marks),
                    "series": [[s.column, s.label, s.colour, s.kind, s.set or chart.set] for s in chart.series],
                }
                for figure in self.figures
                for chart in figure.charts
            },
            "marks": {kind: {"tokens": plain(at[1]), "hours": plain(at[2])} for kind, at in self.marks.items()},
        }  # fmt: skip


def plain(values: np.ndarray) -> list[float | int | None]:
    if np.isfinite(values).all():
        whole = bool(len(values)) and bool((values == np.floor(values)).all()) and bool((np.abs(values) < 2**53).all())
        return values.astype(np.int64).tolist() if whole else values.tolist()
    return [value if np.isfinite(value) else None for value in values.tolist()]


def plots(data: RunData) -> Plots:
    """What a run has numbers for, and no more."""
    history = data.history
    at = history.points()
    reports = {name: history[name][at] for name in history.columns if name not in ("attempt", "step")}
    step, tokens = history.begun
    steps = np.maximum(np.diff(history["step"], prepend=float(step))[at], 1)
    batch = np.diff(history["tokens"], prepend=float(tokens))[at] / steps
    with np.errstate(divide="ignore", invalid="ignore"):
        reports["step_seconds_all"] = batch / reports["tokens_per_second"]
    sets: dict[str, Mapping[str, np.ndarray]] = {"reports": reports}
    figures = []
    raw, mean = Series("loss", "each report", "quiet", "thin"), Series("mean_loss", "mean of 20", "s0")
    if len(at):
        loss = tuple(
            Chart(f"loss-{over}", f"Loss by {words}", "nats per token", "reports", over, (raw, mean))
            for over, words in (("tokens", "tokens"), ("hours", "hours of training"))
        )
        figures.append(Figure("loss", "Loss", loss, "Hours count training and compiling: no saves, scores or pauses."))
    if scores := _scores(data):
        sets["scores"] = scores
        series = (Series("bits_per_byte", "held-out text", "s2"),)
        figures.append(
            Figure(
                "held-out",
                "Held-out bits per byte",
                (Chart("held-out", "", "bits per byte", "scores", "tokens", series),),
            )
        )

    def one(
        name: str, title: str, unit: str, *series: Series, set: str = "reports", over: str = "tokens", **how: Any
    ) -> None:
        shown = tuple(s for s in series if np.isfinite(sets[set].get(s.column, np.empty(0))).any())
        if shown:
            figures.append(Figure(name, title, (Chart(name, "", unit, set, over, shown, **how),)))

    if len(at):
        one("lr", "Learning rate", "of the matrices", Series("lr", "learning rate"))
        norm = Series("grad_norm", "gradient norm", "s0", "thin")
        one(
            "grad-norm",
            "Gradient norm, and steps left out",
            "before clipping",
            norm,
            log=True,
            marks=("skip", "rollback"),
        )
        one("speed", "Speed", "tokens per second", Series("tokens_per_second", "tokens per second", "s0", "thin"))
        one("mfu", "Share of the device's peak (MFU)", "of 1", Series("mfu", "MFU", "s0", "thin"))
        parts = [
            Series(
                name,
                PARTS.get(name, name.removesuffix(PART).replace("_", " ")),
                COLOURS[(i + 1) % len(COLOURS)],
                "thin",
            )
            for i, name in enumerate(history.parts)
        ]
        one("step-time", "Time of a step" + (" and its parts" if parts else ""), "seconds",
            Series("step_seconds_all", "whole step", "s0", "thin"), *parts, log=True)  # fmt: skip
    if data.health:
        sets["health"] = dict(data.health)
        if data.clock_cap is not None:
            sets["health"] = {**data.health, "cap": np.full(len(data.health["hours"]), data.clock_cap)}
        clock: dict[str, Any] = {"set": "health", "over": "hours", "marks": ()}
        one(
            "power",
            "Power of a GPU",
            "watts",
            Series("power_max", "highest", "s1", "thin"),
            Series("power", "mean", "s0"),
            **clock,
        )
        clocks = (
            Series("clock", "highest"),
            Series("clock_low", "lowest", "s2", "thin"),
            Series("cap", "cap", "s5", "dash"),
        )
        one("clock", "Clock of the GPU, and its cap", "MHz", *clocks, **clock)
        one("temperature", "Temperature of the GPU", "degrees Celsius", Series("temperature", "highest", "s5"), **clock)
        one("memory", "Memory of the GPU", "bytes in use", Series("memory_used", "all processes", "s3"), **clock)
    elif len(at):
        one("memory", "Memory", "bytes", Series("peak_memory", "highest so far", "s3"))
    return Plots(sets, tuple(figures), _marks(data))


def _scores(data: RunData) -> dict[str, np.ndarray]:
    """The trainer's overall scores, those of other writers left out: they scored other text, maybe."""
    rows = [
        row for row in data.evals
        if row["writer"] == "trainer" and row.get("slice") == "overall" and number(row.get("bits_per_byte")) is not None
    ]  # fmt: skip
    if not rows:
        return {}
    steps = np.array([row["step"] for row in rows], float)
    tokens, hours = data.place(steps)
    told = np.array(
        [number(row.get("tokens")) if number(row.get("tokens")) is not None else np.nan for row in rows], float
    )
    values = np.array([row["bits_per_byte"] for row in rows], float)
    return {"step": steps, "tokens": np.where(np.isfinite(told), told, tokens), "hours": hours, "bits_per_byte": values}


def _marks(data: RunData) -> dict[str, np.ndarray]:
    found = {}
    for kind in KINDS_OF_MARK:
        steps = [row["step"] for row in data.events if row["event"] == kind and number(row.get("step")) is not None]
        if steps:
            found[kind] = np.array([np.array(steps, float), *data.place(steps)])
    return found


AXES: Mapping[str, Callable[[float], str]] = {
    "tokens": lambda value: f"{tick(float(f'{value:.3g}'))} tokens",
    "hours": lambda value: (
        f"{value:.3g} h"
        if value >= 1 or not value
        else f"{value * 60:.3g} min"
        if value >= 1 / 60
        else f"{value * 3600:.3g} s"
    ),
}


def draw(prefix: str, chart: Chart, plots: Plots) -> str:
    """The panel as SVG; ids begin with `prefix`."""
    lines = [Line(*plots.values(chart, s), s.colour, s.kind) for s in chart.series]
    marks = [
        float(x)
        for kind in chart.marks
        if kind in plots.marks
        for x in plots.marks[kind][1 if chart.over == "tokens" else 2]
    ]
    return curves(
        f"{prefix}-{chart.name}",
        chart.title or chart.series[-1].label,
        describe(chart, plots),
        lines,
        x_text=AXES[chart.over],
        y_text=gigabytes if chart.unit.startswith("bytes") else tick,
        log=chart.log,
        marks=marks[:500],
    )


def describe(chart: Chart, plots: Plots) -> str:
    """What a curve shows, in a sentence a series."""
    told = []
    for s in chart.series:
        over, values = plots.values(chart, s)
        finite = np.isfinite(values)
        if not finite.any():
            continue
        text = (
            gigabytes
            if chart.unit.startswith("bytes")
            else amount
            if np.nanmax(np.abs(values[finite])) >= 1e4
            else digits
        )
        known, x = values[finite], over[finite]
        ends = f"{text(known[0])}" if len(known) == 1 else f"from {text(known[0])} to {text(known[-1])}"
        told.append(f"{s.label[0].upper()}{s.label[1:]}: {ends}, lowest {text(known.min())}, highest {text(known.max())}"
                    + (f", over {AXES[chart.over](float(x[-1]))}" if np.isfinite(x[-1]) else "") + ".")  # fmt: skip
        if not finite.all() and s.kind == "thin" and finite.sum() and s.column == "loss":
            told.append(f"{int((~finite).sum())} of the points are not finite and leave gaps.")
    for kind in chart.marks:
        if kind in plots.marks:
            n = plots.marks[kind].shape[1]
            told.append(f"{n} {'time' if n == 1 else 'times'} {KINDS_OF_MARK[kind]}.")
    return " ".join(told)
