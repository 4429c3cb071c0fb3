"""Of the page of training steps: how speed grows with layers and context, and what the model's own parts add to a step.

Which builds belong together is read off their configurations, not their names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dwslm.page.bench_file import Measured
from dwslm.page.bench_step import Build, Steps
from dwslm.page.document import Block, Cell, Section, Table
from dwslm.page.words import count, digits, measured, number, share, whole

UNIT = 65_536
"""Tokens that the time of a micro-batch is given for, so that builds with other micro-batches can be compared."""
MATRIX_FLOPS = 6
"""Operations a parameter and token, forward and backward."""
MEASURED = ("model", "optim", "train", "guard", "data")
"""Parts of the configuration that steps follow from."""
MICRO_BATCH, DATA_PATH = "train.micro_batch_tokens", "data.path"
VALUES, DEPTH = "model.value_embeddings", "model.depth_block"
OFF = {VALUES: "none", DEPTH: 0}
PARTS = {VALUES: "value embeddings", DEPTH: "attention residuals"}


@dataclass(frozen=True)
class Axis:
    """What grows: its name, its setting, the settings that may follow it, and what is held, with the table's title."""

    name: str
    setting: str
    follow: tuple[str, ...]
    held: str
    title: str


LAYERS, CONTEXT, SEGMENTS = "model.layers", "data.packing.context", "data.packing.segments_per_row"
SHAPE = (LAYERS, CONTEXT, SEGMENTS)
AXES = (
    Axis("layers", LAYERS, (), CONTEXT, "Layers, at context {:,}"),
    Axis("context", CONTEXT, (SEGMENTS,), LAYERS, "Context, at {:,} layers"),
)


def settings(build: Build) -> dict[str, Any]:
    """What the steps of a build follow from: its configuration by dotted names, and the text's fingerprint for its folder."""
    config = build.raw.get("config") or {}
    found: dict[str, Any] = {}

    def walk(part: Any, name: str) -> None:
        if isinstance(part, Mapping):
            for key, value in part.items():
                walk(value, f"{name}.{key}")
        else:
            found[name] = part

    for part in (part for part in MEASURED if part in config):
        walk(config[part], part)
    text = build.raw.get("data")
    if isinstance(text, Mapping) and text.get("fingerprint"):
        found[DATA_PATH] = text["fingerprint"]
    return found


def alike(builds: Sequence[Build], but: Iterable[str]) -> list[list[tuple[Build, dict[str, Any]]]]:
    """Builds of ours and their settings, those together that agree in all settings but these and the micro-batch.

    A setting that a build lacks, since a version did not know it, is a value of its own, unless all builds that have it agree.
    """
    every = [(build, settings(build)) for build in builds if not build.raw.get("peer")]
    every = [(build, found) for build, found in every if found]
    values: dict[str, set[str]] = {}
    for _, found in every:
        for name in found.keys() - {MICRO_BATCH, *but}:
            values.setdefault(name, set()).add(repr(found[name]))
    names = sorted(name for name, given in values.items() if len(given) > 1)
    groups: dict[tuple[str, ...], list[tuple[Build, dict[str, Any]]]] = {}
    for build, found in every:
        groups.setdefault(tuple(repr(found[name]) if name in found else "" for name in names), []).append(
            (build, found)
        )
    return list(groups.values())


def tokens(build: Build) -> float:
    """Of a micro-batch; 0 where the file does not say."""
    return build.number("work", "micro_batch_tokens") or 0.0


def unit_ms(build: Build) -> Measured | None:
    """Milliseconds of micro-batches for `UNIT` tokens."""
    return build.stat("micro_batch_ms", UNIT / tokens(build)) if tokens(build) else None


# ---- what the parts add ------------------------------------------------------------------------------------


def added(builds: Sequence[Build]) -> list[str]:
    """A sentence for each build with value embeddings or attention residuals that was measured without them too."""
    found = []
    for group in alike(builds, OFF):
        bare = [build for build, at in group if all(at.get(name) == off for name, off in OFF.items())]
        for build, at in group:
            on = [name for name, off in OFF.items() if name in at and at[name] != off]
            if on and bare:
                other = min(bare, key=lambda one: abs(tokens(one) - tokens(build)))
                found.append(_added(build, other, on))
    return [sentence for sentence in found if sentence]


def _added(build: Build, bare: Build, on: Sequence[str]) -> str:
    one, other = unit_ms(build), unit_ms(bare)
    if one is None or other is None:
        return ""
    parts = " + ".join(PARTS[name] for name in on)
    told = f"{digits(one.median)} ({digits(one.spread, 2)}) less {digits(other.median)} ({digits(other.spread, 2)})"
    words = f"{build.name} less {bare.name}: {parts} add {digits(one.median - other.median)} ms to a micro-batch of "
    words += f"{UNIT:,} tokens, forward and backward ({told}, the spread of each in brackets)"
    words += "." if one.differs(other) else ", which is no more than the larger spread."
    if DEPTH in on:
        words += f" Net of the residual additions and norms of {bare.name}, which attention residuals replace;"
    else:
        words += " All else of the two is alike;"
    words += " the update is not in it."
    sizes = tokens(build), tokens(bare)
    if sizes[0] != sizes[1]:
        words += f" Scaled from micro-batches of {sizes[0]:,.0f} and {sizes[1]:,.0f} tokens."
    elif sizes[0] != UNIT:
        words += f" Scaled from micro-batches of {sizes[0]:,.0f} tokens."
    return words


