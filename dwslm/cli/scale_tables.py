"""The tables of `dwslm scale`, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dwslm.cli.data_mix import composed
from dwslm.train.micro_batch import MOST_TOKENS, SHARE, candidates
from dwslm.train.report import count
from dwslm.train.scale import Assumed, Dealt, Model, Paper, largest_micro_batch
from dwslm.train.scale_measured import read_measured

MIB = 2**20
MEMORIES = {"80 GB": 81_559 * MIB, "141 GB": 143_771 * MIB}
"""As the drivers of an H100 and an H200 report them."""
ROOM = "141 GB"
"""The GPU that times are for."""
OWED = (
    "Times, and their check against runs on one and on two GPUs, are owed: no file of measurements was given "
    "(`dwslm scale --measured FILE.json`)."
)
UNEVEN, TOO_LARGE = "does not divide", "does not fit"
"""Batches that cannot be dealt to the ranks in whole rows; models that leave no room for the smallest micro-batch."""


@dataclass(frozen=True)
class Case:
    """A model to be trained: its shapes, and what it would like for a step."""

    name: str
    model: Model
    micro_batch_tokens: int
    batch_tokens: int
    contexts: tuple[int, ...]
    """Slots of a row, on each rung."""

    def sizes(self, ranks: int) -> list[int]:
        """Micro-batches that `ranks` may do its batch in, largest first: those that `train.micro_batch_tokens=auto` has."""
        return candidates(self.batch_tokens, self.contexts, ranks)


def document(models: Mapping[str, Sequence[str]], ranks: Sequence[int], vocab_size: int, measured: Path | None) -> str:
    """Everything, for models given by their settings."""
    cases = [case_of(name, settings, vocab_size) for name, settings in models.items()]
    parts = [sizes_table(cases), *counted_tables(cases, ranks)]
    if measured is None:
        return "\n\n".join([*parts, OWED])
    shown, assumed = read_measured(measured), Assumed()
    base = case_of("measured", shown.settings, vocab_size, exact=True)
    paper = Paper(shown, base.model, base.micro_batch_tokens, assumed)
    parts += [
        f"Measured: {shown.device}; {shown.source}. Its micro-batch does {paper.flop_rate / 1e12:,.0f} TFLOP/s in its matrices "
        f"and head, Newton-Schulz {paper.newton_schulz_rate / 1e12:,.0f} as if its products were done in full, and an element's "
        f"update takes {paper.element_seconds * 1e12:,.1f} ps; {shown.scatter_rate / 1e9:,.0f} GB/s of a reduce-scatter and "
        f"{shown.gather_rate / 1e9:,.0f} of an all-gather within a machine. Assumed: {assumed.node} GPUs a machine, "
        f"{assumed.network / 1e9:,.0f} GB/s through each one's adapter, {assumed.hop * 1e6:g} us a hop.",
        times_table(cases, ranks, paper),
        within_table(cases, ranks, paper),
        check_table(base, paper),
    ]
    return "\n\n".join(part for part in parts if part)


def case_of(name: str, settings: Sequence[str], vocab_size: int, exact: bool = False) -> Case:
    """What these settings make, over experiment=main unless they name another.

    exact: of something that was run. Raises ValueError for a micro-batch of `auto` then; else it stands for any that fits.
    """
    named = any(setting.startswith("experiment=") for setting in settings)
    config = composed([*([] if named else ["experiment=main"]), *settings], None)
    model = Model(config.model, config.optim, vocab_size)
    size = config.train.micro_batch_tokens
    if exact and not isinstance(size, int):
        raise ValueError(
            f"settings of the measured model: train.micro_batch_tokens={size} must be the number that was run"
        )
    packing = config.data.packing
    contexts = (packing.context, *(rung.context for rung in packing.ladder))
    return Case(name, model, size if isinstance(size, int) else MOST_TOKENS, config.train.batch_tokens, contexts)


def sizes_table(cases: Sequence[Case]) -> str:
    rows = [
        (
            case.name,
            *(count(case.model.sizes[group]) for group in ("matrices", "head", "input table", "value tables")),
            count(sum(case.model.sizes.values())),
            f"{case.model.activations(4096) / 1e9:.1f}",
        )
        for case in cases
    ]
    columns = ("model", "matrices", "head", "input table", "value tables", "parameters", "GB for 4,096 tokens")
    return "### The models\n\n" + table(columns, rows)


def counted_tables(cases: Sequence[Case], ranks: Sequence[int]) -> list[str]:
    """What moves, and what has to be held: counted."""
    moves, holds = [], []
    for case in cases:
        for n in ranks:
            dealt = Dealt(case.model, n)
            moves.append(
                (
                    case.name,
                    f"{n}",
                    f"{dealt.uneven:.2f}",
                    f"{dealt.empty}",
                    f"{dealt.without_matrix}",
                    f"{dealt.scatter_bytes / 1e9:,.2f}",
                    f"{dealt.gather_bytes / 1e9:,.2f}",
                )
            )
            state = max(share.state for share in dealt.shares)
            held = (2 * dealt.copies, dealt.buffer, state, dealt.held)
            sizes = (size_or_reason(case, dealt, case.sizes(n), memory) for memory in MEMORIES.values())
            room = (size if isinstance(size, str) else f"{size:,}" for size in sizes)
            holds.append((case.name, f"{n}", *(f"{size / 1e9:,.1f}" for size in held), *room))
    columns = (
        "model",
        "GPUs",
        "largest share / mean",
        "ranks with nothing",
        "without a matrix",
        "GB out: gradients",
        "GB out: copies",
    )
    what = (
        "model",
        "GPUs",
        "copies and gradients, GB",
        "sums of gradients, GB",
        "masters and state, GB",
        "together, GB",
    )
    return [
        "### What a step moves, for each GPU\n\n" + table(columns, moves),
        "### What a GPU holds, and the largest micro-batch that fits\n\n"
        + table((*what, *(f"tokens on {name}" for name in MEMORIES)), holds),
    ]


def size_or_reason(case: Case, dealt: Dealt, sizes: Sequence[int], memory: float) -> int | str:
    """The largest of `sizes` for a GPU of so many bytes, or why there is none."""
    size = largest_micro_batch(case.model, dealt, sizes, SHARE * memory)
    if size is not None:
        return size
    return TOO_LARGE if sizes or dealt.held > SHARE * memory else UNEVEN


STEP = ("model", "GPUs", "batch", "micro-batches", "compute, ms", "lag, ms", "update, ms", "exchange, ms", "step, ms",
        "exposed", "tokens/s")  # fmt: skip


def times_table(cases: Sequence[Case], ranks: Sequence[int], paper: Paper) -> str:
    rows = [step_row(case, Dealt(case.model, n), n, paper) for case in cases for n in ranks]
    return "### Expected: the optimizer dealt to all ranks, as it is\n\n" + table(STEP, rows)


def within_table(cases: Sequence[Case], ranks: Sequence[int], paper: Paper) -> str:
    node = paper.assumed.node
    more = [n for n in ranks if n > node and n % node == 0]
    rows = [step_row(case, Dealt(case.model, node), n, paper) for case in cases for n in more]
    title = f"### If it were dealt to the {node} of each machine, and sums taken between machines (not built)\n\n"
    return title + table(STEP, rows) if rows else ""


def step_row(case: Case, dealt: Dealt, ranks: int, paper: Paper) -> tuple[str, ...]:
    """A step with the largest micro-batch that divides and fits, up to the model's own."""
    sizes = [size for size in case.sizes(ranks) if size <= case.micro_batch_tokens]
    size = size_or_reason(case, dealt, sizes, MEMORIES[ROOM])
    if isinstance(size, str):
        return (case.name, f"{ranks}", f"{size} on {ROOM}" if size == TOO_LARGE else size, *[""] * (len(STEP) - 3))
    n = case.batch_tokens // (ranks * size)
    step = paper.step(case.model, dealt, ranks, size, n)
    ms = (step.compute, step.lag, step.update, step.exchange, step.seconds)
    return (
        case.name,
        f"{ranks}",
        count(step.tokens),
        f"{n} of {size:,}",
        *(f"{seconds * 1e3:,.1f}" for seconds in ms),
        f"{step.exchange / step.seconds:.1%}",
        count(step.tokens_per_second),
    )


