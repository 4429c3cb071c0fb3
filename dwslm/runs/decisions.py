"""Results and the decisions they led to: a file that people write, held to the runs it rests on.

`results/decisions.toml` holds one `[[decision]]` for each test:

    [[decision]]
    test = "learning-rate"
    title = "learning rate"
    question = "Which peak rate for 0.5B tokens at 8 layers?"
    result = "1e-2 best at 8 layers, 1.342 against 1.351 at half"
    decision = "3.7e-3 for the main run"
    number = "K11"
    date = "2026-11-29"
    runs = ["20261120-101500-lr-1e-2-a1b2c3", "20261120-111500-lr-5e-3-d4e5f6"]
    figures = [
        { printed = "1.342", run = "a1b2c3", metric = "bits_per_byte" },
        { printed = "1.351", run = "d4e5f6", metric = "bits_per_byte" },
    ]

A figure may be a mean over runs (`run = "a1b2c3, a2b3c4"`), a difference (`minus = "d4e5f6"`), a percentage of the other
(`relative = true`), or stand for what no run holds (`source = "the paper"`). Every number in `result` with a decimal point or a
percent sign must be one of the figures.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import date as Date
from pathlib import Path
from statistics import fmean
from typing import Any

from dwslm.runs.durable import disk_error
from dwslm.runs.figures import agrees, like, parse_printed, value
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.verdict import verdict

NUMBER = re.compile(r"(?<![\w.])[+\-\u2212]?\d[\d,]*(?:\.\d+(?:[eE][+-]?\d+)?(?:\s?%|[KMBT](?![A-Za-z]))?|\s?%)")
"""Numbers of a result that must be figures: with a decimal point or a percent sign."""


@dataclass(frozen=True)
class Figure:
    """A number as it is printed, and where it comes from."""

    run: str
    """Run, or several separated by commas: their mean. Anything that `open_run` finds."""
    metric: str
    """See `dwslm.runs.figures.value`."""
    printed: str
    """As it stands in the result: "1.342", "11.7%", "182K"."""
    step: int | None = None
    minus: str = ""
    """Run or runs whose value is taken away."""
    relative: bool = False
    """The difference as a percentage of the value of `minus`."""
    source: str = ""
    """Where a number comes from that no run holds; such a figure has no run and is not checked."""


@dataclass(frozen=True)
class Decision:
    """One test: what it asked, what it found, what was decided."""

    test: str
    """Name of the test; one decision has it."""
    title: str
    question: str
    result: str
    decision: str
    number: str
    """K number or numbers in the decision log."""
    runs: list[str]
    """Runs that it rests on; none where the test was not run."""
    figures: list[Figure]
    date: str
    """Of the decision, YYYY-MM-DD; "" where none is given."""
    winner: str = ""
    """One of `runs`, where the result says that its arm is better than the others: held to the noise between seeds."""
    file: str = ""
    """File that it was read from."""


def load(path: str | os.PathLike[str]) -> list[Decision]:
    """The decisions of a file, in its order.

    Raises:
        ValueError: one line that names the file, the decision and the key.
        OSError: where it cannot be read.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise disk_error(f"cannot read {path}", error) from error
    except ValueError as error:  # tomllib's own, or bytes that are no UTF-8
        raise ValueError(f"{path}: {error}") from error
    if unknown := content.keys() - {"decision"}:
        raise ValueError(f"{path}: unknown key {sorted(unknown)[0]!r}; it holds [[decision]] tables")
    entries = content.get("decision", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: decisions are written as [[decision]], with two brackets")
    found = [_decision(f"{path}: decision {number}", entry, str(path)) for number, entry in enumerate(entries, 1)]
    tests = [decision.test for decision in found]
    for test in tests:
        if tests.count(test) > 1:
            raise ValueError(f"{path}: two decisions of the test {test!r}")
    return found


def check(decision: Decision, runs_dir: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a decision, a line each: figures that its runs do not hold, runs that are missing, unproven winners."""
    where = f"{decision.file}, {decision.test}" if decision.file else decision.test
    wrong: list[str] = []
    runs: dict[str, RunFolder] = {}
    for name in decision.runs:
        try:
            runs[name] = open_run(name, runs_dir)
        except (ValueError, OSError) as error:
            wrong.append(f"{where}: {error}")
    for number, figure in enumerate(decision.figures, 1):
        try:
            told = _check_figure(figure, decision, runs, runs_dir)
        except (ValueError, OSError) as error:
            told = str(error)
        if told:
            wrong.append(f"{where}, figure {number}: {told}")
    known = {figure.printed.replace(" ", "") for figure in decision.figures}
    for printed in NUMBER.findall(decision.result):
        bare = printed.replace(" ", "")
        if not {bare, bare.lstrip("+-\u2212")} & known:
            wrong.append(
                f"{where}: {printed} in the result is no figure: add one with its run and metric, or with its source"
            )
    if decision.winner and not wrong:
        wrong += [f"{where}: {told}" for told in _check_winner(decision, runs, runs_dir)]
    return wrong


def _check_figure(
    figure: Figure, decision: Decision, runs: Mapping[str, RunFolder], runs_dir: str | os.PathLike[str]
) -> str:
    """What is wrong with it, or ""."""
    parse_printed(figure.printed)
    if not re.search(rf"(?<![\d.,]){re.escape(figure.printed)}(?!\d|[.,]\d)", decision.result):
        return f"{figure.printed} does not stand in the result"
    if figure.source:
        return ""
    mine = {run.path for run in runs.values()}

    def average(names: str) -> float:
        found = []
        for name in names.split(","):
            run = open_run(name.strip(), runs_dir)
            if run.path not in mine:
                raise ValueError(f"{run.path.name} is not among the runs that the decision rests on")
            found.append(value(run, figure.metric, figure.step))
        return fmean(found)

    found = average(figure.run)
    what = f"{figure.metric} of {figure.run}" + (f" at step {figure.step}" if figure.step is not None else "")
    if figure.minus:
        other = average(figure.minus)
        what += f" minus {figure.minus}"
        if figure.relative:
            if other == 0:
                raise ValueError(f"{figure.metric} of {figure.minus} is 0, which nothing is a percentage of")
            found, what = (found - other) / abs(other) * 100, what + " in percent"
        else:
            found -= other
    if agrees(figure.printed, found):
        return ""
    return f"{what} is printed as {figure.printed}, found {like(figure.printed, found)}"


def _check_winner(decision: Decision, runs: Mapping[str, RunFolder], runs_dir: str | os.PathLike[str]) -> list[str]:
    winner = open_run(decision.winner, runs_dir)
    if winner.path not in {run.path for run in runs.values()}:
        return [f"winner {decision.winner!r} is not among its runs"]
    try:
        found = verdict(list(runs.values()))
    except ValueError as error:
        return [f"winner {decision.winner!r}: {error}"]
    arm = found.arm_of(winner)
    return [f"winner {decision.winner!r}: {told}" for told in found.against(arm)]


def _decision(where: str, entry: dict[str, Any], file: str) -> Decision:
    if isinstance(entry.get("test"), str):
        where = f"{where} ({entry['test']})"
    values = _fill(where, Decision, {"date": "", "figures": [], "runs": [], "question": ""} | entry, {"file"})
    if not values["test"].strip():
        raise ValueError(f"{where}: test is empty")
    if values["date"] and not _is_date(values["date"]):
        raise ValueError(f"{where}: date {values['date']!r} is not YYYY-MM-DD")
    figures = []
    for number, figure in enumerate(values["figures"], 1):
        here = f"{where}, figure {number}"
        if not isinstance(figure, dict):
            raise ValueError(f"{here}: should be a table, {{ printed = ..., run = ..., metric = ... }}")
        filled = _fill(here, Figure, ({"run": "", "metric": ""} if "source" in figure else {}) | figure, set())
        made = Figure(**filled)
        if made.source and (made.run or made.metric or made.minus):
            raise ValueError(f"{here}: has a source, and a run that it would be checked against: give one of them")
        if made.relative and not made.minus:
            raise ValueError(f"{here}: relative needs minus, what it is a percentage of")
        figures.append(made)
    return Decision(**values | {"figures": figures, "file": file})


def _fill(where: str, kind: type, entry: dict[str, Any], hidden: set[str]) -> dict[str, Any]:
    """The keys of `entry`, checked against the fields of a dataclass."""
    types: dict[str, Any] = {
        "runs": list, "figures": list, "step": int, "relative": bool,
    }  # fmt: skip
    known = {field.name: field for field in fields(kind) if field.name not in hidden}
    if unknown := sorted(entry.keys() - known.keys()):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in entry:
            if field.default is MISSING:
                raise ValueError(f"{where}: {name} is missing")
            continue
        if isinstance(entry[name], Date):  # TOML has dates of its own
            entry[name] = str(entry[name])
        expected = types.get(name, str)
        if type(entry[name]) is not expected:
            raise ValueError(f"{where}: {name} should be a {_name(expected)}, not {entry[name]!r}")
    if "runs" in entry and not all(isinstance(name, str) for name in entry["runs"]):
        raise ValueError(f"{where}: runs should be a list of texts")
    return entry


def _name(kind: type) -> str:
    return {str: "text in quotes", list: "list", int: "whole number", bool: "true or false"}[kind]


def _is_date(text: str) -> bool:
    try:
        return str(Date.fromisoformat(text)) == text
    except ValueError:
        return False


__all__ = ["Decision", "Figure", "check", "load"]