# ---- growth ------------------------------------------------------------------------------------------------


def growth(steps: Steps) -> Section | None:
    """Tables of builds that differ in their layers or their context alone; None where there are none."""
    blocks: list[Block] = [table for axis in AXES for table in _tables(steps.timed, axis)]
    return Section("growth", "Growth", tuple(blocks)) if blocks else None


def _tables(builds: Sequence[Build], axis: Axis) -> list[Table]:
    found = []
    known = [build for build in builds if all(whole_above_0(settings(build).get(name)) for name in SHAPE)]
    for group in alike(known, (axis.setting, *axis.follow)):
        if len({at[axis.setting] for _, at in group}) > 1:
            found.append(_table(sorted(group, key=lambda one: float(one[1][axis.setting])), axis))
    return found


def whole_above_0(value: Any) -> bool:
    return type(value) is int and value > 0


def _table(group: Sequence[tuple[Build, dict[str, Any]]], axis: Axis) -> Table:
    rows = []
    for build, at in group:
        matrices, speed = build.number("matrix_parameters"), build.number("tokens_per_second", "median")
        memory, unit, layers = build.number("peak_memory_bytes"), unit_ms(build), at[LAYERS]
        context, segments = at[CONTEXT], at[SEGMENTS]
        by_layer = Measured(unit.median / layers, unit.spread / layers) if unit else None
        rows.append(
            (
                Cell(build.name),
                count(at[axis.setting]),
                count(matrices),
                count(build.number("work", "micro_batch_tokens")),
                Cell(f"{tokens(build) / context:,.0f} x {segments}" if tokens(build) else ""),
                whole(build.stat("tokens_per_second")),
                share(build.number("mfu")),
                number(None if matrices is None or speed is None else MATRIX_FLOPS * matrices * speed / 1e12),
                measured(unit),
                measured(by_layer),
                number(None if memory is None else memory / 1e9),
            )
        )
    columns = (
        "build",
        axis.name,
        "matrix parameters",
        "micro-batch, tokens",
        "rows x segments",
        "tokens/s",
        "MFU",
        "matrices, TFLOP/s",
        f"ms for {UNIT:,} tokens",
        "ms a layer",
        "peak memory, GB",
    )
    note = (
        f"Milliseconds are those of micro-batches, forward and backward, scaled to {UNIT:,} tokens; a layer's share has "
        f"embedding and head in it. Brackets as above. TFLOP/s: {MATRIX_FLOPS} x matrix parameters, head included, x tokens/s "
        "of whole steps. What attention computes beside its projections counts neither there nor in MFU."
    )
    verdicts = (_layers if axis.name == "layers" else _context)(points(group, axis))
    return Table(_title(*group[0], axis), columns, tuple(rows), tuple(verdicts), note)


def _title(build: Build, at: Mapping[str, Any], axis: Axis) -> str:
    way = build.raw.get("recorded")
    return axis.title.format(at[axis.held]) + ("" if way is None else ", recorded" if way else ", launched")


def points(group: Sequence[tuple[Build, dict[str, Any]]], axis: Axis) -> list[tuple[int, Build, Measured]]:
    """(value, build, time for `UNIT` tokens), one for each value: of several that with the micro-batch most like the first's."""
    first = tokens(group[0][0])
    found: dict[int, tuple[int, Build, Measured]] = {}
    for build, at in sorted(group, key=lambda one: abs(tokens(one[0]) - first)):
        unit = unit_ms(build)
        if unit is not None:
            found.setdefault(at[axis.setting], (at[axis.setting], build, unit))
    return [found[value] for value in sorted(found)]


def _layers(found: Sequence[tuple[int, Build, Measured]]) -> list[str]:
    """What a layer takes between neighbours: the same everywhere where growth is linear."""
    told = []
    for (few, small, before), (many, large, after) in pairwise(found):
        each, spread = (after.median - before.median) / (many - few), (after.spread + before.spread) / (many - few)
        words = f"{few} to {many} layers ({small.name} to {large.name}): each adds {digits(each)} ms to {UNIT:,} tokens"
        words += f" (spread of both together: {digits(spread, 2)})"
        if tokens(small) != tokens(large):
            words += f", of micro-batches of {tokens(small):,.0f} and {tokens(large):,.0f}"
        told.append(f"{words}.")
    return told


def _context(found: Sequence[tuple[int, Build, Measured]]) -> list[str]:
    """How much longer a token takes for more context."""
    told = []
    for value, build, unit in found[1:]:
        first, small, base = found[0]
        words = f"{first:,} to {value:,} ({small.name} to {build.name}): context times {digits(value / first)}, "
        words += f"time of {UNIT:,} tokens times {digits(unit.median / base.median)}"
        words += "." if unit.differs(base) else ", within the larger spread."
        told.append(words)
    return told
