"""The rules for MLP, head, recording, work and stability. See `claim_rules`."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from dwslm.page.bench_dense import fp8_pair
from dwslm.page.bench_file import NO_CAP, Bench, Row
from dwslm.page.bench_setup import numbers, work_items
from dwslm.page.bench_stability import empty_files
from dwslm.page.claim_rules import (
    Answer,
    Rule,
    absent,
    added,
    against,
    at,
    extra,
    faster,
    flat,
    heads,
    microbatch,
    near,
    order_of_arms,
    passes,
    slowest,
    told,
    unmeasured,
)
from dwslm.page.words import count_span, digits, is_fp8, listed, percent, percent_span, place


def _mlp(bench: Bench) -> tuple[Row, Row] | None:
    rows = bench.select("mlp")
    tokens = microbatch(rows)
    return fp8_pair([row for row in rows if row.tokens == tokens])


def fp8_speed(bench: Bench, given: Mapping[str, Any]) -> Answer:
    pair = _mlp(bench)
    if pair is None:
        return unmeasured("no layer was timed in both bf16 and FP8")
    plain, fp8 = pair
    assert plain.both and fp8.both
    ratio = plain.both.median / fp8.both.median
    same = ratio > given["bar"] and plain.both.differs(fp8.both)
    ours = f"{digits(ratio)} times ({digits(plain.both.median)} against {digits(fp8.both.median)} ms){at(fp8.tokens)}"
    return told(same, ours, f"{plain.engine} against {fp8.engine}; bare products: {_bare(bench)}")


def _bare(bench: Bench) -> str:
    bf16, fp8 = bench.ceiling("bf16_tflops"), bench.ceiling("fp8_tflops")
    return f"{digits(fp8 / bf16)} times" if bf16 and fp8 else "not measured"


def fp8_error(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = [row for row in bench.select("mlp") if is_fp8(row) and row.errors]
    errors = [value for row in rows for value, _ in row.errors.values()]
    if not errors:
        return unmeasured("no FP8 layer went through the gate")
    mean = fmean(errors)
    return told(near(mean, given["theirs"]), percent_span(errors), f"mean {percent(mean)}, against float32 here")


def fp8_bare(bench: Bench, given: Mapping[str, Any]) -> Answer:
    bf16, fp8 = bench.ceiling("bf16_tflops"), bench.ceiling("fp8_tflops")
    if not bf16 or not fp8:
        return unmeasured("the bare products were not timed in both")
    return told(
        near(fp8 / bf16, given["theirs"]),
        f"{digits(fp8 / bf16)} times",
        f"{digits(fp8)} against {digits(bf16)} TFLOP/s",
    )


def fp8_share(bench: Bench, given: Mapping[str, Any]) -> Answer:
    pair, bf16, fp8 = _mlp(bench), bench.ceiling("bf16_tflops"), bench.ceiling("fp8_tflops")
    if pair is None or not bf16 or not fp8 or not pair[0].tflops or not pair[1].tflops:
        return unmeasured("needs a layer and a bare product in both precisions")
    plain, quick = pair[0].tflops / bf16, pair[1].tflops / fp8
    why = f"{digits(pair[1].tflops)} of {digits(fp8)} TFLOP/s and {digits(pair[0].tflops)} of {digits(bf16)}"
    return told(quick < plain, f"{percent(quick)} of it in FP8, {percent(plain)} in bf16{at(pair[0].tokens)}", why)


def _heads(bench: Bench, name: str) -> Row | None:
    rows = bench.select("head")
    tokens = microbatch(rows)
    return next((row for row in rows if row.engine == name and row.tokens == tokens and row.status == "ok"), None)


def head_memory(bench: Bench, given: Mapping[str, Any]) -> Answer:
    first = _heads(bench, given["first"])
    second = next((row for name in given["second"] if (row := _heads(bench, name))), None)
    whole = next((piece.raw["machine"].get("memory_bytes") for piece in bench.pieces), None)
    if first is None or second is None or not first.peak_bytes or not second.peak_bytes or not whole:
        return absent(bench, "head", (given["first"], *given["second"]))
    saved = (first.peak_bytes - second.peak_bytes) / whole
    ours = f"{second.peak_bytes / 1e6:,.0f} instead of {first.peak_bytes / 1e6:,.0f} MB{at(first.tokens)}"
    return told(0 < saved < given["most"], ours, f"{percent(saved)} of the device's {whole / 1e9:,.0f} GB")


def head_rate(bench: Bench, given: Mapping[str, Any]) -> Answer:
    row, rate = _heads(bench, given["engine"]), bench.ceiling("bf16_tflops")
    if row is None or not row.tflops or not rate:
        return absent(bench, "head", (given["engine"],))
    share = row.tflops / rate
    why = f"{digits(row.tflops)} of {digits(rate)} TFLOP/s"
    if row.floor_share:
        why += f"; {percent(row.floor_share)} of its floor"
    return told(near(share, given["theirs"]), f"{percent(share)}{at(row.tokens)}", why)


def padding(bench: Bench, given: Mapping[str, Any]) -> Answer:
    known = [
        (row, row.record.padding_identical)
        for row in bench.rows
        if row.record and row.record.padding_identical is not None
    ]
    if not known:
        return unmeasured("no engine was run with and without padding")
    changed = [f"{row.engine} ({place(row)})" for row, same in known if not same]
    ours = f"{len(known) - len(changed)} of {len(known)} unchanged"
    return told(not changed, ours, f"changed: {listed(changed)}" if changed else "compared bit for bit")


def replays(bench: Bench, given: Mapping[str, Any]) -> Answer:
    good, bad, lacking = [], [], []
    for op, *rest in given["engines"]:
        case, engines = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0])
        rows = [row for row in bench.select(op, case) if row.engine in engines and row.record]
        name = f"{listed(dict.fromkeys(row.engine for row in rows)) or '/'.join(engines)}{f' ({case})' if case else ''}"
        if not rows:
            lacking.append(name)
        elif all(row.record and row.record.status == "ok" and row.record.identical is not False for row in rows):
            good.append(name)
        else:
            bad.append(
                f"{name}: {next(r.record.reason or r.record.status for r in rows if r.record and r.record.status != 'ok')}"
            )
    if not good and not bad:
        return unmeasured(f"none of them was recorded: {listed(lacking)}")
    why = "; ".join([*bad, *([f"not recorded: {listed(lacking)}"] if lacking else [])]) or "all batches, bit for bit"
    if lacking and not bad:
        return Answer(f"{listed(good)} replay", "not measured", why)
    return told(not bad, f"{len(good)} of {len(good) + len(bad)} replay", why)


def replay_time(bench: Bench, given: Mapping[str, Any]) -> Answer:
    gains, unclear = [], []
    for row in (row for op in given["ops"] for row in bench.select(op)):
        record = row.record
        if record and record.status == "ok" and record.recorded and record.launched and record.launched.median:
            gains.append(1 - record.recorded.median / record.launched.median)
            if gains[-1] <= 0 or not record.recorded.differs(record.launched):
                unclear.append(f"{row.engine} ({row.case})")
    if not gains:
        return unmeasured("nothing was both recorded and launched")
    why = f"not faster beyond the spreads: {listed(unclear)}" if unclear else f"{len(gains)} engines and cases"
    return told(not unclear, f"{percent_span(gains)} less", why)


def fails_to_record(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = [row for row in bench.select(given["op"]) if row.engine == given["engine"] and row.record]
    if not rows:
        return absent(bench, given["op"], (given["engine"],))
    failed = [row for row in rows if row.record and row.record.status == "fails"]
    why = failed[0].record.reason if failed and failed[0].record else "its replay keeps up with changed boundaries"
    return told(len(failed) == len(rows), f"fails in {len(failed)} of {len(rows)}", why or "no reason given")


def splits(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = [row for row in bench.select(given["op"]) if row.engine in given["engines"] and row.record]
    if not rows:
        return absent(bench, given["op"], given["engines"])
    failed = [row for row in rows if row.record and row.record.status != "ok"]
    names = listed(dict.fromkeys(f"{row.engine} ({row.case})" for row in failed or rows))
    return told(
        bool(failed),
        f"{len(rows) - len(failed)} of {len(rows)} recorded whole",
        f"{names} {'fails' if failed else 'in one graph'}",
    )


def gate(bench: Bench, given: Mapping[str, Any]) -> Answer:
    tested = [row for row in bench.rows if row.errors]
    if not tested:
        return unmeasured("no engine went through the gate")
    engines = {(row.op, row.case, row.engine) for row in tested}
    failed = list(dict.fromkeys(f"{row.engine} ({row.case})" for row in tested if row.status == "failed"))
    errors = [value for row in tested if row.status == "ok" and not is_fp8(row) for value, _ in row.errors.values()]
    ours = f"{len(engines) - len(failed)} of {len(engines)} pass" + (
        f", errors {percent_span(errors)} without FP8" if errors else ""
    )
    return told(not failed, ours, f"failed: {listed(failed)}" if failed else "each held to its own bound")


def documents(bench: Bench, given: Mapping[str, Any]) -> Answer:
    data: Mapping[str, Any] = next((piece.raw["data"] for piece in bench.pieces if piece.raw["data"]), {})
    known = [value for name in ("median", "share_of_tokens_in_long", "long") for value in numbers(data.get(name))]
    if len(known) != 3:
        return unmeasured("the file does not say how long its documents are")
    median, share, long = known
    same = near(median, given["median"]) and near(share, given["share"])
    ours = f"median {median:,.0f} tokens, {percent(share)} of tokens in documents of {long:,} or more"
    return told(same, ours, f"another dataset: {data.get('path') or 'unknown'}")


def segments(bench: Bench, given: Mapping[str, Any]) -> Answer:
    counts = [n for w in work_items(bench) if w.get("tokens") == given["tokens"] for n in numbers(w.get("segments"))]
    if not counts:
        return unmeasured(f"no work of {given['tokens']:,} tokens")
    overlap = min(counts) <= given["high"] and max(counts) >= given["low"]
    return told(overlap, count_span(counts), "depends on the documents and on how rows are filled")


def resets(bench: Bench, given: Mapping[str, Any]) -> Answer:
    cut = [piece.path for piece in bench.pieces if not piece.complete]
    timed = any(row.timed for row in bench.select("delta_rule"))
    if not timed and not cut:
        return unmeasured("no linear kernel was timed")
    if bench.clock_cap != NO_CAP and not cut:
        return Answer("none, clock capped", "not measured", f"{bench.clock_cap}: what it does without is not known")
    ours = f"{len(cut)} of {len(bench.pieces)} runs cut off" if cut else "none"
    return told(
        bool(cut), ours, f"{bench.clock_cap}; {'cut off: ' + listed(cut) if cut else 'every run ended by itself'}"
    )


def cache(bench: Bench, given: Mapping[str, Any]) -> Answer:
    if not any(piece.raw["stability"].get("cache") for piece in bench.pieces):
        return unmeasured("the caches were not looked at")
    moved = sum(empty_files(piece) for piece in bench.pieces)
    return told(
        moved > 0,
        f"{moved} empty {'file' if moved == 1 else 'files'}",
        "looked for before the run, and moved aside" if moved else "none before the run",
    )


def refused(bench: Bench, given: Mapping[str, Any]) -> Answer:
    rows = [row for row in bench.select(given["op"]) if row.engine == given["engine"]]
    if not rows:
        return unmeasured("this way is not among the engines that were asked for")
    no = [row for row in rows if row.status == "refused"]
    return told(bool(no), "refused" if no else rows[0].status, (no or rows)[0].reason or "no reason given")


def never(bench: Bench, given: Mapping[str, Any]) -> Answer:
    return unmeasured(given["why"])


RULES: dict[str, Rule] = {
    "added": added,
    "against": against,
    "arms": order_of_arms,
    "cache": cache,
    "documents": documents,
    "extra": extra,
    "fails_to_record": fails_to_record,
    "faster": faster,
    "flat": flat,
    "fp8_bare": fp8_bare,
    "fp8_error": fp8_error,
    "fp8_share": fp8_share,
    "fp8_speed": fp8_speed,
    "gate": gate,
    "head_memory": head_memory,
    "head_rate": head_rate,
    "heads": heads,
    "never": never,
    "padding": padding,
    "passes": passes,
    "refused": refused,
    "replay_time": replay_time,
    "replays": replays,
    "resets": resets,
    "segments": segments,
    "slowest": slowest,
    "splits": splits,
}
