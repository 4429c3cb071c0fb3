"""From the JSON of `dwslm bench step` to step.md, step.html and one joined step.json."""

import os
from collections.abc import Sequence
from pathlib import Path

from dwslm.page import html, markdown
from dwslm.page.bench_file import unique
from dwslm.page.bench_step import Build, Steps, join, words_of
from dwslm.page.bench_step_growth import added, growth
from dwslm.page.document import Block, Cell, Page, Prose, Section, Table
from dwslm.page.words import count, digits, listed, measured, number, percent, share, whole
from dwslm.runs.durable import to_json

PEER = "peer"
RECORDED, LAUNCHED = " recorded", " launched"
"""Ends of the names of a build that was measured both ways."""
RECORD = "train.record="
KERNELS = 15
"""That are named for each build."""


def build_page(steps: Steps) -> Page:
    """The page; a section whose part was not measured is left out."""
    sections = [
        speed(steps),
        growth(steps),
        power(steps),
        starts(steps),
        classes(steps),
        *kernels(steps),
        setup(steps),
        missing(steps),
    ]
    return Page(
        title=f"Training steps on {steps.device}",
        source=steps.source,
        lead=tuple(Prose(note, warning=True) for note in steps.notes),
        sections=tuple(section for section in sections if section is not None),
    )


