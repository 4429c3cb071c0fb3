"""Mixers: softmax attention and the delta rule by context, and what each local arm costs a microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dwslm.page.bench_file import Bench, Measured, Row, unique
from dwslm.page.document import Block, Cell, Figure, Section, Table
from dwslm.page.rank import clear_winner, fastest, ranked, sentence
from dwslm.page.svg import Bar, bars
from dwslm.page.words import count, digits, engine_cell, listed, measured, memory, number, op_name, percent, share, span

LOCAL_LAYERS, GLOBAL_LAYERS = 15, 5  # of the main model, where the file does not say
ARMS = {
    "sliding window": ("attention", "window"),
    "Gated DeltaNet": ("delta_rule", "gdn"),
    "Kimi Delta": ("delta_rule", "kda"),
}
OFF_SCALE = 4  # an engine this many times slower than the fastest would flatten a drawing


def token_counts(rows: Sequence[Row]) -> list[int]:
    return sorted({row.tokens for row in rows if row.tokens})


def attention(bench: Bench) -> Section | None:
    rows = bench.select("attention")
    blocks: list[Block] = []
    for case in unique(row.case for row in rows):
        for tokens in token_counts(rows):
            blocks += by_context(bench, "attention", case, tokens, None)
    if not blocks:
        return None
    return Section("attention", "Softmax attention", (*blocks, *detail(rows), *extra(rows)))


def delta(bench: Bench) -> Section | None:
    rows = bench.select("delta_rule")
    blocks: list[Block] = []
    for case in unique(row.case for row in rows):
        for tokens in token_counts(rows):
            for heads in sorted({row.heads or 0 for row in rows if row.case == case and row.tokens == tokens}):
                mine = [r for r in rows if r.case == case and r.tokens == tokens and (r.heads or 0) == heads]
                if len({row.context for row in mine if row.timed}) > 1:
                    blocks += by_context(bench, "delta_rule", case, tokens, heads or None)
    blocks += [*_local_layers(bench), *_heads(rows), *detail(rows), *extra(rows)]
    return Section("delta", "The delta rule: Kimi Delta and Gated DeltaNet", tuple(blocks)) if rows else None


def by_context(bench: Bench, op: str, case: str, tokens: int, heads: int | None) -> list[Block]:
    """A drawing and a table of one layer's forward and backward, engines by context."""
    rows = [row for row in bench.select(op, tokens=tokens, heads=heads) if row.case == case and row.context]
    contexts = sorted({row.context for row in rows if row.context and row.timed})
    if not contexts:
        return []
    columns = {context: [row for row in rows if row.context == context] for context in contexts}
    winners = {context: clear_winner(members) for context, members in columns.items()}
    table_rows = []
    for engine in _by_time(rows, contexts):
        found = {context: next((r for r in columns[context] if r.engine == engine), None) for context in contexts}
        first = next(row for row in found.values() if row)
        cells = [_cell(row, winners[context] == engine) for context, row in found.items()]
        table_rows.append((engine_cell(first), *cells))
    wide = f", {heads} heads" if heads and op == "delta_rule" else ""
    title = f"One layer, {op_name(op)} {case}{wide}, {tokens:,} tokens"
    verdict = sentence({f"context {context:,}": members for context, members in columns.items()})
    verdicts = [verdict, *(_growth(table_engine, rows, contexts) for table_engine in _grown(rows, contexts, op))]
    table = Table(
        f"{title}: forward and backward by context, ms",
        ("engine", *(f"{context:,}" for context in contexts)),
        tuple(table_rows),
        tuple(verdicts),
    )
    name = f"{op}-{case}-{tokens}-{heads or 0}".replace(" ", "-")
    return [_drawing(name, title, columns, winners), table]


def _by_time(rows: Sequence[Row], contexts: Sequence[int]) -> list[str]:
    """Engines that were asked for at these contexts, fastest at the longest first, those without a time last."""
    at = {
        row.engine: row.both.median for row in rows if row.context == contexts[-1] and row.status == "ok" and row.both
    }
    names = unique(row.engine for row in rows if row.context in contexts)
    return sorted(names, key=lambda name: at.get(name, float("inf")))


def _cell(row: Row | None, strong: bool) -> Cell:
    if row is None:
        return Cell("")
    return measured(row.both, strong) if row.status == "ok" else Cell(row.status)


def _grown(rows: Sequence[Row], contexts: Sequence[int], op: str) -> list[str]:
    """For the delta rule, whether the cost moves with the context is itself a result."""
    if op != "delta_rule" or len(contexts) < 2:
        return []
    timed = [row.engine for row in rows if row.status == "ok" and row.both]
    return [name for name in _by_time(rows, contexts) if timed.count(name) > 1]


