"""Power, clock and temperature while the benchmark ran, and what it found in the compiler's caches."""

from typing import Any

from dwslm.page.bench_file import Bench, Piece
from dwslm.page.document import Block, Cell, Figure, Prose, Section, Table
from dwslm.page.svg import lines
from dwslm.page.words import digits, percent

UNHELD = ("none", "idle", "gpu_idle")
"""Clock reasons that hold no work back."""
SERIES = {1: ("Power", "W"), 2: ("SM clock", "MHz"), 3: ("Temperature", "°C")}


def section(bench: Bench) -> Section:
    blocks: list[Block] = []
    for i, piece in enumerate(bench.pieces):
        stability = piece.raw["stability"]
        name = f" ({piece.path.rsplit('/', 1)[-1]})" if len(bench.pieces) > 1 else ""
        if not stability.get("samples"):
            reason = stability.get("reason") or "the file says no more"
            blocks.append(Prose(f"The device was not sampled{name}: {reason}."))
            if not empty_files(piece):
                continue
        blocks += [*_drawn(stability.get("series"), i, name), _table(piece, name)]
    return Section("stability", "Stability", tuple(blocks))


def empty_files(piece: Piece) -> int:
    """Empty files of compiler caches that were moved aside before the run, with the entries that held them."""
    cache = piece.raw["stability"].get("cache")
    moved = cache.get("moved_aside") if isinstance(cache, dict) else None
    parts = [part for part in moved if isinstance(part, dict)] if isinstance(moved, list) else []
    return sum(len(part["empty"]) if isinstance(part.get("empty"), list) else 1 for part in parts)


def _drawn(series: Any, number: int, name: str) -> list[Block]:
    rows = [row for row in series or [] if isinstance(row, list) and row and isinstance(row[0], int | float)]
    panels = []
    for column, (words, unit) in SERIES.items():
        points = [(row[0], row[column]) for row in rows if len(row) > column and isinstance(row[column], int | float)]
        if len(points) > 1:
            low, high = min(v for _, v in points), max(v for _, v in points)
            description = (
                f"{words} from {digits(low)} to {digits(high)} {unit} over {points[-1][0] - points[0][0]:,.0f} seconds."
            )
            panels.append((words, lines(f"series-{number}-{column}", f"{words}, {unit}", description, points, unit)))
    if not panels:
        return []
    return [
        Figure(
            f"Power, clock and temperature during the run{name}", "Each from zero to its largest value.", tuple(panels)
        )
    ]


def _table(piece: Piece, name: str) -> Table:
    stability = piece.raw["stability"]
    facts: list[tuple[str, str]] = []

    def add(title: str, value: Any, unit: str = "") -> None:
        if isinstance(value, int | float):
            facts.append((title, f"{value:,.0f} {unit}".strip()))
        elif isinstance(value, dict):
            parts = [f"{key} {given:,.0f}" for key, given in value.items() if isinstance(given, int | float)]
            if parts:
                facts.append((title, f"{', '.join(parts)} {unit}".strip()))

    add("samples", stability.get("samples"))
    add("sampling rate", stability.get("hz"), "Hz")
    add("power", stability.get("power_w"), "W")
    add("power limit", piece.raw["machine"].get("power_limit_w"), "W")
    add("SM clock", stability.get("sm_mhz"), "MHz")
    facts.append(("clock cap", piece.clock_cap))
    reasons = _mapping(stability.get("throttle_reasons"))
    if reasons:
        facts.append(("share of samples by clock reason", ", ".join(f"{k} {percent(v)}" for k, v in reasons.items())))
    add("temperature", stability.get("temperature_c"), "°C")
    add("memory temperature", stability.get("memory_temperature_c"), "°C")
    add("ECC errors", stability.get("ecc_errors"))
    energy = stability.get("energy_j")
    if isinstance(energy, int | float):
        facts.append(("energy", f"{energy / 3.6e6:.3f} kWh"))
    facts.append(("empty cache files moved aside", f"{empty_files(piece):,}"))
    rows = tuple((Cell(title), Cell(text)) for title, text in facts)
    return Table(f"The device while it was measured{name}", ("", "value"), rows, tuple(verdicts(piece)))


def verdicts(piece: Piece) -> list[str]:
    """What the samples say: whether the run ended by itself, how near power came to its limit, whether clocks moved."""
    stability, found = piece.raw["stability"], []
    found.append(
        "The run ended by itself, without a reset." if piece.complete else "The run was cut off before its end."
    )
    high, limit = _mapping(stability.get("power_w")).get("max"), piece.raw["machine"].get("power_limit_w")
    if high and isinstance(limit, int | float) and limit:
        found.append(f"Power peaked at {digits(high)} W, {percent(high / limit)} of the limit of {digits(limit)} W.")
    elif high:
        found.append(f"Power peaked at {digits(high)} W.")
    clock = _mapping(stability.get("sm_mhz"))
    if clock.get("max") and clock.get("min"):
        top = piece.raw["machine"].get("max_clock_mhz")
        of_top = (
            f", the median {percent(clock['median'] / top)} of the highest"
            if clock.get("median") and isinstance(top, int | float) and top
            else ""
        )
        found.append(f"The SM clock moved between {digits(clock['min'])} and {digits(clock['max'])} MHz{of_top}.")
    held = {k: v for k, v in _mapping(stability.get("throttle_reasons")).items() if k not in UNHELD and v > 0}
    if held:
        found.append(
            "Clocks were held back in " + ", ".join(f"{percent(v)} of samples by {k}" for k, v in held.items()) + "."
        )
    elif stability.get("throttle_reasons"):
        found.append("Nothing held the clocks back.")
    errors = _mapping(stability.get("ecc_errors"))
    if errors:
        total = sum(errors.values())
        found.append(
            "No ECC error."
            if not total
            else f"{total:,.0f} ECC errors: " + ", ".join(f"{k} {v:,.0f}" for k, v in errors.items()) + "."
        )
    moved = empty_files(piece)
    if moved:
        found.append(
            f"{moved:,} empty compiler-cache {'file was' if moved == 1 else 'files were'} moved aside at the start."
        )
    return found


def _mapping(value: Any) -> dict[str, float]:
    """The numbers of an object, by name."""
    if not isinstance(value, dict):
        return {}
    return {str(key): given for key, given in value.items() if isinstance(given, int | float)}
