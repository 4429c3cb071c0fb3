"""MLP in bf16 and FP8, the loss head with its memory, and the small parts."""

from collections.abc import Sequence

from dwslm.page.bench_file import Bench, Measured, Row, unique
from dwslm.page.bench_layers import token_counts
from dwslm.page.document import Block, Cell, Figure, Section, Table
from dwslm.page.rank import clear_winner, fastest, ranked, sentence
from dwslm.page.svg import Bar, bars
from dwslm.page.words import (
    digits,
    engine_cell,
    is_fp8,
    measured,
    memory,
    number,
    op_name,
    percent,
    percent_span,
    share,
)

FP8_BAR = 0.10  # of the plan: FP8 has to be faster by more than this
SMALL = (
    "short_conv",
    "delta_gate",
    "gated_norm",
    "depth_mix",
    "norm",
    "add_norm",
    "rope",
    "newton_schulz",
    "optimizer",
)


def mlp(bench: Bench) -> Section | None:
    """FP8 against bf16, speed and error."""
    blocks: list[Block] = []
    for tokens in token_counts(bench.select("mlp")):
        rows = bench.select("mlp", tokens=tokens)
        order = ranked(rows)
        if not order:
            continue
        title = f"One feed-forward layer ({rows[0].case}), {tokens:,} tokens"
        shown = []
        for row, time in order:
            rate = bench.ceiling("fp8_tflops" if is_fp8(row) else "bf16_tflops")
            errors = [value for value, _ in row.errors.values()]
            shown.append(
                (
                    engine_cell(row),
                    Cell(_precision(row)),
                    measured(row.forward),
                    measured(time),
                    number(row.tflops),
                    share(row.tflops / rate if row.tflops and rate else None),
                    Cell(percent_span(errors), max(errors)) if errors else Cell(""),
                    memory(row.peak_bytes),
                )
            )
        columns = (
            "engine",
            "precision",
            "forward, ms",
            "forward + backward, ms",
            "TFLOP/s",
            "of the bare product",
            "relative error",
            "peak memory",
        )
        plain = next((_precision(row) for row, _ in order if not is_fp8(row)), "")
        kinds = " and ".join(name for name in (plain, "FP8") if name)
        verdicts = tuple(fp8_verdict(rows))
        table = Table(f"{title}: {kinds}", columns, tuple(shown), verdicts, "Errors are against float32.")
        blocks += [_drawn(f"mlp-{tokens}", f"{title}, ms", order, "s0", fp8_is="s1"), table]
    return Section("mlp", "Feed-forward layers in FP8", tuple(blocks)) if blocks else None


def _precision(row: Row) -> str:
    return "FP8" if is_fp8(row) else "bf16" if row.dtype == "bfloat16" else row.dtype