def _growth(engine: str, rows: Sequence[Row], contexts: Sequence[int]) -> str:
    times = [
        row.both.median
        for row in rows
        if row.engine == engine and row.status == "ok" and row.both and row.context in contexts
    ]
    return f"{engine}: {span(times)} ms over the contexts, {percent(max(times) / min(times) - 1)} from least to most."


def _drawing(name: str, title: str, columns: dict[int, list[Row]], winners: dict[int, str | None]) -> Figure:
    panels: list[tuple[str, str]] = []
    left_out: list[str] = []
    shown: dict[int, list[tuple[Row, Measured]]] = {}
    for context, members in columns.items():
        order = ranked(members)
        shown[context] = [(r, t) for r, t in order if t.median <= OFF_SCALE * order[0][1].median]
        left_out += [row.engine for row, _ in order[len(shown[context]) :]]
    longest = max((t.median + t.spread / 2 for pairs in shown.values() for _, t in pairs), default=1.0)
    for context, pairs in shown.items():
        drawn = [_bar(row, time, winners[context]) for row, time in pairs]
        words = "; ".join(f"{row.engine} {digits(time.median)} ms" for row, time in pairs)
        panels.append(
            (
                f"context {context:,}",
                bars(f"{name}-{context}", f"Context {context:,}", f"{title}: {words}.", drawn, longest=longest),
            )
        )
    description = "Forward and backward; the line on a bar's end is the spread. One scale for all panels."
    if left_out:
        description += f" Off the scale, in the table: {listed(unique(left_out))}."
    legend = (("s2", "fastest, beyond both spreads"), ("s0", "other")) if any(winners.values()) else ()
    return Figure(f"{title}, ms", description, tuple(panels), legend)


def _bar(row: Row, time: Measured, winner: str | None) -> Bar:
    colour = "s2" if row.engine == winner else "s0"
    half = time.spread / 2
    return Bar(
        row.engine, f"{digits(time.median)} ms", ((time.median, colour),), time.median - half, time.median + half
    )


def detail(rows: Sequence[Row]) -> list[Block]:
    """Everything else that is known of each engine, at the longest context of its op."""
    longest = max((row.context or 0 for row in rows if row.timed), default=0)
    kept = [row for row in rows if row.timed and (row.context or 0) == longest]
    kept.sort(key=lambda row: (row.case, row.tokens or 0, row.heads or 0, row.both.median if row.both else 0.0))
    if not kept:
        return []
    shown = tuple(
        (
            Cell(
                row.engine,
                note=" ".join([row.case, *([f"{row.heads} heads"] if row.heads and row.op == "delta_rule" else [])]),
            ),
            count(row.tokens),
            measured(row.forward),
            measured(row.both),
            number(row.forward_tflops),
            number(row.tflops),
            number(row.gb_s),
            share(row.floor_share),
            memory(row.peak_bytes),
            number(row.first_call_s),
        )
        for row in kept
    )
    groups: dict[str, list[Row]] = {}
    for row in kept:
        heads = f" {row.heads} heads" if row.heads and row.op == "delta_rule" else ""
        groups.setdefault(f"{row.case}{f' {row.tokens:,} tokens' if row.tokens else ''}{heads}", []).append(row)
    at = f" at context {longest:,}" if longest else ""
    columns = ("engine", "tokens", "forward, ms", "forward + backward, ms", "forward TFLOP/s", "TFLOP/s", "GB/s", "floor reached",
               "peak memory", "first call, s")  # fmt: skip
    forward_verdict = sentence(groups, lambda row: row.forward, "forward alone")
    return [Table(f"Each engine{at}", columns, shown, (forward_verdict,))]


def extra(rows: Sequence[Row]) -> list[Block]:
    """Mask and graph building, which a batch with other boundaries may have to pay again."""
    found: dict[tuple[str, str, int | None], list[Row]] = {}
    for row in rows:
        for kind in row.extra:
            found.setdefault((row.engine, kind, row.tokens), []).append(row)
    if not found:
        return []
    shown, verdicts = [], []
    for (engine, kind, tokens), members in found.items():
        times = [row.extra[kind].median for row in members]
        layer = [row.extra[kind].median / row.both.median for row in members if row.both and row.both.median]
        shown.append((Cell(engine), Cell(f"{kind} building"), count(tokens), number(min(times)), number(max(times)),
                      number(max(layer)) if layer else Cell("")))  # fmt: skip
        if layer:
            at = f" at {tokens:,} tokens" if tokens else ""
            verdicts.append(
                f"{engine}{at}: building its {kind} takes {span(layer)} times a layer's forward and backward."
            )
    columns = ("engine", "what", "tokens", "least, ms", "most, ms", "most, in layers' time")
    return [Table("Built beside the kernel", columns, tuple(shown), tuple(verdicts))]


