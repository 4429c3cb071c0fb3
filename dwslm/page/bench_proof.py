"""What stands behind the times: the gate, recording as a CUDA graph, the floor, the machine's stability."""

from dwslm.page.bench_file import Bench, Row
from dwslm.page.bench_layers import layer_count
from dwslm.page.document import Cell, Figure, Section, Table
from dwslm.page.rank import ranked
from dwslm.page.svg import Bar, bars
from dwslm.page.words import digits, engine_cell, listed, measured, number, op_name, percent, percent_span, place, share


def gate(bench: Bench) -> Section | None:
    """Errors of every engine against the bounds, the worst over sizes."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in bench.rows:
        if row.errors or row.checks:
            groups.setdefault((row.op, row.case, row.engine), []).append(row)
    if not groups:
        return None
    rows, worst_share, failures = [], {}, []
    passing: list[float] = []
    for (op, case, engine), members in groups.items():
        worst: dict[str, tuple[float, float]] = {}
        for row in members:
            for tensor, (value, bound) in row.errors.items():
                if tensor not in worst or _share((value, bound)) > _share(worst[tensor]):
                    worst[tensor] = (value, bound)
        checks = {
            name: _worst_check([row.checks.get(name) for row in members]) for row in members for name in row.checks
        }
        failed = [row for row in members if row.status == "failed"]
        near = max(worst, key=lambda tensor: _share(worst[tensor])) if worst else None
        rows.append(
            (
                engine_cell(members[0]),
                Cell(f"{op_name(op)} {case}".strip()),
                Cell("fails" if failed else "passes"),
                Cell(near or "", note=f"bound {percent(worst[near][1])}" if near else ""),
                share(worst[near][0] if near else None),
                share(_share(worst[near]) if near else None),
                Cell(", ".join(f"{tensor} {percent(value)}" for tensor, (value, _) in worst.items())),
                Cell(
                    ", ".join(f"{name} {'?' if ok is None else 'yes' if ok else 'NO'}" for name, ok in checks.items())
                ),
            )
        )
        name = f"{engine} ({op_name(op)} {case})".replace(" )", ")")
        if failed:
            failures.append(f"{name}: {failed[0].reason or 'no reason given'}")
        elif near:
            worst_share[name] = _share(worst[near])
            passing += [value for value, _ in worst.values()]
    verdicts = [f"{len(groups) - len(failures)} of {len(groups)} engines pass their gate."]
    if passing:
        nearest = max(worst_share, key=lambda name: worst_share[name])
        verdicts.append(
            f"Errors of those that pass: {percent_span(passing)}; "
            f"closest to its bound is {nearest}, at {percent(worst_share[nearest])} of it."
        )
    verdicts += [f"Failed, so not timed: {failure}." for failure in failures]
    columns = ("engine", "op", "gate", "worst tensor", "its error", "of its bound", "all relative errors", "checks")
    table = Table(
        "Relative error against float32, the worst over sizes and trials", columns, tuple(rows), tuple(verdicts)
    )
    return Section("gate", "The gate: outputs and gradients against float32", (table,))


def _share(pair: tuple[float, float]) -> float:
    value, bound = pair
    return value / bound if bound and value == value else float("inf")


def _worst_check(values: list[bool | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return all(known) if known else None


def recording(bench: Bench) -> Section | None:
    """Recorded as a CUDA graph and replayed with other boundaries."""
    found = [(row, row.record) for row in bench.rows if row.record]
    if not found:
        return None
    rows, saved, good = [], {}, 0
    broken: list[str] = []
    for row, record in found:
        gain = None
        if record.recorded and record.launched and record.launched.median:
            gain = 1 - record.recorded.median / record.launched.median
        if record.status == "ok":
            good += 1
            if gain is not None and record.recorded and record.launched:
                saved[row.engine] = (gain, record.recorded.differs(record.launched))
        else:
            broken.append(
                f"{row.engine} ({op_name(row.op)} {row.case}): {record.status}, {record.reason or 'no reason given'}"
            )
        rows.append(
            (
                engine_cell(row),
                Cell(place(row)),
                measured(record.recorded) if record.status != "fails" else Cell("fails to record"),
                measured(record.launched),
                share(gain),
                _yes(record.identical),
                _yes(record.padding_identical),
            )
        )
    verdicts = [f"{good} of {len(found)} record and replay with the bits of the unrecorded run."]
    if saved:
        gains = [gain for gain, _ in saved.values()]
        slower = [name for name, (gain, clear) in saved.items() if not clear or gain <= 0]
        verdicts.append(
            f"Replay saves {percent_span(gains)} of the time"
            + (f"; not beyond the spreads: {listed(slower)}." if slower else ".")
        )
    padded = [record.padding_identical for _, record in found if record.padding_identical is not None]
    if padded:
        changed = len(padded) - sum(padded)
        verdicts.append("Padding with empty documents changes no bit in any of them." if not changed else
                        f"Padding with empty documents changes bits in {changed} of {len(padded)}.")  # fmt: skip
    verdicts += [f"{text}." for text in broken]
    columns = ("engine", "work", "replayed, ms", "launched, ms", "time saved", "same bits", "padding changes nothing")
    return Section(
        "recording",
        "Recording as a CUDA graph",
        (Table("Replayed and launched", columns, tuple(rows), tuple(verdicts)),),
    )


def _yes(value: bool | None) -> Cell:
    return Cell("" if value is None else "yes" if value else "NO")


def floor(bench: Bench) -> Section | None:
    """How near each fastest engine comes to the least time that the ceilings allow."""
    kept = sorted(_fastest_at_largest(bench), key=_reached, reverse=True)
    if not kept:
        return None
    shown, drawn = [], []
    room: dict[str, float] = {}
    narrow = min((row.heads for row in kept if row.op == "delta_rule" and row.heads), default=None)
    for row in kept:
        assert row.both and row.floor_ms is not None
        above = row.both.median - row.floor_ms
        layers = layer_count(bench, row) if row.op != "delta_rule" or row.heads == narrow else None
        if layers:
            room[f"{row.engine} ({place(row)})"] = layers * above
        heads = f", {row.heads} heads" if row.heads and row.op == "delta_rule" else ""
        label = f"{op_name(row.op)} {row.case}".strip() + f"{heads}: {row.engine}"
        drawn.append(Bar(label, percent(_reached(row)), ((_reached(row), "s0"),)))
        times = (number(row.floor_ms), measured(row.both), share(_reached(row)), number(above))
        shown.append((engine_cell(row), Cell(place(row)), *times, number(layers * above if layers else None)))
    near, far = kept[0], kept[-1]
    verdicts = [
        f"Nearest to its floor: {near.engine} ({place(near)}) at {percent(_reached(near))}; furthest: {far.engine} "
        f"({place(far)}) at {percent(_reached(far))}."
    ]
    if room:
        most = max(room, key=lambda name: room[name])
        verdicts.append(f"Most time above the floor over all layers of a microbatch: {most}, {digits(room[most])} ms.")
    title = "Share of the floor reached by the fastest engine of each part"
    words = "; ".join(f"{bar.label} {bar.text}" for bar in drawn)
    chart = bars("floor", title, f"{words}.", drawn, longest=1.0)
    columns = (
        "engine",
        "work",
        "floor, ms",
        "whole, ms",
        "floor reached",
        "above the floor, ms",
        "over all layers, ms",
    )
    note = "The floor is the larger of operations over the matrix rate and bytes over the copy rate, measured in the same run."
    table = Table(title, columns, tuple(shown), tuple(verdicts), note)
    figure = Figure(title, "A full bar would be the floor itself.", (("", chart),))
    return Section("floor", "How far from the floor", (figure, table))


def _reached(row: Row) -> float:
    """As the file has it, else from the two times."""
    if row.floor_share is not None:
        return row.floor_share
    assert row.both and row.floor_ms is not None
    return row.floor_ms / row.both.median


def _fastest_at_largest(bench: Bench) -> list[Row]:
    """One row for each op, case, number of heads and precision: the fastest engine on the most tokens at the longest context."""
    groups: dict[tuple[str, str, int | None, str], list[Row]] = {}
    for row in bench.rows:
        if row.status == "ok" and row.floor_ms is not None and row.both and row.both.median:
            groups.setdefault((row.op, row.case, row.heads, row.dtype), []).append(row)
    found = []
    for members in groups.values():
        size = max((row.tokens or 0, row.context or 0) for row in members)
        found.append(ranked([row for row in members if (row.tokens or 0, row.context or 0) == size])[0][0])
    return found
