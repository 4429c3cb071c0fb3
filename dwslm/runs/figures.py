"""A run's figures by name, and whether a printed figure is one of them at the precision it was printed with."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.reader import Row
from dwslm.runs.summary import REPORTS, mean

SCORE = "bits_per_byte"
PRINTED = re.compile(r"([+\-\u2212]?)(\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE]([+-]?\d+))?\s*(%|[KMBT](?![A-Za-z]))?")
UNITS = {"": 0, "%": 0, "K": 3, "M": 6, "B": 9, "T": 12}


def value(run: RunFolder, metric: str, step: int | None = None) -> float:
    """A figure of a run.

    Args:
        metric: one of

            - `bits_per_byte`: of the held-out set, overall;
            - `bits_per_byte[source=wiki]`, `[language=de]`, `[source=wiki,language=de]`: of a slice; any field of any row of
              scores is named in this way, `FIELD[key=value,...]`;
            - `loss`, `grad_norm`, `tokens_per_second`, ...: a column of the metrics;
            - `hours`: of training alone, without saves and scores;
            - `record.lr`, `record.config.model.layers`, ...: a number out of run.json.
        step: where to look. None: the last score, the mean of the last 20 reports of a column (its last value for `step`,
            `tokens` and what only counts up), the hours of the whole run.

    Raises:
        ValueError: naming the run and what is missing.
    """
    where = run.path.name
    if metric.startswith("record."):
        if step is not None:
            raise ValueError(f"{where}: {metric} has no step")
        node: Any = run.record
        for key in metric.split(".")[1:]:
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, int | float) or isinstance(node, bool):
            raise ValueError(f"{where}: {metric} is no number in run.json")
        return float(node)
    name, bracket, filters = metric.partition("[")
    if bracket or name == SCORE:
        return _score(run, name, metric, filters, step)
    rows = reader.metrics(run) if name == "hours" or step is not None else reader.last_metrics(run, REPORTS)
    if step is not None:
        rows = [row for row in rows if row["step"] <= step]
        if not rows or rows[-1]["step"] != step:
            raise ValueError(f"{where}: no report at step {step}")
    if name == "hours":
        if not rows:
            raise ValueError(f"{where}: no reports yet")
        return hours(run, rows)[-1]
    if step is not None or name in ("step", "tokens", "skipped"):
        rows = rows[-1:]
    found = mean(rows, name)
    if found is None:
        raise ValueError(f"{where}: no {metric!r} in its metrics")
    return found


def begun_at(run: RunFolder) -> int:
    """Tokens that it began with: 0, or those of the checkpoint that it branched off."""
    start = next((row for row in reader.events(run) if row["event"] == "start"), {})
    tokens = start.get("tokens")
    return tokens if isinstance(tokens, int) else 0


def hours(run: RunFolder, rows: Sequence[Row]) -> list[float]:
    """Hours of training at each of its rows of metrics: tokens over speed, so that saves, scores and pauses don't count."""
    spent, before, found = 0.0, begun_at(run), []
    for row in rows:
        tokens, speed = row.get("tokens"), row.get("tokens_per_second")
        if isinstance(tokens, int) and isinstance(speed, int | float) and speed > 0:
            spent += max(0, tokens - before) / speed / 3600
            before = tokens
        found.append(spent)
    return found


def _score(run: RunFolder, name: str, metric: str, filters: str, step: int | None) -> float:
    where = run.path.name
    wanted = {"slice": "overall"}
    if filters:
        pairs = [part.split("=", 1) for part in filters.removesuffix("]").split(",")]
        if not filters.endswith("]") or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{where}: {metric!r} should read FIELD[key=value,...]")
        wanted = {key.strip(): text.strip() for key, text in pairs}
        if wanted.keys() <= {"source", "language"}:
            wanted["slice"] = "crossed" if len(wanted) == 2 else next(iter(wanted))
    rows = [row for row in reader.evals(run) if all(str(row.get(key)) == text for key, text in wanted.items())]
    rows = [row for row in rows if isinstance(row.get(name), int | float) and step in (None, row["step"])]
    if not rows:
        raise ValueError(f"{where}: no score {metric!r}" + (f" at step {step}" if step is not None else ""))
    # What training scored itself comes first; scorings by hand count where it has none.
    own = [row for row in rows if row["writer"] == rows[0]["writer"]]
    last = [row for row in own if (row["attempt"], row["step"]) == (own[-1]["attempt"], own[-1]["step"])]
    if len(last) > 1:
        keys = sorted({key for row in last for key, item in row.items() if isinstance(item, str)})
        raise ValueError(f"{where}: {len(last)} scores fit {metric!r}; say which by more of {', '.join(keys)}")
    return float(last[0][name])


def parse_printed(text: str) -> tuple[Decimal, Decimal]:
    """The number that is printed, and half a unit of its last digit.

    Signs, thousands commas, exponents, % and the units K, M, B, T are understood: "-0.013", "44,000", "3.7e-3", "11.7%", "23B".

    Raises:
        ValueError: where it is no number.
    """
    match = PRINTED.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number")
    sign, digits, exponent, unit = match.groups()
    try:
        number = Decimal(digits.replace(",", ""))
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no number") from error
    shift = int(exponent or 0) + UNITS[unit or ""]
    places = len(digits.partition(".")[2])
    half = Decimal(5).scaleb(shift - places - 1)
    return number.scaleb(shift) * (-1 if sign in ("-", "\u2212") else 1), half


def agrees(printed: str, found: float) -> bool:
    """Whether `found`, as it is written in the run's files, rounds to `printed`. Half-way between two figures, both agree."""
    number, half = parse_printed(printed)
    exact = Decimal(repr(found))
    return exact.is_finite() and abs(exact - number) <= half


def like(printed: str, found: float) -> str:
    """`found` with the digits and the unit of `printed`, and as many more as it takes to see that they differ."""
    number, half = parse_printed(printed)
    match = PRINTED.fullmatch(printed.strip())
    unit = (match[4] or "") if match else ""
    exact = Decimal(found)
    if not exact.is_finite():
        return str(found)
    scaled = exact.scaleb(-UNITS[unit])
    places = max(0, -(half.scaleb(-UNITS[unit])).adjusted() - 1)
    shown = f"{scaled:.{places}f}"
    while Decimal(shown) == number.scaleb(-UNITS[unit]) and places < 20:
        places += 1
        shown = f"{scaled:.{places}f}"
    if abs(scaled) < Decimal("1e-3") and scaled:
        shown = f"{found:.6g}" if not unit else shown
    return shown + unit


__all__ = ["SCORE", "agrees", "begun_at", "hours", "like", "parse_printed", "value"]
