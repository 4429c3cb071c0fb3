"""The data of a run, opened and checked as its settings say, and what the plan will serve of them."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text as Line

from dwslm.config import RunConfig
from dwslm.data.describe import check_epochs, describe
from dwslm.data.packing import RowStream
from dwslm.data.shards import Dataset
from dwslm.data.stochastok import split_table
from dwslm.data.text import Text
from dwslm.data.tokenizer import load_tokenizer
from dwslm.train.plan import Plan
from dwslm.train.report import data_table, rung_table

SAY_EVERY = 10.0  # seconds between two lines where the output is no terminal


def open_stream(config: RunConfig, plan: Plan, train: Dataset, cache_dir: Path | None) -> RowStream:
    """The rows of the run.

    Raises:
        ValueError: for a mixture, packing or ladder that the dataset can't serve.
    """
    proportion, seed = config.data.stochastok.proportion, config.train.seed
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
    """Prints what the user should hear of a plan. Raises as `show_plan` does."""
    for warning in description["warnings"]:
        console.print(Line(f"note: {warning}"))
    check_epochs(description)
