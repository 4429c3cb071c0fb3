"""`dwslm prepare`: text to a dataset folder. One flag a setting."""

import argparse
import dataclasses
import re
import time
import typing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.cli.settings import field_docs
from dwslm.data.held_out import check_held_out
from dwslm.data.merge import merge
from dwslm.data.prepare import prepare, prepare_tokenizer
from dwslm.data.prepare_settings import SAMPLE_DATA, PrepareSettings
from dwslm.data.readers import FieldSettings
from dwslm.data.sample import Done
from dwslm.data.shards import open_dataset

SAMPLE = Path(__file__).resolve().parents[2] / "sample"
RATE_SECONDS = 30.0  # over which rates are taken
LINE_SECONDS = 30.0  # between lines where there is no terminal
METAVARS = {
    "format": "KIND",
    "valid_fraction": "SHARE",
    "tokenizer": "FILE",
    "eod_token": "TOKEN",
    "piece": "I/N",
    "decontaminate": "HOW",
    "overlap_share": "SHARE",
}  # of flags for neither a number nor a name


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
    parser.add_argument("--out", metavar="DIR", help="folder to make")
    parser.add_argument("--train", nargs="+", default=[], metavar="PATH", help="training text: files or folders")
    parser.add_argument("--valid", nargs="+", default=[], metavar="PATH", help="held-out text, in the same forms")
    parser.add_argument("--licence-file", nargs=2, action="append", default=[], metavar=("NAME", "FILE"),
                        help="text of a licence, kept in the manifest")  # fmt: skip
    parser.add_argument(
        "--skip-bad", type=int, default=0, metavar="N", help="leave out and list up to N unusable documents"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset made with other settings")
    parser.add_argument(
        "--tokenizer-only", action="store_true", help="train the tokenizer, write it to the file --out, and stop"
    )
    done = {"out", "train", "valid", "licence_files", "skip_bad", "overwrite", "fields"}
    for settings in (PrepareSettings, FieldSettings):
        types, docs = typing.get_type_hints(settings), field_docs(settings)
        for field in dataclasses.fields(settings):
            if field.name in done:
                continue
            flag, meaning = as_flag(field.name), said(docs[field.name])
            if types[field.name] is bool:
                parser.add_argument(flag, action="store_true", help=meaning)
            else:
                kind = {int | None: int}.get(types[field.name], types[field.name])
                metavar = METAVARS.get(field.name, "N" if kind is int else "NAME")
                given = field.default not in ("", None)
                default = f" (default {field.default})".replace("%", "%%") if given else ""
                parser.add_argument(flag, type=kind, metavar=metavar, help=meaning + default)
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", metavar="merge")
    joining = actions.add_parser(
        "merge",
        help="join pieces that were prepared with --piece",
        description="Checks the pieces and joins them to what one straight run would have made.",
    )
    joining.add_argument("merged", metavar="OUT", help="folder to make")
    joining.add_argument("pieces", nargs="+", metavar="PIECE", help="all pieces, in any order")
    joining.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    joining.set_defaults(run=run_merge)


def as_flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def said(doc: str) -> str:
    """What a setting is for, in a help text: settings that it names are flags there."""
    names = {field.name for settings in (PrepareSettings, FieldSettings) for field in dataclasses.fields(settings)}

    def spelt(quoted: re.Match[str]) -> str:
        name, sign, value = quoted[1].partition("=")
        return as_flag(name) + (f" {value}" if sign else "") if name in names else quoted[0]

    return re.sub("`([^`]+)`", spelt, doc).replace("%", "%%")


def run(arguments: argparse.Namespace) -> None:
    console = make_console()
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if arguments.sample:
        more = {name: given[name] for name in ("out", "vocab_size", "overwrite") if name in given}
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
    if arguments.tokenizer_only:
        with shown(console) as show:
            made = prepare_tokenizer(settings, show)
        console.print(Text(f"{made['out']}: {made['vocab_size']:,} entries, sha256 {made['tokenizer_hash']}"))
        return
    prepare_with_progress(settings, console)


def run_merge(arguments: argparse.Namespace) -> None:
    console = make_console()
    with shown(console) as show:
        summary = merge(arguments.merged, arguments.pieces, arguments.overwrite, show)
    print_summary(summary, console)


def prepare_sample(
    console: Console, out: str = SAMPLE_DATA, vocab_size: int | None = None, overwrite: bool = False
) -> None:
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
        overwrite=overwrite,
        fields=FieldSettings(licence_field="license"),
    )
    prepare_with_progress(settings, console)