def fp8_pair(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """The fastest engine of the usual precision and the fastest in FP8."""
    plain = fastest([row for row in rows if not is_fp8(row)])
    fp8 = fastest([row for row in rows if is_fp8(row)])
    return (plain, fp8) if plain and fp8 else None


def fp8_verdict(rows: Sequence[Row]) -> list[str]:
    """Whether FP8 clears the bar of the plan at this size."""
    pair = fp8_pair(rows)
    if pair is None:
        return ["FP8 cannot be compared with the usual precision: one of them was not timed."]
    plain, fp8 = pair
    assert plain.both and fp8.both
    ratio = plain.both.median / fp8.both.median
    if not plain.both.differs(fp8.both):
        speed = f"{fp8.engine} and {plain.engine} are within their spreads"
    elif ratio > 1:
        speed = f"{fp8.engine} is {digits(ratio)} times as fast as {plain.engine}, beyond both spreads"
    else:
        speed = f"{fp8.engine} takes {digits(1 / ratio)} times as long as {plain.engine}, beyond both spreads"
    passed = ratio > 1 + FP8_BAR and plain.both.differs(fp8.both)
    bar = f"{'above' if passed else 'not above'} the bar of {percent(FP8_BAR)} faster"
    return [f"{speed}: {bar}."]


def head(bench: Bench) -> Section | None:
    blocks: list[Block] = []
    for tokens in token_counts(bench.select("head")):
        rows = bench.select("head", tokens=tokens)
        order = ranked(rows)
        if not order:
            continue
        title = f"Output layer and loss ({rows[0].case}), {tokens:,} tokens"
        winner = clear_winner(rows)
        rate = bench.ceiling("bf16_tflops")
        least = min((row.peak_bytes for row, _ in order if row.peak_bytes), default=None)
        shown = tuple(
            (
                engine_cell(row),
                measured(row.forward),
                measured(time, row.engine == winner),
                number(row.tflops),
                share(row.tflops / rate if row.tflops and rate else None),
                memory(row.peak_bytes),
                number(row.peak_bytes / least if row.peak_bytes and least else None),
            )
            for row, time in order
        )
        columns = (
            "engine",
            "forward, ms",
            "forward + backward, ms",
            "TFLOP/s",
            "of the bare product",
            "peak memory",
            "times the least",
        )
        verdicts = [sentence({f"{tokens:,} tokens": rows}), *memory_verdict(rows, bench)]
        blocks += [
            _drawn(f"head-{tokens}", f"{title}, ms", order, "s0"),
            Table(f"{title}: time and peak memory", columns, shown, tuple(verdicts)),
        ]
    return Section("head", "The loss head", tuple(blocks)) if blocks else None


def memory_verdict(rows: Sequence[Row], bench: Bench) -> list[str]:
    """What the fastest head would save by being the smallest, and at what price."""
    order = [(row, time) for row, time in ranked(rows) if row.peak_bytes]
    if len(order) < 2:
        return []
    quick, time = order[0]
    small, slower = min(order, key=lambda pair: pair[0].peak_bytes or 0)
    assert quick.peak_bytes and small.peak_bytes
    if small is quick:
        return [f"{quick.engine} is also the one with the least memory ({quick.peak_bytes / 1e6:,.0f} MB)."]
    saved = quick.peak_bytes - small.peak_bytes
    whole = next(
        (
            piece.raw["machine"].get("memory_bytes")
            for piece in bench.pieces
            if piece.raw["machine"].get("memory_bytes")
        ),
        None,
    )
    of_device = f", {percent(saved / whole)} of the device" if whole else ""
    return [
        f"{small.engine} needs {saved / 1e6:,.0f} MB less than {quick.engine}{of_device}, and takes "
        f"{digits(slower.median / time.median)} times as long."
    ]


def small(bench: Bench) -> Section | None:
    """Convolution, norms, rotary positions, Newton-Schulz, the optimizer's step."""
    rows = [row for op in SMALL for row in bench.select(op) if row.timed]
    others = [
        row for row in bench.rows if row.timed and row.op not in (*SMALL, "attention", "delta_rule", "mlp", "head")
    ]
    rows += others
    if not rows:
        return None
    groups: dict[str, list[Row]] = {}
    shown = []
    for row in rows:
        at = f"{row.tokens:,} tokens" if row.tokens else ""
        groups.setdefault(", ".join(part for part in (f"{op_name(row.op)} {row.case}".strip(), at) if part), []).append(
            row
        )
    for members in groups.values():
        winner = clear_winner(members)
        for row, time in ranked(members):
            detail = ", ".join(
                f"{name} {value:,}" for name, value in (("tokens", row.tokens), ("context", row.context)) if value
            )
            shown.append(
                (
                    Cell(f"{op_name(row.op)} {row.case}".strip(), note=detail),
                    engine_cell(row),
                    measured(row.forward),
                    measured(time, row.engine == winner),
                    number(row.tflops),
                    number(row.gb_s),
                    share(row.floor_share),
                    memory(row.peak_bytes),
                )
            )
    columns = ("part", "engine", "forward, ms", "whole, ms", "TFLOP/s", "GB/s", "floor reached", "peak memory")
    alone = [name for name, members in groups.items() if len(ranked(members)) < 2]
    verdicts = [
        f"{name}: {sentence({name: members}, what='whole').removeprefix('Whole: ')}"
        for name, members in groups.items()
        if name not in alone
    ]
    verdicts += [f"Only one engine timed: {'; '.join(alone)}."] if alone else []
    note = "Whole is forward and backward; for Newton-Schulz and the optimizer one call."
    return Section("small", "The other parts", (Table("Small parts", columns, tuple(shown), tuple(verdicts), note),))


def _drawn(name: str, title: str, order: list[tuple[Row, Measured]], colour: str, fp8_is: str = "") -> Figure:
    longest = max(time.median + time.spread / 2 for _, time in order)
    drawn = [
        Bar(
            row.engine,
            f"{digits(time.median)} ms",
            ((time.median, fp8_is if fp8_is and is_fp8(row) else colour),),
            time.median - time.spread / 2,
            time.median + time.spread / 2,
        )
        for row, time in order
    ]
    words = "; ".join(f"{row.engine} {digits(time.median)} ms" for row, time in order)
    kinds = unique(_precision(row) for row, _ in order)
    legend = tuple((fp8_is if kind == "FP8" else colour, kind) for kind in kinds) if fp8_is and len(kinds) > 1 else ()
    description = "Forward and backward; the line on a bar's end is the spread."
    return Figure(title, description, (("", bars(name, title, f"{words}.", drawn, longest=longest)),), legend)
