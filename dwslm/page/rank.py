"""Who is faster, and whether the difference is more than noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dwslm.page.bench_file import Measured, Row
from dwslm.page.words import listed, percent, percent_span

Measure = Callable[[Row], Measured | None]


def both(row: Row) -> Measured | None:
    """Forward and backward."""
    return row.both


def forward(row: Row) -> Measured | None:
    return row.forward


def ranked(rows: Sequence[Row], measure: Measure = both) -> list[tuple[Row, Measured]]:
    """The engines that passed and were timed, fastest first."""
    timed = [(row, value) for row in rows if row.status == "ok" and (value := measure(row)) is not None]
    return sorted(timed, key=lambda pair: pair[1].median)


def fastest(rows: Sequence[Row], measure: Measure = both) -> Row | None:
    order = ranked(rows, measure)
    return order[0][0] if order else None


@dataclass(frozen=True)
class Lead:
    """The fastest engine and the next one. `less` is the share of time that it saves; `clear` says whether that is more than
    either spread."""

    best: Row
    second: Row
    less: float
    clear: bool


def lead(rows: Sequence[Row], measure: Measure = both) -> Lead | None:
    """None where fewer than two engines were timed."""
    order = ranked(rows, measure)
    if len(order) < 2:
        return None
    (best, first), (second, other) = order[:2]
    return Lead(best, second, 1 - first.median / other.median if other.median else 0.0, first.differs(other))


def clear_winner(rows: Sequence[Row], measure: Measure = both) -> str | None:
    """Name of the engine that is faster than all others by more than the spreads."""
    found = lead(rows, measure)
    return found.best.engine if found and found.clear else None


def sentence(groups: Mapping[str, Sequence[Row]], measure: Measure = both, what: str = "forward and backward") -> str:
    """The verdict on a table: who wins in which group, by how much, and where the spreads do not tell them apart.

    `groups`: name of a column (`context 512`) to its rows.
    """
    leads = {name: found for name, rows in groups.items() if (found := lead(rows, measure))}
    if not leads:
        single = {row.engine for rows in groups.values() for row, _ in ranked(rows, measure)}
        return f"No comparison: only {listed(sorted(single))} was timed." if single else "No engine was timed."
    clear: dict[str, list[str]] = {}
    for name, found in leads.items():
        if found.clear:
            clear.setdefault(found.best.engine, []).append(name)
    parts = []
    for engine, names in clear.items():
        gains = percent_span(leads[name].less for name in names)
        seconds = listed(dict.fromkeys(leads[name].second.engine for name in names))
        where = _where(names, len(leads), len(groups))
        parts.append(f"{engine} is fastest{where}: {gains} less time than {seconds}, beyond both spreads")
    for name, found in leads.items():
        if not found.clear:
            at = f" at {name}" if len(groups) > 1 else ""
            parts.append(
                f"{found.best.engine} and {found.second.engine} are within their spreads{at} ({percent(found.less)} apart)"
            )
    text = "; ".join(parts)
    return f"{what[0].upper()}{what[1:]}: {text}."


def _where(names: Sequence[str], leads: int, groups: int) -> str:
    if groups == 1:
        return ""
    if len(names) == leads and leads == groups:
        return f" in all {groups}"
    # The rest had no second engine: their names would say little.
    if len(names) == leads and leads > 3:
        return f" in all {leads} comparisons"
    return f" at {listed(names)}"