def prepare_with_progress(settings: PrepareSettings, console: Console) -> None:
    """Prepares and prints what came of it."""
    with shown(console) as show:
        summary = prepare(settings, show)
    print_summary(summary, console)


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Done], None]]:
    """A progress bar on a terminal; elsewhere, in the log of a batch job say, a line now and then."""
    clock = Clock()
    if not console.is_terminal:

        def say(done: Done) -> None:
            begun = done.stage != clock.stage
            figures = clock.figures(done)
            if clock.due() or begun:
                console.print(Text(f"{done.stage}: {figures}"))

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("prepare", total=None, figures="")

        def show(done: Done) -> None:
            total = None if done.share is None else 1.0
            bar.update(
                task, description=done.stage, total=total, completed=done.share or 0.0, figures=clock.figures(done)
            )

        yield show


class Clock:
    """Rates and time left of a stage, from what it did over the last half minute or so."""

    def __init__(self) -> None:
        self.stage = ""
        self.marks: deque[tuple[float, Done]] = deque()
        self.said = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for another line."""
        if time.monotonic() - self.said < LINE_SECONDS:
            return False
        self.said = time.monotonic()
        return True

    def figures(self, done: Done) -> str:
        """Documents, MB, MB/s and time left."""
        now = time.monotonic()
        if done.stage != self.stage:
            self.stage = done.stage
            self.marks.clear()
        self.marks.append((now, done))
        while len(self.marks) > 2 and now - self.marks[0][0] > RATE_SECONDS:
            self.marks.popleft()
        figures = f"{done.documents:,} documents, {done.bytes / 1e6:,.1f} MB"
        then, before = self.marks[0]
        if now - then < 1:
            return figures
        figures += f", {(done.bytes - before.bytes) / 1e6 / (now - then):,.1f} MB/s"
        if done.share is not None and before.share is not None and done.share > before.share:
            left = int((1 - done.share) / (done.share - before.share) * (now - then))
            figures += f", {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        return figures


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Prints what `prepare` or `merge` returned."""
    console.print(summary_table(summary))
    if summary["already_complete"]:
        console.print(Text(f"{summary['out']} was complete already"))
    for line in report_lines(summary["report"]):
        console.print(Text(line))
    for bad in summary["bad"]:
        console.print(Text(f"left out: {bad['place']}: {bad['reason']}"))
    if summary["train"]["documents"] and summary["valid"]["documents"]:  # a piece may lack one of them
        out = Path(summary["out"])
        if said := check_held_out(open_dataset(out / "train"), open_dataset(out / "valid"), allow_copies=True):
            console.print(Text(f"note: {said}. A run refuses such data: prepare with --dedup to leave them out"))


def report_lines(report: dict[str, Any]) -> list[str]:
    """What the options left out, in words."""
    reasons = {
        "short": "too short",
        "duplicate": "of a text that occurred before",
        "duplicate_of_held_out": "of a text that is held out",
        "overlap": "that share runs of 13 words with held-out text",
    }
    lines = []
    for reason, splits in report.get("left_out", {}).items():
        for split, counts in splits.items():
            if counts["documents"]:
                figures = f"{counts['documents']:,} {split} documents, {counts['bytes'] / 1e6:,.2f} MB"
                lines.append(f"left out: {figures}, {reasons[reason]}")
    if control := report.get("control_characters"):
        lines.append(f"{control['characters']:,} control characters taken out of {control['documents']:,} documents")
    if overlap := report.get("overlap"):
        shares = ", ".join(
            f"{overlap['documents'][share]:,} ({overlap['bytes'][share] / 1e6:,.2f} MB) "
            + ("with any" if share == "any" else f"with {float(share):.0%} or more of their own")
            for share in overlap["documents"]
        )
        lines.append(f"runs of 13 words that are held out ({overlap['held_out_runs']:,}): training documents {shares}")
        by_source = sorted(overlap["sources"].items(), key=lambda item: -item[1])
        if by_source:
            lines.append("  by source: " + ", ".join(f"{name} {count:,}" for name, count in by_source))
    return lines


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