def check_table(base: Case, paper: Paper) -> str:
    """What the formula gives for the measured runs, beside what they gave. ValueError for one that no plan allows."""
    if not paper.measured.runs:
        return "### Check\n\nOwed: the file of measurements holds no runs."
    rows: list[tuple[str, ...]] = []
    alone: tuple[float, float] | None = None
    for run in sorted(paper.measured.runs, key=lambda run: run.ranks):
        if base.batch_tokens % (run.ranks * base.micro_batch_tokens):
            raise ValueError(
                f"a measured run by {run.ranks} ranks can't have had the measured model's {base.batch_tokens:,} tokens a step in "
                f"micro-batches of {base.micro_batch_tokens:,}: settings or ranks are other"
            )
        dealt = Dealt(base.model, run.ranks)
        n = base.batch_tokens // (run.ranks * base.micro_batch_tokens)
        step = paper.step(base.model, dealt, run.ranks, base.micro_batch_tokens, n)
        speeds = step.tokens_per_second, run.tokens_per_second
        alone = speeds if run.ranks == 1 else alone
        compared: list[tuple[str, float, float | None, float, str]] = [
            ("tokens/s", *speeds, 1, ",.0f"),
            ("update, ms", step.update, run.update_seconds, 1e-3, ",.1f"),
            ("memory, GB", dealt.held + base.model.activations(base.micro_batch_tokens), run.peak_memory, 1e9, ",.1f"),
        ]
        if run.ranks > 1:
            compared[1:1] = [
                ("sum of gradients, ms", step.scatter, run.scatter_seconds, 1e-3, ",.1f"),
                ("copies, ms", step.gather, run.gather_seconds, 1e-3, ",.1f"),
            ]
            if alone is not None:
                of_linear = [speed / (run.ranks * one) for speed, one in zip(speeds, alone, strict=True)]
                compared.insert(1, (f"of {run.ranks} times one GPU", of_linear[0], of_linear[1], 1, ".1%"))
        for what, predicted, seen, unit, form in compared:
            known = ("owed", "") if seen is None else (f"{seen / unit:{form}}", f"{predicted / seen - 1:+.1%}")
            rows.append((f"{run.ranks}", what, f"{predicted / unit:{form}}", *known))
    return "### Check\n\n" + table(("GPUs", "", "formula", "measured", "difference"), rows)


def table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
