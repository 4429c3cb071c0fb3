"""`dwslm data`: what is in a dataset, whether it is whole, what a mixture will serve, how fast text is tokenized."""

import argparse
import dataclasses
import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.data.inspect import LONG, Lengths, find_datasets, lengths, samples, totals
from dwslm.data.readers import FieldSettings
from dwslm.data.shards import read_manifest
from dwslm.data.verify import verify


def add_parser(commands: Any) -> None:
    from dwslm.cli.data_mix import add_arguments_mix, run_mix

    parser = commands.add_parser("data", help="look into a dataset, check it, plan a mixture, measure preparing")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    show = actions.add_parser("inspect", help="totals, document lengths, sample texts")
    show.add_argument("path", help="folder that `dwslm prepare` made, or one dataset in it")
    show.add_argument("--by", choices=("source", "language", "both"), help="one table of totals instead of two")
    show.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show, 0 for none (default 3)")
    show.add_argument("--characters", type=int, default=300, metavar="N", help="of each (default 300)")
    show.add_argument("--source", default="", metavar="NAME", help="show documents of this source alone")
    show.add_argument("--language", default="", metavar="NAME", help="show documents of this language alone")
    show.add_argument("--seed", type=int, default=0, metavar="N", help="which documents are drawn (default 0)")
    show.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    show.set_defaults(run=run_inspect)

    check = actions.add_parser("verify", help="checksums, offsets, byte sums and ids of every document")
    check.add_argument("path", help="folder that `dwslm prepare` made, or one dataset in it")
    check.set_defaults(run=run_verify)

    mix = actions.add_parser("mix", help="tokens and epochs by source and phase, before a GPU is paid for")
    add_arguments_mix(mix)
    mix.set_defaults(run=lambda arguments: leave(run_mix(arguments)))

    rate = actions.add_parser(
        "rate",
        help="measure tokenizing beside the tokenizer's own batch call",
        description="Tokenizes the same documents three ways in one run: `tokenizers` alone, `dwslm prepare` from file "
        "to shards, and a multiprocessing pool that encodes line by line, as Megatron-LM's script does.",
    )
    rate.add_argument("--text", nargs="+", required=True, metavar="PATH", help="text, as for `dwslm prepare --train`")
    rate.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer file")
    rate.add_argument("--megabytes", type=float, default=100.0, metavar="X", help="of text (default 100)")
    rate.add_argument("--rounds", type=int, default=2, metavar="N", help="turns of each way (default 2)")
    rate.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    rate.set_defaults(run=run_rate)


def leave(code: int) -> None:
    if code:
        sys.exit(code)


def run_inspect(arguments: argparse.Namespace) -> None:
    console = make_console()
    for flag in ("samples", "characters", "seed"):
        if (value := getattr(arguments, flag)) < 0:
            raise ValueError(f"--{flag} {value}: must be 0 or more")
    found = find_datasets(arguments.path)
    if arguments.json:
        figures = {
            name: {
                "totals": read_manifest(path)["totals"],
                "slices": totals(path, "both"),
                "lengths": dataclasses.asdict(lengths(path)),
                "samples": drawn(path, arguments),
            }
            for name, path in found.items()
        }
        print(json.dumps(figures, indent=1, ensure_ascii=False))
        return
    for name, path in found.items():
        for by in (arguments.by,) if arguments.by else ("source", "language"):
            console.print(totals_table(f"{name}: totals by {by}", totals(path, by), read_manifest(path)["totals"]))
        console.print(lengths_table(f"{name}: documents by length in tokens", lengths(path)))
        for sample in drawn(path, arguments):
            head = f"{name} document {sample['document']:,}, {sample['source']} / {sample['language']}, "
            console.print(Text(f"\n{head}{sample['tokens']:,} tokens, {sample['bytes']:,} bytes", style="bold"))
            console.print(Text(sample["text"]))
        console.print()


def drawn(path: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if not arguments.samples:
        return []
    return samples(path, arguments.samples, arguments.characters, arguments.seed, arguments.source, arguments.language)


def totals_table(title: str, rows: list[dict[str, Any]], whole: dict[str, int]) -> Table:
    table = Table(title=title, title_justify="left")
    names = [key for key in ("source", "language") if key in rows[0]]
    for key in names:
        table.add_column(key)
    for name in ("documents", "tokens", "share", "MB", "bytes a token"):
        table.add_column(name, justify="right")
    for row in [*rows, {**dict.fromkeys(names, ""), names[0]: "all", **whole}]:
        table.add_row(
            *(Text(row[key]) for key in names),
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            f"{row['tokens'] / whole['tokens']:.2%}",
            f"{row['bytes'] / 1e6:,.2f}",
            f"{row['bytes'] / row['tokens']:.2f}",
        )
    return table


def lengths_table(title: str, found: Lengths) -> Table:
    documents = sum(row["documents"] for row in found.classes)
    tokens = sum(row["tokens"] for row in found.classes)
    table = Table(
        title=title,
        title_justify="left",
        caption=f"median {found.median:,.0f} tokens; half of the tokens in documents of up to {found.token_median:,}; "
        f"longest {found.longest:,}\nof {LONG:,} tokens or more: {found.long_documents:,} documents "
        f"({found.long_documents / documents:.2%}) with {found.long_tokens / tokens:.2%} of the tokens",
        caption_justify="left",
    )
    for name in ("tokens in it", "documents", "share", "tokens", "share of tokens"):
        table.add_column(name, justify="right")
    for row in found.classes:
        table.add_row(
            f"{row['from']:,} to {row['to']:,}",
            f"{row['documents']:,}",
            f"{row['documents'] / documents:.2%}",
            f"{row['tokens']:,}",
            f"{row['tokens'] / tokens:.2%}",
        )
    return table


def run_verify(arguments: argparse.Namespace) -> None:
    console = make_console()
    found = find_datasets(arguments.path)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("verify", total=1.0)
        wrong = verify(
            found,
            lambda name, tokens, share: bar.update(task, description=f"{name}: {tokens:,} tokens", completed=share),
        )
    for line in wrong:
        console.print(Text(line, style="red"))
    if wrong:
        raise ValueError(f"{arguments.path}: {len(wrong)} faults; prepare it again")
    for name, path in found.items():
        total = read_manifest(path)["totals"]
        console.print(
            Text(
                f"{name}: {total['documents']:,} documents, {total['tokens']:,} tokens, {total['bytes']:,} bytes: checksums, "
                "offsets, byte sums, totals and ids are right"
            )
        )


def run_rate(arguments: argparse.Namespace) -> None:
    from dwslm.data.rate import rates

    if not 0 < arguments.megabytes < math.inf:
        raise ValueError(f"--megabytes {arguments.megabytes:g}: must be above 0 and finite")
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds}: must be at least 1")
    status = Console(stderr=True)
    found = rates(
        arguments.text,
        arguments.tokenizer,
        FieldSettings(id_field="", source="text", language="any"),
        arguments.megabytes,
        arguments.rounds,
        lambda line: status.print(Text(line)),
    )
    if arguments.json:
        print(json.dumps([rate._asdict() for rate in found], indent=1))
        return
    table = Table(title=f"{found[0].megabytes:,.0f} MB of text each", title_justify="left")
    for name in ("way", "MB/s", "of encode_batch", "MB a CPU second"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for rate in found:
        table.add_row(
            rate.name,
            f"{rate.megabytes / rate.seconds:.2f}",
            f"{found[0].seconds / rate.seconds:.1%}",
            f"{rate.megabytes / rate.cpu_seconds:.2f}",
        )
    make_console().print(table)
