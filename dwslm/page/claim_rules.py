"""The rules that answer `claims`: from rows to what was found here, the verdict, and the numbers that decided it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dwslm.page.bench_file import Bench, Measured, Row
from dwslm.page.bench_layers import Arm, arms
from dwslm.page.claims import NEAR
from dwslm.page.words import digits, listed, percent, percent_span, span

SAME, DIFFERENT, NOT_MEASURED = "same", "different", "not measured"


@dataclass(frozen=True)
class Answer:
    """What was found here. `verdict` is `same`, `different` or `not measured`."""

    ours: str
    verdict: str
    why: str


Rule = Callable[[Bench, Mapping[str, Any]], Answer]


def unmeasured(why: str) -> Answer:
    return Answer("", NOT_MEASURED, why)


def told(same: bool, ours: str, why: str) -> Answer:
    return Answer(ours, SAME if same else DIFFERENT, why)


# ---- finding rows ---------------------------------------------------------------------------------------


def microbatch(rows: Iterable[Row]) -> int | None:
    """The number of tokens to answer at: 16,384, theirs, where that was timed, else the smallest."""
    counts = sorted({row.tokens for row in rows if row.tokens and row.timed})
    return 16384 if 16384 in counts else counts[0] if counts else None


def at_size(bench: Bench, work: tuple[str, str]) -> list[Row]:
    """Rows of that op and case at their size of microbatch, with the fewest heads."""
    rows = bench.select(*work)
    tokens = microbatch(rows)
    fewest = min((row.heads for row in rows if row.heads), default=None)
    return [row for row in rows if row.tokens == tokens and row.heads in (fewest, None)]


def by_context(rows: Iterable[Row], engine: str) -> dict[int | None, Row]:
    return {row.context: row for row in rows if row.engine == engine and row.status == "ok" and row.both}


def pick(rows: Sequence[Row], engines: Sequence[str]) -> str | None:
    """The first of `engines` that was timed."""
    return next((name for name in engines if by_context(rows, name)), None)


def absent(bench: Bench, op: str, engines: Sequence[str], case: str | None = None) -> Answer:
    """Says why none of the engines was timed, in the file's own words where it has any."""
    reasons = {
        row.engine: f"{row.engine} {row.status}{f' ({row.reason})' if row.reason else ''}"
        for row in bench.select(op, case)
        if row.engine in engines and row.status != "ok"
    }
    return unmeasured("; ".join(reasons.values()) or f"no row of {listed(engines)} in this report")


def at(tokens: int | None) -> str:
    return f" at {tokens:,} tokens" if tokens else ""


def contexts(names: Iterable[int | None]) -> str:
    return listed(f"{name:,}" if name else "all" for name in names)


# ---- the rules ------------------------------------------------------------------------------------------


