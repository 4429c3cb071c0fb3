"""`dwslm scale`: what training on many GPUs takes, on paper: bytes, memory, and from measured pieces the time of a step."""

import argparse
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- dwslm scale: begin -->", "<!-- dwslm scale: end -->"
MODELS = {
    "256M": ("train.batch_tokens=524288",),
    "1B": (
        "model.layers=20", "model.width=2048", "model.heads=16", "model.kv_heads=4", "model.delta_heads=16",
        "model.mlp_hidden=8192", "train.batch_tokens=1048576",
    ),
    "7B": (
        "model.layers=32", "model.width=4096", "model.heads=32", "model.kv_heads=8", "model.delta_heads=32",
        "model.mlp_hidden=16384", "train.batch_tokens=2097152",
    ),
}  # fmt: skip
"""What is other than in experiment=main. Heads stay 128 wide, an MLP four times the stream, one layer in four global."""
RANKS = (1, 2, 4, 8, 64, 512)
VOCAB = 32_768


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "scale",
        help="what training on many GPUs takes, on paper",
        description="Counts what a step moves and holds on each of N ranks. With pieces that were measured it predicts the time.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="SETTING",
        help="of one model, as for train.py; default: 256M, 1B and 7B hybrids",
    )
    parser.add_argument(
        "--measured", metavar="FILE.json", help="what GPUs have shown (docs/scale.md says what it holds)"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(RANKS), metavar="N", help=f"default: {' '.join(map(str, RANKS))}"
    )
    parser.add_argument(
        "--vocab", type=int, default=VOCAB, metavar="N", help="entries of the tokenizer; default %(default)s"
    )
    parser.add_argument(
        "--write", metavar="FILE.md", help="put it between the marks of this file instead of printing it"
    )
    parser.add_argument(
        "--exchange",
        action="store_true",
        help="under torchrun: measure how fast this model's shares travel, and print that",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables, or writes them into a document.

    Raises:
        ValueError: for numbers below 1, a file of measurements that is not one, or a document without the marks.
    """
    from dwslm.cli.scale_tables import document  # PyTorch comes with it

    for name, values in (("ranks", arguments.ranks), ("vocab", [arguments.vocab])):
        if min(values) < 1:
            raise ValueError(f"--{name} {min(values)}: must be 1 or more")
    if arguments.exchange:
        from dwslm.cli.scale_exchange import exchange

        exchange(arguments.overrides, arguments.vocab)
        return
    models = {"this model": tuple(arguments.overrides)} if arguments.overrides else MODELS
    text = document(models, arguments.ranks, arguments.vocab, Path(arguments.measured) if arguments.measured else None)
    if not arguments.write:
        print(text)
        return
    path = Path(arguments.write)
    path.write_text(between_marks(path, path.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(f"{path} written")


def between_marks(path: Path, page: str, text: str) -> str:
    """The page with `text` between its marks; ValueError where they are not there once, in order."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended or END in before or BEGIN in rest or END in after:
        raise ValueError(f"{path}: must hold {BEGIN} and then {END}, once each, on lines of their own")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