def write(files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Joins the files and writes `step.md`, `step.html` and `step.json` into the folder `out`, made where it is missing.

    Returns the paths. Raises OSError and what `bench_step.join` raises; nothing is written unless all files can be joined.
    """
    steps = join(files)
    page = build_page(steps)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"md": markdown.render(page), "html": html.render(page), "json": to_json(steps.as_json())}
    paths = tuple(folder / f"step.{ending}" for ending in texts)
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def speed(steps: Steps) -> Section | None:
    rows, verdicts = [], []
    for build in steps.timed:
        memory = build.number("peak_memory_bytes")
        rows.append(
            (
                Cell(build.name, note=str(build.raw.get("meaning") or "")),
                Cell("" if build.raw.get("recorded") is None else "yes" if build.raw["recorded"] else "no"),
                whole(build.stat("tokens_per_second")),
                share(build.number("mfu")),
                measured(build.stat("step_ms")),
                measured(build.stat("micro_batch_ms")),
                measured(build.stat("update_ms")),
                count(build.number("work", "micro_batch_tokens")),
                number(None if memory is None else memory / 1e9),
            )
        )
    if not rows:
        return None
    verdicts += added(steps.timed)
    peers = [build for build in steps.timed if build.raw["name"] == PEER]
    by_words = {(str(build.raw["name"]), _words(build)): build for build in steps.timed}
    for (name, words), build in by_words.items():
        launched = by_words.get((name.removesuffix(RECORDED) + LAUNCHED, words))
        if name.endswith(RECORDED) and launched is not None:
            verdicts.append(_recorded(build, launched))
        for peer in [one for one in peers if build not in peers and _size(build) == _size(one)]:
            ours, theirs = (one.number("tokens_per_second", "median") or 0.0 for one in (build, peer))
            times = digits(ours / theirs)
            verdicts.append(f"{build.name} trains {times} times as many tokens a second as the {peer.name}.")
    columns = (
        "build",
        "recorded",
        "tokens/s",
        "MFU",
        "step, ms",
        "micro-batch, ms",
        "update, ms",
        "micro-batch, tokens",
        "peak memory, GB",
    )
    note = (
        "Sustained: whole steps with loader and optimizer, timed three times after the warm-up; the median, and in brackets "
        "the range of the three (of micro-batches and updates: of the middle half). MFU is 6 x matrix parameters, head included, "
        "x tokens/s over the dense bf16 peak."
    )
    return Section("speed", "Speed", (Table("Sustained speed", columns, tuple(rows), tuple(verdicts), note),))


def _size(build: Build) -> tuple[float | None, ...]:
    """Layers and context: speeds of models of other sizes say nothing of each other."""
    return build.number("work", "layers"), build.number("work", "context")


def _words(build: Build) -> tuple[str, ...]:
    """Its overrides but the one that recorded and launched differ in."""
    return tuple(sorted(word for word in words_of(build.raw) if not word.startswith(RECORD)))


def _recorded(build: Build, launched: Build) -> str:
    one, other = build.stat("tokens_per_second"), launched.stat("tokens_per_second")
    assert one is not None and other is not None
    name = build.name.replace(RECORDED, "", 1)
    if not one.differs(other):
        return f"{name}: recorded and launched lie within the ranges of their runs."
    faster, slower, words = (one, other, "recorded") if one.median > other.median else (other, one, "launched")
    return f"{name}: {words} trains {percent(faster.median / slower.median - 1)} more tokens a second."


def power(steps: Steps) -> Section | None:
    rows = []
    for build in steps.timed:
        watts, clocks = build.runs("health", "power_w", "mean"), build.runs("health", "sm_mhz", "median")
        lows, highs = build.runs("health", "sm_mhz", "min"), build.runs("health", "sm_mhz", "max")
        if not watts and not clocks:
            continue
        reasons: dict[str, float] = {}
        for run in build.raw["runs"]:
            for name, held in ((run.get("health") or {}).get("throttle_reasons") or {}).items():
                reasons[name] = reasons.get(name, 0.0) + held / len(build.raw["runs"])
        rows.append(
            (
                Cell(build.name),
                number(sum(watts) / len(watts) if watts else None),
                number(max(build.runs("health", "power_w", "max"), default=None)),
                count(sum(clocks) / len(clocks) if clocks else None),
                Cell(f"{min(lows):,.0f} to {max(highs):,.0f}" if lows and highs else ""),
                number(max(build.runs("health", "temperature_c", "max"), default=None)),
                Cell(listed(f"{name} {percent(held)}" for name, held in reasons.items())),
                measured(build.stat("energy_j_per_token", 1e3)),
            )
        )
    if not rows:
        return None
    columns = ("build", "power, W", "highest, W", "SM clock, MHz", "range, MHz", "highest, C", "clock held by, share of samples",
               "energy, mJ a token")  # fmt: skip
    return Section("power", "Power and clock while it was timed", (Table("Power and clock", columns, tuple(rows)),))


def starts(steps: Steps) -> Section | None:
    rows = []
    for build in steps.timed:
        for name, start in (
            ("", build.raw.get("start")),
            ("again", (build.raw.get("second_start") or {}).get("start")),
        ):
            if not isinstance(start, dict):
                continue
            first = build.number("second_start", "first_step_s") if name else build.number("first_step_s")
            rows.append(
                (
                    Cell(f"{build.name} {name}".strip()),
                    Cell(str(start.get("caches") or "")),
                    number(start.get("to_first_step_s")),
                    number(start.get("imports_s")),
                    number(start.get("build_s")),
                    number(first),
                )
            )
    columns = (
        "build",
        "compilers' caches",
        "process to first step, s",
        "imports, s",
        "data, model, optimizer, s",
        "first step, s",
    )
    return (
        Section("starts", "First step", (Table("Until the first step is done", columns, tuple(rows)),))
        if rows
        else None
    )


def classes(steps: Steps) -> Section | None:
    profiled = [build for build in steps.timed if build.classes]
    if not profiled:
        return None
    names = list(dict.fromkeys(str(row["class"]) for build in profiled for row in build.classes))
    blocks: list[Block] = [
        Prose(
            "Milliseconds of one step, from the GPU's own record of two steps after the timed ones. A class is told by the "
            "operator that launched the work and by the shapes of its operands. The floor is operations over the matrix rate or "
            "bytes over the copy rate, whichever takes longer, at the rates measured in the same process."
        )
    ]
    rows = []
    for name in names:
        cells = [Cell(name)]
        for build in profiled:
            row = next((row for row in build.classes if row["class"] == name), None)
            cells.append(Cell("") if row is None else number(row["ms"], note=_floor(row)))
        rows.append(tuple(cells))
    rows.append((Cell("idle"), *(number(build.number("profile", "idle_ms")) for build in profiled)))
    rows.append((Cell("whole step"), *(number(build.number("profile", "wall_ms")) for build in profiled)))
    title = "Where the time goes, ms a step; below, the share of its floor"
    blocks.append(
        Table(title, ("class", *(build.name for build in profiled)), tuple(rows), tuple(map(_verdict, profiled)))
    )
    blocks += [_detail(build) for build in profiled]
    return Section("classes", "Where the time goes", tuple(blocks))


def _floor(row: object) -> str:
    assert isinstance(row, dict)
    return f"({percent(row['floor_share'])})" if row.get("floor_share") else ""


def _verdict(build: Build) -> str:
    floors = [row["floor_ms"] for row in build.classes if row.get("floor_ms")]
    wall = build.number("profile", "wall_ms") or 0.0
    return f"{build.name}: the floors of all classes add up to {digits(sum(floors))} of {digits(wall)} ms."


def _detail(build: Build) -> Table:
    rows = tuple(
        (
            Cell(str(row["class"])),
            number(row["ms"]),
            number(row["ms_micro_batch"]),
            share(row["share"]),
            number(row["floor_ms"]),
            share(row["floor_share"]),
            number(row["flop"] / row["ms"] / 1e9 if row.get("flop") and row["ms"] else None),
            number(row["bytes"] / row["ms"] / 1e6 if row.get("bytes") and row["ms"] else None),
        )
        for row in build.classes
    )
    columns = (
        "class",
        "ms a step",
        "ms a micro-batch",
        "of the step",
        "floor, ms",
        "share of floor",
        "TFLOP/s",
        "GB/s",
    )
    return Table(f"{build.name}: classes against their floors", columns, rows)


def kernels(steps: Steps) -> list[Section]:
    tables: list[Block] = []
    for build in steps.timed:
        profile = build.raw.get("profile")
        if isinstance(profile, dict) and profile.get("kernels"):
            rows = tuple(
                (Cell(str(row["kernel"])[:100]), Cell(str(row["class"])), number(row["ms"]), number(row["count"]))
                for row in profile["kernels"][:KERNELS]
            )
            tables.append(
                Table(f"{build.name}: kernels that take longest", ("kernel", "class", "ms a step", "calls"), rows)
            )
    return [Section("kernels", "Kernels", tuple(tables))] if tables else []


def setup(steps: Steps) -> Section:
    machine = {name: value for piece in steps.pieces for name, value in piece["machine"].items() if value is not None}
    versions = {name: value for piece in steps.pieces for name, value in (piece.get("versions") or {}).items()}
    facts = {
        "device": machine.get("device"),
        "driver": machine.get("driver"),
        "power limit": machine.get("power_limit_w") and f"{machine['power_limit_w']:,.0f} W",
        "clock cap": machine.get("clock_cap_mhz") and f"{machine['clock_cap_mhz']:,.0f} MHz",
        "CPU": machine.get("cpu"),
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
    }
    rows = [(Cell(name), Cell(str(value))) for name, value in facts.items() if value]
    rows += [
        (Cell("command"), Cell(command)) for command in unique(str(piece.get("command")) for piece in steps.pieces)
    ]
    for build in steps.builds:
        rows.append((Cell(build.name), Cell(" ".join(build.raw.get("overrides") or []))))
        peer = build.raw.get("peer")
        if isinstance(peer, dict):
            told = (
                f"{peer['parameters']:,} parameters; {peer['attention']}; {'' if peer['compiled'] else 'not '}compiled"
            )
            told += f": {peer['not_compiled_because']}" if peer.get("not_compiled_because") else ""
            rows.append((Cell(f"{build.name}, its model"), Cell(told)))
        ceilings = build.raw.get("ceilings")
        if isinstance(ceilings, dict):
            rates = [
                (name, build.number("ceilings", name, "median")) for name in ("copy_gb_s", "bf16_tflops", "fp8_tflops")
            ]
            words = {"copy_gb_s": "copy, GB/s", "bf16_tflops": "bf16, TFLOP/s", "fp8_tflops": "FP8, TFLOP/s"}
            told = ", ".join(f"{words[name]} {digits(rate)}" for name, rate in rates if rate)
            rows.append((Cell(f"{build.name}, ceilings"), Cell(told)))
        if build.raw.get("not_measured"):
            rows.append((Cell(f"{build.name}, not measured"), Cell(str(build.raw["not_measured"]))))
        if build.raw.get("no_classes"):
            rows.append((Cell(f"{build.name}, classes"), Cell(str(build.raw["no_classes"]))))
    return Section("setup", "Setup", (Table("What was measured", ("", "value"), tuple(rows)),))


def missing(steps: Steps) -> Section | None:
    rows = tuple(
        (Cell(build.name), Cell(build.status), Cell(str(build.raw.get("reason") or "no reason given")))
        for build in steps.builds
        if build.status != "ok" or build.raw.get("reason")
    )
    table = Table("Not measured, or not all of it", ("build", "status", "why"), rows)
    return Section("missing", "What is missing", (table,)) if rows else None
