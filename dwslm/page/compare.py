"""A run beside the rest of its test: by tokens and by hours, since a slower arm has to win on the clock as well."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dwslm.page.amounts import amount, shown
from dwslm.page.document import Cell, Table
from dwslm.page.history import pick
from dwslm.page.run_charts import COLOURS, Chart, Figure, Plots, Series
from dwslm.page.run_data import RunData, number
from dwslm.runs.folder import open_run
from dwslm.runs.summary import RunSummary
from dwslm.runs.verdict import verdict

SIBLINGS = 7  # runs beside the one that is looked at; eight colours and dashes can be told apart, more cannot
POINTS = 300
VERDICT_BYTES = 8_000_000  # of metrics that a verdict is made of while a page waits; beyond, the page names the command


@dataclass(frozen=True)
class Brief:
    """What a comparison needs of a run: tokens, hours of training and the mean loss along it."""

    tokens: np.ndarray
    hours: np.ndarray
    loss: np.ndarray

    def at(self, name: str, place: float) -> float:
        """The mean loss at so many tokens or hours, in between reports in proportion."""
        x = getattr(self, name)
        known = np.isfinite(x) & np.isfinite(self.loss)
        return float(np.interp(place, x[known], self.loss[known])) if known.any() else float("nan")

    def end(self, name: str) -> float:
        x = getattr(self, name)
        known = x[np.isfinite(x) & np.isfinite(self.loss)]
        return float(known[-1]) if len(known) else float("nan")


NO_BRIEF = Brief(np.empty(0), np.empty(0), np.empty(0))


def brief(data: RunData) -> Brief:
    history = data.history
    at = pick([history["mean_loss"]], POINTS) if len(history) else np.empty(0, int)
    return Brief(history["tokens"][at], history["hours"][at], history["mean_loss"][at])


def stored_brief(page_data: Mapping[str, Any]) -> Brief:
    """The same out of what an earlier export wrote for the browser."""
    columns = page_data["own"]["sets"].get("reports", {})
    values = [
        np.array([np.nan if v is None else v for v in columns.get(name, [])], float)
        for name in ("tokens", "hours", "mean_loss")
    ]
    at = pick([values[2]], POINTS) if len(values[2]) else np.empty(0, int)
    return Brief(*(value[at] for value in values))


def siblings(run: RunSummary, runs: Sequence[RunSummary]) -> list[RunSummary]:
    """The other runs of its test that a page compares it with: the newest ones."""
    if not run.test:
        return []
    return [other for other in runs if other.test == run.test and other.path.name != run.path.name][:SIBLINGS]


def label(run: RunSummary) -> str:
    seed = f", seed {run.seed}" if run.seed is not None else ""
    return f"{shown(run.arm or run.name or run.path.name)}{seed}"


def compare(run: RunSummary, others: Sequence[RunSummary], briefs: Mapping[str, Brief]) -> tuple[Plots, Table]:
    """Figures and table. `briefs` by folder name; a run without one, or without reports, is in the table alone."""
    every = [run, *others]
    drawn = [one for one in every if one.path.name in briefs and len(briefs[one.path.name].loss)]
    sets = {}
    series = []
    for one in drawn:
        b, i = briefs[one.path.name], every.index(one)
        sets[f"run:{one.path.name}"] = {"tokens": b.tokens, "hours": b.hours, "mean_loss": b.loss}
        kind = "strong" if i == 0 else "thin" if i < len(COLOURS) else "dash"
        series.append(Series("mean_loss", label(one), COLOURS[i % len(COLOURS)], kind, f"run:{one.path.name}"))
    figures: tuple[Figure, ...] = ()
    if drawn:
        charts = tuple(
            Chart(f"test-{over}", f"By {words}", "nats per token", series[0].set, over, tuple(series), marks=())
            for over, words in (("tokens", "tokens"), ("hours", "hours of training"))
        )
        figures = (Figure("test", f"Loss beside the rest of {shown(run.test)}", charts, "Mean of 20 reports each."),)
    own = briefs.get(run.path.name)
    rows = tuple(_row(one, run, own, briefs.get(one.path.name)) for one in every)
    columns = ("run", "state", "tokens", "loss", "at equal tokens", "at equal hours")
    note = "Differences are to the run above all others: below zero, that arm is better where both have got."
    table = Table(f"Runs of {shown(run.test)}", columns, rows, (verdict_words(every),), note)
    return Plots(sets, figures), table


def verdict_words(runs: Sequence[RunSummary]) -> str:
    """What the test says so far, in a sentence: by tokens and by hours, held to the noise between two seeds of one arm."""
    told = [one for one in runs if one.step]
    size = sum(path.stat().st_size for one in told for path in one.path.glob("metrics-*.jsonl"))
    if len(runs) > SIBLINGS or size > VERDICT_BYTES:
        return f"The verdict, held to the noise between seeds: dwslm results verdict {shlex.quote(runs[0].test)}"
    if len(told) < 2:
        return "Verdict: none, fewer than two runs have reported."
    try:
        words = verdict([open_run(one.path, one.path.parent) for one in told]).words()
    except ValueError as error:
        words = f"none, {error}"
    return f"Verdict: {words}."


def _row(one: RunSummary, run: RunSummary, own: Brief | None, other: Brief | None) -> tuple[Cell, ...]:
    tokens, loss = number(one.tokens), number(one.loss)
    return (
        Cell(label(one), strong=one is run, note=shown(one.name)),
        Cell(one.state),
        Cell("") if tokens is None else Cell(amount(tokens), tokens),
        Cell("") if loss is None else Cell(f"{loss:.4f}", loss),
        _difference(own, other, "tokens", one is run),
        _difference(own, other, "hours", one is run),
    )


def _difference(own: Brief | None, other: Brief | None, over: str, same: bool) -> Cell:
    if same or own is None or other is None:
        return Cell("")
    place = min(own.end(over), other.end(over))
    value = other.at(over, place) - own.at(over, place)
    return Cell(f"{value:+.4f}".replace("-", "−"), value) if np.isfinite(value) else Cell("")
