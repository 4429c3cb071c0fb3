"""`dwslm prepare`: text to a dataset folder. One flag a setting."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.config import SAMPLE_DATA
from dwslm.data.prepare import prepare
from dwslm.data.prepare_settings import PrepareSettings
from dwslm.data.readers import FieldSettings

SAMPLE = Path(__file__).resolve().parents[2] / "sample"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "prepare",
        help="tokenize text into shards",
        description="Reads JSON lines (plain, .gz, .zst), Parquet, text folders or a `datasets` data set, trains or takes a "
        "tokenizer, and writes train/ and valid/ shards. See docs/data-format.md.",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help=f"prepare the sample that ships with the code into {SAMPLE_DATA}",
    )
    parser.add_argument("--out", help="folder to make")
    parser.add_argument("--train", nargs="+", default=[], metavar="PATH", help="training text: files or folders")
    parser.add_argument("--valid", nargs="+", default=[], metavar="PATH", help="held-out text, in the same forms")
    parser.add_argument("--licence-file", nargs=2, action="append", default=[], metavar=("NAME", "FILE"),
                        help="text of a licence, kept in the manifest")  # fmt: skip
    parser.add_argument(
        "--skip-bad", type=int, default=0, metavar="N", help="leave out and list up to N unusable documents"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset made with other settings")
    done = {"out", "train", "valid", "licence_files", "skip_bad", "overwrite", "fields"}
    for settings in (PrepareSettings, FieldSettings):
        for field in dataclasses.fields(settings):
            if field.name not in done:
                kind = {
                    "valid_fraction": float,
                    "vocab_size": int,
                    "tokenizer_bytes": int,
                    "shard_tokens": int,
                }.get(field.name, str)
                parser.add_argument(
                    f"--{field.name.replace('_', '-')}",
                    type=kind,
                    metavar="X",
                    help=f"default {field.default!r}",
                )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    console = make_console()
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if arguments.sample:
        more = {name: given[name] for name in ("out", "vocab_size") if name in given}
        prepare_sample(console, **more)
        return
    if not arguments.out:
        raise ValueError("prepare needs --out FOLDER (or --sample)")
    fields = FieldSettings(**{f.name: given[f.name] for f in dataclasses.fields(FieldSettings) if f.name in given})
    names = {f.name for f in dataclasses.fields(PrepareSettings)} - {"fields", "licence_files"}
    settings = PrepareSettings(
        **{name: given[name] for name in names if name in given},
        fields=fields,
        licence_files={name: file for name, file in arguments.licence_file},
    )
    prepare_with_progress(settings, console)


def prepare_sample(console: Console, out: str = SAMPLE_DATA, vocab_size: int | None = None) -> None:
    """Prepares the text that ships with the code.

    Raises:
        ValueError: where the code was installed without it.
    """
    files = [SAMPLE / "train.jsonl.gz", SAMPLE / "valid.jsonl.gz"]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not there: the sample comes with a checkout of the repository")
    settings = PrepareSettings(
        out=out,
        train=[str(files[0])],
        valid=[str(files[1])],
        vocab_size=vocab_size,
        fields=FieldSettings(licence_field="license"),
    )
    prepare_with_progress(settings, console)


def prepare_with_progress(settings: PrepareSettings, console: Console) -> None:
    """Prepares and prints what came of it."""
    columns = [TextColumn("{task.description}"), TextColumn("{task.fields[figures]}"), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("prepare", total=None, figures="")

        def show(stage: str, documents: int, size: int) -> None:
            bar.update(task, description=stage, figures=f"{documents:,} documents, {size / 1e6:,.1f} MB")

        summary = prepare(settings, show)
    console.print(summary_table(summary))
    if summary.get("already_complete"):
        console.print(Text(f"{settings.out} was complete already"))
    for bad in summary["bad"]:
        console.print(Text(f"left out: {bad['place']}: {bad['reason']}"))


def summary_table(summary: dict[str, Any]) -> Table:
    """Documents, tokens and bytes by split and source."""
    table = Table(title=f"{summary['out']}: vocabulary {summary['vocab_size']:,}", title_justify="left")
    for name, justify in (("split", "left"), ("source", "left"), ("documents", "right"), ("tokens", "right"),
                          ("MB", "right"), ("bytes a token", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for split in ("train", "valid"):
        totals: dict[str, list[int]] = {}
        for row in summary[split]["slices"]:
            for name in (row["source"], "all"):
                sums = totals.setdefault(name, [0, 0, 0])
                for i, key in enumerate(("documents", "tokens", "bytes")):
                    sums[i] += row[key]
        for name, (documents, tokens, size) in sorted(totals.items(), key=lambda item: (item[0] == "all", item[0])):
            table.add_row(
                split,
                Text(name),
                f"{documents:,}",
                f"{tokens:,}",
                f"{size / 1e6:.2f}",
                f"{size / tokens:.2f}",
            )
    return table