def _heads(rows: Sequence[Row]) -> list[Block]:
    """The same engine with other numbers of heads."""
    counts = sorted({row.heads for row in rows if row.heads and row.timed})
    if len(counts) < 2:
        return []
    few, many = counts[0], counts[-1]
    shown, ratios = [], []
    at = {row.key: row for row in rows if row.status == "ok" and row.both}
    for row in at.values():
        other = at.get((row.op, row.case, row.engine, row.tokens, row.context, many))
        if row.heads != few or other is None or not row.both or not other.both:
            continue
        ratios.append(other.both.median / row.both.median)
        sizes = (count(row.tokens), count(row.context))
        times = (measured(row.both), measured(other.both), number(ratios[-1]))
        shown.append((engine_cell(row), Cell(row.case), *sizes, *times))
    if not shown:
        return []
    verdict = f"{many / few:g} times the heads take {span(ratios)} times as long."
    columns = ("engine", "case", "tokens", "context", f"{few} heads", f"{many} heads", "ratio")
    return [Table("Number of heads, ms forward and backward", columns, tuple(shown), (verdict,))]


def layers(bench: Bench) -> tuple[int, int]:
    """Local and global layers of the model."""
    return bench.shape.get("local_layers") or LOCAL_LAYERS, bench.shape.get("global_layers") or GLOBAL_LAYERS


def layer_count(bench: Bench, row: Row) -> int | None:
    """How often a microbatch runs the row's part, None where a layer may hold it more than once."""
    local, glob = layers(bench)
    if row.op == "attention":
        return glob if row.case.startswith("global") else local
    of_locals = dict.fromkeys(("delta_rule", "short_conv", "delta_gate", "gated_norm"), local)
    return {**of_locals, "mlp": local + glob, "head": 1}.get(row.op)


@dataclass(frozen=True)
class Arm:
    """A local layer with its fastest engine, beside the fastest global one: what a microbatch spends in these kernels."""

    name: str
    local: Row
    glob: Row
    local_layers: int
    global_layers: int

    @property
    def local_ms(self) -> float:
        assert self.local.both
        return self.local_layers * self.local.both.median

    @property
    def global_ms(self) -> float:
        assert self.glob.both
        return self.global_layers * self.glob.both.median

    @property
    def total(self) -> Measured:
        assert self.local.both and self.glob.both
        spread = self.local_layers * self.local.both.spread + self.global_layers * self.glob.both.spread
        return Measured(self.local_ms + self.global_ms, spread)


def arms(bench: Bench, tokens: int, context: int | None = None) -> list[Arm]:
    """The arms that can be told at this size, cheapest first; `context` is the longest where it is not given."""
    glob_rows = bench.select("attention", "global", tokens=tokens)
    context = context or max((row.context or 0 for row in glob_rows if row.timed), default=0)
    glob = fastest([row for row in glob_rows if row.context == context])
    found = []
    for name, (op, case) in ARMS.items():
        rows = [row for row in bench.select(op, case, tokens=tokens, context=context)]
        narrow = min((row.heads or 0 for row in rows), default=0)
        local = fastest([row for row in rows if op != "delta_rule" or (row.heads or 0) == narrow])
        if local and glob:
            layers = (
                bench.shape.get("local_layers") or LOCAL_LAYERS,
                bench.shape.get("global_layers") or GLOBAL_LAYERS,
            )
            found.append(Arm(name, local, glob, *layers))
    return sorted(found, key=lambda arm: arm.total.median)


def _local_layers(bench: Bench) -> list[Block]:
    """One local layer of each kind, against the window."""
    blocks: list[Block] = []
    for tokens in token_counts(bench.select("attention")):
        found = arms(bench, tokens)
        window = next((arm.local.both for arm in found if arm.name == "sliding window"), None)
        if len(found) < 2 or window is None:
            continue
        rows, parts = [], []
        for arm in found:
            assert arm.local.both
            ratio = arm.local.both.median / window.median
            rows.append((Cell(arm.name), engine_cell(arm.local), measured(arm.local.both), number(ratio)))
            if arm.name != "sliding window":
                clear = "" if arm.local.both.differs(window) else " (within the spreads)"
                parts.append(f"a {arm.name} layer takes {digits(ratio)} times a window layer{clear}")
        context = found[0].local.context
        title = (
            f"One local layer with its fastest engine, {tokens:,} tokens, context {context:,}, ms forward and backward"
        )
        verdict = listed(parts)
        columns = ("local layer", "engine", "ms", "times a window layer")
        blocks.append(Table(title, columns, tuple(rows), (f"{verdict[0].upper()}{verdict[1:]}.",)))
    return blocks
