"""Kernel time of a microbatch for each local layer, alone and with the other parts that were measured."""

from collections.abc import Mapping

from dwslm.page.bench_file import Bench, Row
from dwslm.page.bench_layers import Arm, arms, token_counts
from dwslm.page.document import Block, Cell, Figure, Section, Table
from dwslm.page.rank import fastest
from dwslm.page.svg import Bar, bars
from dwslm.page.words import digits, is_fp8, listed, measured, number, percent

COLOURS = ("s0", "s1", "s2", "s3", "s4", "s5", "quiet")


def section(bench: Bench) -> Section | None:
    """For each number of tokens: the mixers alone, then everything measured."""
    blocks: list[Block] = []
    for tokens in token_counts(bench.select("attention")):
        found = arms(bench, tokens)
        if found:
            blocks += [*_mixers(found, tokens), *_whole(bench, found, tokens)]
    return Section("arms", "A microbatch by local layer", tuple(blocks)) if blocks else None


def ranking(found: list[Arm]) -> str:
    """The verdict on the arms, cheapest first; neighbours that lie within their spreads are said to."""
    if len(found) < 2:
        return f"Only one arm was measured: {found[0].name}."
    first = found[0]
    parts = []
    for arm in found[1:]:
        if arm.total.differs(first.total):
            parts.append(f"{arm.name} costs {digits(arm.total.median / first.total.median)} times as much")
        else:
            parts.append(f"{arm.name} is within the spreads of it")
    return f"Cheapest arm: {first.name} at {digits(first.total.median)} ms; {listed(parts)}."


def _mixers(found: list[Arm], tokens: int) -> list[Block]:
    context = found[0].local.context
    title = f"Kernel time of a microbatch of {tokens:,} tokens at context {context:,} for each local layer"
    longest = max(arm.total.median for arm in found)
    drawn = [Bar(a.name, f"{digits(a.total.median)} ms", ((a.local_ms, "s0"), (a.global_ms, "s1"))) for a in found]
    words = "; ".join(
        f"{a.name}: {digits(a.local_ms)} ms local, {digits(a.global_ms)} ms global, {digits(a.total.median)} ms in all"
        for a in found
    )
    layers = (found[0].local_layers, found[0].global_layers)
    figure = Figure(
        f"{title}, ms",
        "Mixers alone, forward and backward. Each arm has the same global layers. "
        "Projections, convolutions, norms and what follows are not in it.",
        (("", bars(f"arms-{tokens}", title, f"{words}.", drawn, longest=longest)),),
        (("s0", f"{layers[0]} local layers"), ("s1", f"{layers[1]} global layers")),
    )
    columns = (
        "local layer",
        "local engine",
        f"{layers[0]} local",
        "global engine",
        f"{layers[1]} global",
        "sum",
        "times the cheapest",
    )
    rows = tuple(
        (
            Cell(a.name),
            Cell(a.local.engine),
            number(a.local_ms),
            Cell(a.glob.engine),
            number(a.global_ms),
            measured(a.total),
            number(a.total.median / found[0].total.median),
        )
        for a in found
    )
    return [figure, Table(f"{title}, ms, fastest engines", columns, rows, (ranking(found),))]


def parts(bench: Bench, arm: Arm, tokens: int) -> Mapping[str, tuple[float, Row]]:
    """Name of a part -> milliseconds a microbatch with its fastest engine (bf16), and that engine's row.

    What no case stands for is not here: projections, residuals, gates and the optimizer.
    """
    found: dict[str, tuple[float, Row]] = {
        "local mixers": (arm.local_ms, arm.local),
        "global mixers": (arm.global_ms, arm.glob),
    }
    layers = arm.local_layers + arm.global_layers
    counts = {
        "mlp": ("MLP", layers),
        "head": ("loss head", 1),
        "short_conv": ("convolutions", arm.local_layers if arm.local.op == "delta_rule" else 0),
        "norm": ("norms", 2 * layers + 1),
        "rope": ("rotary positions", arm.global_layers if arm.local.op == "delta_rule" else layers),
    }
    for op, (name, times) in counts.items():
        rows = bench.select(op, tokens=tokens)
        deepest = max((row.context or 0 for row in rows if row.timed), default=0)
        rows = [row for row in rows if (row.context or 0) == deepest and not is_fp8(row)]
        # Several cases of one op would be several parts; only one can stand for the layer.
        best = fastest(rows) if len({row.case for row in rows}) == 1 else None
        if times and best and best.both:
            found[name] = (times * best.both.median, best)
    return found


def _whole(bench: Bench, found: list[Arm], tokens: int) -> list[Block]:
    """The same microbatch with MLP, head and the small parts."""
    table = {arm.name: parts(bench, arm, tokens) for arm in found}
    names = list(dict.fromkeys(name for mine in table.values() for name in mine))
    if len(names) < 3:
        return []
    sums = {arm: sum(ms for ms, _ in mine.values()) for arm, mine in table.items()}
    colours = dict(zip(names, COLOURS, strict=False))
    drawn = [
        Bar(arm, f"{digits(sums[arm])} ms", tuple((ms, colours[name]) for name, (ms, _) in mine.items()))
        for arm, mine in table.items()
    ]
    title = f"What was measured of a microbatch of {tokens:,} tokens, all layers"
    words = "; ".join(f"{arm}: {digits(ms)} ms" for arm, ms in sums.items())
    figure = Figure(
        f"{title}, ms",
        "Fastest bf16 engines, forward and backward. Projections of the mixers, residuals, gates and the optimizer "
        "were not timed apart.",
        (("", bars(f"whole-{tokens}", title, f"{words}.", drawn, longest=max(sums.values()))),),
        tuple((colours[name], name) for name in names),
    )
    rows = []
    for name in names:
        cells = [table[arm].get(name) for arm in table]
        engines = list(dict.fromkeys(cell[1].engine for cell in cells if cell))
        rows.append((Cell(name, note=", ".join(engines)), *(number(cell[0]) if cell else Cell("") for cell in cells)))
    rows.append((Cell("sum"), *(number(ms) for ms in sums.values())))
    verdicts = []
    for arm, mine in table.items():
        largest = max(mine, key=lambda name: mine[name][0])
        mixers = (mine["local mixers"][0] + mine["global mixers"][0]) / sums[arm]
        verdicts.append(
            f"{arm}: the mixers are {percent(mixers)} of what was measured; the largest part is {largest} with "
            f"{percent(mine[largest][0] / sums[arm])}."
        )
    return [figure, Table(f"{title}, ms", ("part", *table), tuple(rows), tuple(verdicts))]
