"""The data of a run, opened and checked as its settings say, and what the plan will serve of them."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text as Line

from dwslm.cli.find import open_split
from dwslm.config import RunConfig
from dwslm.data.describe import check_epochs, describe
from dwslm.data.held_out import check_held_out
from dwslm.data.packing import RowStream
from dwslm.data.shards import Dataset
from dwslm.data.stochastok import split_table
from dwslm.data.text import Text
from dwslm.data.tokenizer import load_tokenizer
from dwslm.train.plan import Plan
from dwslm.train.report import data_table, rung_table

SAY_EVERY = 10.0  # seconds between two lines where the output is no terminal


def open_data(config: RunConfig, console: Console) -> tuple[Dataset, Dataset]:
    """The training and the held-out text of a run, held against each other.

    Raises:
        ValueError: for data that isn't there or is damaged, and for held-out documents in the training text.
    """
    train, valid = open_split(config.data, "train"), open_split(config.data, "valid")
    if said := check_held_out(train, valid, allow_copies=config.data.allow_held_out_copies):
        console.print(Line(f"note: {said}"))
    return train, valid


def open_stream(config: RunConfig, plan: Plan, train: Dataset, cache_dir: Path | None) -> RowStream:
    """The rows of the run.

    Raises:
        ValueError: for a mixture, packing or ladder that the dataset can't serve.
    """
    proportion, seed = config.data.stochastok.splits_per_token, config.train.seed
    table = None
    if proportion:
        table = split_table(load_tokenizer(Path(config.data.path) / "tokenizer.json"))
    return RowStream(
        train,
        packing=config.data.packing,
        mixture=config.data.mixture,
        seed=seed,
        planned_tokens=plan.tokens,
        step_tokens=plan.batch_tokens,
        past=config.data.past,
        cache_dir=cache_dir,
        text=Text(train, proportion=proportion, table=table, seed=seed),
    )


def describe_plan(stream: RowStream, console: Console) -> dict[str, Any]:
    """`describe`, with a bar while the rows are counted, which is done once for a dataset, seed, mixture and packing."""
    bar = Progress(
        TextColumn("counting the rows of the plan"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task("count", total=stream.planned_rows)
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if console.is_terminal:
            bar.update(task, completed=done)
        elif time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            console.print(
                f"counting the rows of the plan, once: {done:,} of {total:,} ({done / total:.0%})", highlight=False
            )

    with bar:
        return describe(stream, progress)


def show_plan(description: dict[str, Any], micro_batch_tokens: int, console: Console) -> None:
    """Prints what the plan serves.

    Raises:
        ValueError: where it would read something more often than its cap allows.
    """
    console.print(data_table(description))
    console.print(rung_table(description, micro_batch_tokens))
    show_warnings(description, console)


def show_warnings(description: dict[str, Any], console: Console) -> None:
    """Prints what the user should hear of a plan beside the tables. Raises as `show_plan` does."""
    if splits := description["stochastok"]:
        more = f"so documents have {splits:.0%} more tokens, and the same text"
        console.print(Line(f"StochasTok: {splits:g} splits a token, {more}"))
    for warning in description["warnings"]:
        console.print(Line(f"note: {warning}"))
    check_epochs(description)
