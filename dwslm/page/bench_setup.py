"""What was measured on what: machine, work, ceilings, the benchmark's own noise, and what is missing."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dwslm.page.bench_file import Bench, Measured, Piece, Row, unique
from dwslm.page.document import Block, Cell, Prose, Section, Table, text_cell
from dwslm.page.rank import ranked
from dwslm.page.words import (
    count,
    count_span,
    digits,
    engine_cell,
    listed,
    measured,
    number,
    op_name,
    percent,
    share,
)


def setup(bench: Bench) -> Section:
    blocks: list[Block] = [
        Prose(
            "Every engine is held to a float32 reference first, outputs and gradients; one that misses its bound is not timed. "
            "Times are medians of repeated runs; below each, in brackets, is its spread, the range of the middle half. "
            "A difference counts as real where it is larger than both spreads. "
            "Every verdict is computed by that rule, from the table above it."
        ),
        _facts(bench),
        *([_work(bench)] if any(piece.raw["work"] for piece in bench.pieces) else []),
    ]
    return Section("setup", "How it was measured", tuple(blocks))


FACTS: list[tuple[str, Callable[[Piece], object]]] = [
    ("file", lambda p: p.path.rsplit("/", 1)[-1]),
    ("command", lambda p: p.command),
    ("commit", lambda p: p.commit),
    ("device", lambda p: p.device),
    ("clock cap", lambda p: p.clock_cap),
    ("highest SM clock", lambda p: _unit(p.raw["machine"].get("max_clock_mhz"), "MHz")),
    ("power limit", lambda p: _unit(p.raw["machine"].get("power_limit_w"), "W")),
    ("device memory", lambda p: _gigabytes(p.raw["machine"].get("memory_bytes"))),
    ("driver", lambda p: p.raw["machine"].get("driver")),
    ("CPU", lambda p: p.raw["machine"].get("cpu")),
    ("versions", lambda p: ", ".join(f"{name} {v}" for name, v in p.raw["versions"].items() if v)),
    ("dataset", lambda p: p.raw["data"].get("path")),
    ("dataset fingerprint", lambda p: p.raw["data"].get("fingerprint")),
    ("documents", lambda p: _unit(p.raw["data"].get("documents"), "")),
    ("median document", lambda p: _unit(p.raw["data"].get("median"), "tokens")),
    ("tokens in long documents", lambda p: _long(p.raw["data"])),
    ("model", lambda p: ", ".join(f"{name} {v}" for name, v in p.raw["shape"].items())),
    ("seed", lambda p: p.raw["seed"]),
    ("started", lambda p: p.raw["started"]),
    ("took", lambda p: _unit(p.raw["seconds"], "s")),
    ("complete", lambda p: "yes" if p.complete else "no"),
]


def _facts(bench: Bench) -> Table:
    rows = []
    for name, of in FACTS:
        values = ["" if (value := of(piece)) is None else str(value) for piece in bench.pieces]
        if any(values):
            rows.append((Cell(name), *map(text_cell, values)))
    many = len(bench.pieces) > 1
    columns = ("", *(f"piece {i + 1}" if many else "value" for i in range(len(bench.pieces))))
    return Table("Setup", columns, tuple(rows))


def _unit(value: Any, unit: str) -> str | None:
    return f"{value:,.0f} {unit}".strip() if isinstance(value, int | float) else None


def _long(data: Mapping[str, Any]) -> str | None:
    held, long = data.get("share_of_tokens_in_long"), data.get("long")
    if not isinstance(held, int | float) or not isinstance(long, int | float):
        return None
    return f"{percent(held)} in documents of {long:,.0f} tokens or more"


def _gigabytes(value: Any) -> str | None:
    return f"{value / 1e9:,.1f} GB" if isinstance(value, int | float) else None


def numbers(value: Any) -> list[float]:
    """The numbers of a list, or of a single value; nothing where the file has something else."""
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)]


def work_items(bench: Bench) -> list[dict[str, Any]]:
    """The pieces of work, each once, by tokens and context."""
    found = {(w.get("tokens"), w.get("context")): w for piece in bench.pieces for w in piece.raw["work"]}
    return [found[key] for key in sorted(found, key=lambda key: tuple(v or 0 for v in key))]


def _work(bench: Bench) -> Table:
    rows, segments = [], []
    for work in work_items(bench):
        lengths = work.get("lengths") if isinstance(work.get("lengths"), dict) else {}
        assert lengths is not None
        counts = numbers(work.get("segments"))
        segments += counts
        within = Cell(count_span(counts), max(counts)) if counts else Cell("")
        rows.append(
            (
                *(count(work.get(name)) for name in ("tokens", "context", "rows")),
                within,
                *(
                    count(value)
                    for value in (work.get("slots"), *(lengths.get(n) for n in ("median", "mean", "p90", "max")))
                ),
                share(lengths.get("share_of_tokens_at_context")),
                share(work.get("padding_share")),
            )
        )
    columns = ("tokens", "context", "rows", "segments", "slots", "median", "mean", "p90", "longest", "tokens in full segments",
               "padding")  # fmt: skip
    verdicts = [f"A microbatch holds {count_span(segments)} segments."] if segments else []
    return Table(
        "The microbatches: segments of documents cut at the context, lengths in tokens",
        columns,
        tuple(rows),
        tuple(verdicts),
    )


CEILINGS = {
    "copy_gb_s": ("copy, read and written", "GB/s"),
    "bf16_tflops": ("matrix product, bf16", "TFLOP/s"),
    "fp8_tflops": ("matrix product, FP8", "TFLOP/s"),
    "float32_tflops": ("matrix product, float32", "TFLOP/s"),
}


def ceilings(bench: Bench) -> Section | None:
    """The rates that nothing can exceed, as measured in the same run."""
    rows, products = [], []
    for piece in bench.pieces:
        for name, value in piece.ceilings.items():
            words, unit = CEILINGS.get(name, (name, ""))
            rows.append((Cell(words), measured(value), Cell(unit), Cell(piece.path.rsplit("/", 1)[-1])))
        products += [p for p in piece.raw["ceilings"].get("products") or [] if isinstance(p, dict)]
    if not rows:
        return None
    verdicts = []
    bf16, fp8, copy = (bench.ceiling(name) for name in ("bf16_tflops", "fp8_tflops", "copy_gb_s"))
    if bf16 and fp8:
        verdicts.append(f"A bare FP8 product runs at {digits(fp8 / bf16)} times the rate of bf16.")
    if bf16 and copy:
        verdicts.append(
            f"A kernel that does fewer than {digits(bf16 * 1e3 / copy)} operations for each byte it moves is bound by memory."
        )
    blocks: list[Block] = [
        Table("Ceilings of this device", ("ceiling", "median", "unit", "file"), tuple(rows), tuple(verdicts))
    ]
    if products:
        shown = tuple(
            (
                Cell(f"{p.get('k'):,} → {p.get('n'):,}" if p.get("k") and p.get("n") else "?"),
                count(p.get("tokens")),
                *(_median(p.get(name)) for name in ("bf16_tflops", "fp8_tflops")),
                _ratio(p.get("fp8_tflops"), p.get("bf16_tflops")),
            )
            for p in products
        )
        blocks.append(
            Table("Bare products by shape, TFLOP/s", ("product", "tokens", "bf16", "FP8", "FP8 / bf16"), shown)
        )
    return Section("ceilings", "Ceilings", tuple(blocks))


def _median(value: Any) -> Cell:
    if isinstance(value, dict) and isinstance(value.get("median"), int | float):
        return measured(Measured(value["median"], value.get("spread") or 0.0))
    return Cell("")


def _ratio(above: Any, below: Any) -> Cell:
    a, b = (v.get("median") if isinstance(v, dict) else None for v in (above, below))
    return number(a / b) if a and b else Cell("")


def noise(bench: Bench) -> Section | None:
    """Two runs of the same engine, to show what the benchmark itself adds."""
    rows, verdicts = [], []
    for piece in bench.pieces:
        found = piece.raw["noise"]
        first, again = (_as_measured(found.get(name)) for name in ("first", "again"))
        if first is None:
            continue
        name = " ".join(str(found[key]) for key in ("op", "case", "engine") if found.get(key))
        if again is None:
            rows.append((Cell(name), measured(first), Cell(""), Cell("")))
            verdicts.append(f"{name}: the second run gave no time: {found.get('reason') or 'no reason given'}.")
            continue
        rows.append((Cell(name), measured(first), measured(again), number(abs(first.median - again.median))))
        verb = "differ by more than" if first.differs(again) else "agree within"
        verdicts.append(
            f"{name}: two runs {verb} the spreads they print ({digits(abs(first.median - again.median))} ms apart)."
        )
    if not rows:
        return None
    table = Table(
        "The same engine timed twice, ms", ("engine", "first", "again", "apart"), tuple(rows), tuple(verdicts)
    )
    return Section("noise", "The benchmark's own noise", (table,))


def _as_measured(value: Any) -> Measured | None:
    if isinstance(value, dict) and isinstance(value.get("median"), int | float):
        return Measured(value["median"], value.get("spread") or 0.0)
    return None


def missing(bench: Bench) -> Section | None:
    """Engines that were asked for and not timed, each with its reason."""
    groups: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in bench.rows:
        if row.status != "ok":
            groups.setdefault((row.op, row.case, row.engine, row.status, row.reason), []).append(row)
    if not groups:
        return None
    rows = tuple(
        (
            Cell(f"{op_name(op)} {case}".strip()),
            engine_cell(members[0]),
            Cell(status),
            Cell(reason or "no reason given", note=_where(members)),
        )
        for (op, case, _, status, reason), members in groups.items()
    )
    counts = {
        status: len({key[:3] for key in groups if key[3] == status}) for status in unique(key[3] for key in groups)
    }
    words = {
        "failed": "failed the gate",
        "missing": "not installed",
        "refused": "refused by the library",
        "error": "stopped with an error",
    }
    verdict = (
        "Engines by op and case: " + listed(f"{n} {words.get(status, status)}" for status, n in counts.items()) + "."
    )
    table = Table("Asked for and not timed", ("op", "engine", "status", "why"), rows, (verdict,))
    return Section("missing", "What is not measured", (table,))


def _where(rows: Iterable[Row]) -> str:
    every = list(rows)
    parts = []
    for name, values in (
        ("tokens", [r.tokens for r in every]), ("context", [r.context for r in every]), ("heads", [r.heads for r in every]),
    ):  # fmt: skip
        known = sorted({v for v in values if v})
        if known:
            parts.append(f"{name} {listed(f'{v:,}' for v in known)}")
    return ", ".join(parts)


def picks(bench: Bench) -> Section:
    """The fastest engine of each op, case and number of tokens, among those that passed."""
    groups: dict[tuple[str, str, int | None, int | None], list[Row]] = {}
    deepest: dict[tuple[str, str, int | None], int] = {}
    for row in bench.rows:
        if row.timed:
            key = (row.op, row.case, row.tokens)
            deepest[key] = max(deepest.get(key, 0), row.context or 0)
    for row in bench.rows:
        if row.timed and (row.context or 0) == deepest[(row.op, row.case, row.tokens)]:
            groups.setdefault((row.op, row.case, row.tokens, row.heads), []).append(row)
    rows, clear, single = [], 0, 0
    for (op, case, tokens, heads), members in groups.items():
        order = ranked(members)
        if not order:
            continue
        (best, value), rest = order[0], order[1:]
        if not rest:
            words, single = "the only one timed", single + 1
        elif value.differs(rest[0][1]):
            words, clear = (
                f"{percent(1 - value.median / rest[0][1].median)} less time than {rest[0][0].engine}",
                clear + 1,
            )
        else:
            words = f"within the spreads of {rest[0][0].engine}"
        detail = f"{heads} heads" if heads and op == "delta_rule" else ""
        won = bool(rest) and value.differs(rest[0][1])
        name = Cell(f"{op_name(op)} {case}".strip(), note=detail)
        rows.append((name, count(tokens), Cell(best.engine, strong=won), measured(value), Cell(words)))
    verdict = f"Won beyond both spreads: {clear} of {len(rows)}; only one engine timed: {single}."
    table = Table(
        "Fastest engine that passed its gate, at the longest context measured, ms forward and backward",
        ("op", "tokens", "engine", "ms", "against the next"),
        tuple(rows),
        (verdict,),
    )
    return Section("picks", "The fastest engine for each part", (table,))
