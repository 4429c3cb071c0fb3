"""Two benchmark runs row by row: what moved beyond the spread of both, what newly fails, what came and went."""

import os
from dataclasses import dataclass, field

from dwslm.page.bench_file import Bench, Measured, Row, join
from dwslm.page.words import digits, listed, percent, place

MEMORY_SPREAD = 0.01
"""Peak memory is counted once and repeats but for the allocator's rounding: what moves by more than this share has moved."""


@dataclass(frozen=True)
class Moved:
    """A time, or peak memory, that differs by more than either spread. `by` is the second over the first, less one."""

    row: Row
    what: str
    before: Measured
    after: Measured
    unit: str = "ms"

    @property
    def by(self) -> float:
        return self.after.median / self.before.median - 1 if self.before.median else float("inf")

    @property
    def slower(self) -> bool:
        return self.after.median > self.before.median


@dataclass(frozen=True)
class Comparison:
    """Everything that differs, from the first run to the second. `worse` are lines that should stop a change."""

    warnings: tuple[str, ...]
    moved: tuple[Moved, ...]
    broken: tuple[str, ...]
    """What worked in the first run and not in the second: gate, library, recording, bits."""
    mended: tuple[str, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    same: int = field(default=0)
    """Rows in both runs of which nothing above is said."""

    @property
    def worse(self) -> bool:
        return bool(self.broken) or any(moved.slower for moved in self.moved)


def compare_files(before: str | os.PathLike[str], after: str | os.PathLike[str], slack: float = 0.0) -> Comparison:
    """Raises OSError and ValueError as `bench_file.read` does."""
    return compare(join([before]), join([after]), slack)


def compare(before: Bench, after: Bench, slack: float = 0.0) -> Comparison:
    """Rows are matched by op, case, engine, tokens, context and heads.

    `slack`: moves of at most this share are left out, whatever the spreads say. Two runs in different hours differ by more than
    the calls within one of them.
    """
    first, second = ({row.key: row for row in bench.rows} for bench in (before, after))
    moved: list[Moved] = []
    broken: list[str] = []
    mended: list[str] = []
    new = [name(second[key]) for key in second.keys() - first.keys()]
    gone = [name(first[key]) for key in first.keys() - second.keys()]
    same = 0
    for key in first.keys() & second.keys():
        a, b = first[key], second[key]
        if (a.status == "ok") != (b.status == "ok") and {a.status, b.status} & {"missing", "skipped"}:
            (gone if a.status == "ok" else new).append(f"{name(b)}: {a.status} before, {b.status} after")
            continue
        times = [moved for moved in _moves(a, b) if abs(moved.by) > slack]
        worse, better = _lost(a, b), _lost(b, a)
        moved += times
        broken += worse
        mended += better
        same += not (times or worse or better)
    return Comparison(
        warnings=tuple(_warnings(before, after)),
        moved=tuple(sorted(moved, key=lambda m: m.by, reverse=True)),
        broken=tuple(sorted(broken)),
        mended=tuple(sorted(mended)),
        new=tuple(sorted(new)),
        gone=tuple(sorted(gone)),
        same=same,
    )


def name(row: Row) -> str:
    return f"{place(row)}: {row.engine}"


def _moves(a: Row, b: Row) -> list[Moved]:
    """Each kind of time that both rows have, and memory."""
    if a.status != "ok" or b.status != "ok":
        return []
    pairs = [("forward + backward", a.both, b.both), ("forward", a.forward, b.forward)]
    if a.record and b.record:
        pairs.append(("recorded", a.record.recorded, b.record.recorded))
    found = [Moved(b, what, x, y) for what, x, y in pairs if x and y and x.differs(y)]
    if a.peak_bytes and b.peak_bytes:
        x, y = (Measured(n / 1e6, MEMORY_SPREAD * n / 1e6) for n in (a.peak_bytes, b.peak_bytes))
        found += [Moved(b, "peak memory", x, y, "MB")] if x.differs(y) else []
    return found


def _lost(a: Row, b: Row) -> list[str]:
    """What `a` could and `b` cannot. A row that was skipped or is not installed says nothing about the code."""
    found = []
    if a.status == "ok" and b.status in ("failed", "error", "refused"):
        found.append(f"{name(b)}: {b.status}, {b.reason or 'no reason given'}")
    if a.status == "ok" and b.status == "ok":
        found += [
            f"{name(b)}: check {check} fails" for check, ok in b.checks.items() if ok is False and a.checks.get(check)
        ]
    if a.record and b.record:
        if a.record.status == "ok" and b.record.status != "ok":
            found.append(f"{name(b)}: recording {b.record.status}, {b.record.reason or 'no reason given'}")
        if a.record.padding_identical and b.record.padding_identical is False:
            found.append(f"{name(b)}: padding changes bits")
    return found


def _warnings(before: Bench, after: Bench) -> list[str]:
    found = list(dict.fromkeys([*before.notes, *after.notes]))
    if before.device != after.device:
        found.append(f"different devices: {before.device} and {after.device}; times cannot be compared")
    if before.clock_cap != after.clock_cap:
        found.append(f"different clock caps: {before.clock_cap} and {after.clock_cap}")
    a, b = (bench.pieces[0].raw for bench in (before, after))
    names = sorted(
        {key for key in {**a["versions"], **b["versions"]} if a["versions"].get(key) != b["versions"].get(key)}
    )
    if names:
        found.append(
            "different versions: "
            + listed(
                f"{key} {a['versions'].get(key) or 'none'} and {b['versions'].get(key) or 'none'}" for key in names
            )
        )
    if a["machine"].get("driver") != b["machine"].get("driver"):
        found.append(f"different drivers: {a['machine'].get('driver')} and {b['machine'].get('driver')}")
    if a["data"].get("fingerprint") != b["data"].get("fingerprint"):
        found.append("different datasets: the microbatches are not the same")
    elif a["seed"] != b["seed"]:
        found.append(f"different seeds, {a['seed']} and {b['seed']}: the microbatches hold other documents")
    return found


def lines(comparison: Comparison) -> list[str]:
    """The comparison as text for a terminal."""
    text = [f"warning: {warning}" for warning in comparison.warnings]
    slower = [moved for moved in comparison.moved if moved.slower]
    faster = [moved for moved in comparison.moved if not moved.slower]
    for title, rows in (("more, beyond both spreads", slower), ("less, beyond both spreads", faster)):
        if rows:
            text.append(f"{title}: {len(rows)}")
            text += [_moved(moved) for moved in rows]
    named = (
        ("broken", comparison.broken),
        ("mended, and before", comparison.mended),
        ("new", comparison.new),
        ("gone", comparison.gone),
    )
    for title, names in named:
        if names:
            text += [f"{title}: {len(names)}", *(f"  {entry}" for entry in names)]
    text.append(f"unchanged: {comparison.same}")
    text.append("Something got worse." if comparison.worse else "Nothing got worse.")
    return text


def _moved(moved: Moved) -> str:
    spreads = f"spreads {digits(moved.before.spread, 2)} and {digits(moved.after.spread, 2)}"
    sign = "+" if moved.slower else "-"
    return (
        f"  {name(moved.row)}, {moved.what}: {digits(moved.before.median)} to {digits(moved.after.median)} {moved.unit} "
        f"({sign}{percent(abs(moved.by))}, {spreads})"
    )