def faster(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = at_size(bench, given["work"])
    forward = given.get("measure") == "forward"
    pairs: dict[int | None, tuple[Measured, Measured]] = {}
    rates = []
    second = pick(rows, given["second"]) or given["second"][0]
    other = by_context(rows, second)
    for context, row in by_context(rows, given["first"]).items():
        if context not in other or given.get("context", context) != context:
            continue
        a, b = (r.forward if forward else r.both for r in (row, other[context]))
        if a and b:
            pairs[context] = (a, b)
            rates.append((row.forward_tflops, other[context].forward_tflops))
    if not pairs:
        return absent(bench, given["work"][0], (given["first"], *given["second"]), given["work"][1])
    less = {context: 1 - a.median / b.median for context, (a, b) in pairs.items()}
    won = [context for context, (a, b) in pairs.items() if less[context] > 0 and a.differs(b)]
    lost = [context for context, (a, b) in pairs.items() if less[context] <= 0 and a.differs(b)]
    tied = [context for context in pairs if context not in won and context not in lost]
    ours = _gap(list(less.values())) + at(rows[0].tokens)
    if len(pairs) == 1:
        a, b = next(iter(pairs.values()))
        ours = f"{digits(a.median)} against {digits(b.median)} ms{at(rows[0].tokens)}"
        if forward and all(rates[0]):
            ours += f" ({digits(rates[0][0] or 0)} against {digits(rates[0][1] or 0)} TFLOP/s)"
    parts = [f"{given['first']} ahead at {contexts(won)}"] if won else []
    parts += [f"{second} ahead at {contexts(lost)}"] if lost else []
    parts += [f"within the spreads at {contexts(tied)}"] if tied else []
    if len(pairs) == 1:
        a, b = next(iter(pairs.values()))
        parts = [f"{digits(abs(a.median - b.median))} ms apart, spreads {digits(a.spread)} and {digits(b.spread)}"]
    return told(len(won) == len(pairs), ours, "; ".join(parts))


def _gap(less: Sequence[float]) -> str:
    """`9 to 17 % less time`, or more."""
    if min(less) >= 0:
        return f"{percent_span(less)} less time"
    if max(less) <= 0:
        return f"{percent_span([1 / (1 - value) - 1 if value < -1 else -value for value in less])} more time"
    return f"from {percent(-min(less))} more to {percent(max(less))} less time"


def slowest(bench: Bench, given: Mapping[str, Any]) -> Answer:
    names, last, seen = (given["engine"], *given["others"]), 0, []
    for work in given["works"]:
        found = {name: by_context(at_size(bench, work), name) for name in names}
        for context, row in found[given["engine"]].items():
            rivals = [found[name][context] for name in given["others"] if context in found[name]]
            if not rivals:
                continue
            seen.append((work[1], context))
            assert row.both
            last += all(r.both and row.both.median > r.both.median and row.both.differs(r.both) for r in rivals)
    if not seen:
        return absent(bench, "attention", names)
    return told(
        last == len(seen), f"last in {last} of {len(seen)}", "compared by case and context, beyond both spreads"
    )


def extra(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = [
        row
        for row in bench.select(given["op"])
        if row.engine == given["engine"] and given["kind"] in row.extra and row.both
    ]
    tokens = microbatch(rows)
    rows = [row for row in rows if row.tokens == tokens]
    if not rows:
        return absent(bench, given["op"], (given["engine"],))
    times = [row.extra[given["kind"]].median for row in rows]
    layers = [time / row.both.median for time, row in zip(times, rows, strict=True) if row.both]
    why = f"{span(layers)} times a layer's forward and backward"
    return told(min(layers) > 1, f"{span(times)} ms{at(tokens)}", why)


def passes(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = [row for work in given["works"] for row in bench.select(*work) if row.engine == given["engine"]]
    timed = [row for row in rows if row.status == "ok"]
    if not timed and not any(row.status == "failed" for row in rows):
        return absent(bench, "attention", (given["engine"],))
    bad = [row for row in rows if row.status in ("failed", "error", "refused")]
    why = bad[0].reason if bad else f"{len({row.case for row in timed})} kinds of layer, {len(timed)} sizes"
    return told(not bad, f"{len(timed)} of {len(rows)} rows pass", why)


def flat(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = at_size(bench, given["work"])
    # An engine timed at one context only cannot answer this.
    name = next((name for name in given["engines"] if len(by_context(rows, name)) > 1), None)
    if name is None:
        return absent(bench, given["work"][0], given["engines"], given["work"][1])
    times = [row.both.median for row in by_context(rows, name).values() if row.both]
    moved = max(times) / min(times) - 1
    return told(
        moved <= given["most"],
        f"{span(times)} ms with {name}{at(rows[0].tokens)}",
        f"{percent(moved)} from least to most",
    )


def against(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = at_size(bench, given["work"])
    name = pick(rows, given["engines"])
    found = by_context(rows, name) if name else {}
    window = [row for row in at_size(bench, ("attention", "window")) if row.status == "ok" and row.both]
    shared = sorted({row.context or 0 for row in window} & {context or 0 for context in found})
    if name is None or not shared:
        return absent(bench, given["work"][0], given["engines"], given["work"][1])
    context = shared[-1]
    base = min((row.both.median, row.engine) for row in window if row.both and (row.context or 0) == context)
    mine = next(row for row in found.values() if (row.context or 0) == context)
    assert mine.both
    ratio = mine.both.median / base[0]
    ours = f"{digits(ratio)} times with {name}{at(mine.tokens)}, context {context:,}"
    why = f"{digits(mine.both.median)} ms against {digits(base[0])} ms with {base[1]}{_floor(mine)}"
    return told(near(ratio, given["theirs"]), ours, why)


def _floor(row: Row) -> str:
    return f"; it reaches {percent(row.floor_share)} of its floor" if row.floor_share else ""


def near(value: float, theirs: float) -> bool:
    return abs(value / theirs - 1) <= NEAR


def heads(bench: Bench, given: Mapping[str, Any]) -> Answer:
    at_key = {row.key: row for row in bench.select(given["op"]) if row.status == "ok" and row.both}
    tokens = microbatch(at_key.values())
    ratios: dict[str, float] = {}
    for row in at_key.values():
        wide = at_key.get((*row.key[:5], given["many"]))
        if row.heads == given["few"] and row.tokens == tokens and wide and wide.both and row.both:
            ratios[f"{row.engine} {row.case}"] = wide.both.median / row.both.median
    if not ratios:
        return unmeasured(f"no engine was timed with both {given['few']} and {given['many']} heads")
    off = [name for name, ratio in ratios.items() if not near(ratio, given["theirs"])]
    why = f"not so for {listed(off)}" if off else f"{len(ratios)} engines and cases"
    return told(not off, f"{span(ratios.values())} times{at(tokens)}", why)


def _arms(bench: Bench) -> list[Arm]:
    tokens = microbatch(bench.select("attention", "global"))
    return arms(bench, tokens) if tokens else []


def order_of_arms(bench: Bench, given: Mapping[str, Any]) -> Answer:
    found = _arms(bench)
    if len(found) < len(given["order"]):
        lacking = [name for name in given["order"] if name not in [arm.name for arm in found]]
        return unmeasured(f"no timed engine for {listed(lacking)}")
    steps = all(a.total.differs(b.total) for a, b in zip(found, found[1:], strict=False))
    ours = listed(f"{arm.name} {digits(arm.total.median)} ms" for arm in found)
    engines = listed(dict.fromkeys(f"{arm.local.engine} for {arm.name}" for arm in found))
    why = f"fastest engines here: {engines}" + ("" if steps else "; not every step is beyond the spreads")
    return told(steps and tuple(arm.name for arm in found) == given["order"], ours + at(found[0].local.tokens), why)


def added(bench: Bench, given: Mapping[str, Any]) -> Answer:
    found = {arm.name: arm for arm in _arms(bench)}
    rate, arm, window = bench.ceiling("bf16_tflops"), found.get(given["arm"]), found.get("sliding window")
    if rate is None or arm is None or window is None:
        return unmeasured("needs the bf16 rate, a window layer and this arm")
    assert arm.local.tokens
    step = given["operations"] / rate / 1e9 * arm.local.tokens / 16384
    more = arm.local_ms - window.local_ms
    why = f"{digits(more)} ms over windows on {digits(step)} ms at {digits(rate)} TFLOP/s, with {arm.local.engine}"
    share = more / step
    return told(near(share, given["theirs"]), f"{percent(share)}{at(arm.local.tokens)}", why)
