"""The `dwslm` command; training and scoring have entry points of their own, train.py and eval.py."""

import argparse
import importlib
import sys

from dwslm import __version__
from dwslm.cli.errors import one_line_errors

COMMANDS = (
    "prepare",
    "data",
    "demo",
    "preflight",
    "run",
    "runs",
    "results",
    "queue",
    "bench",
    "page",
    "cache",
    "scale",
    "settings",
)


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The command line. Where a command takes settings (`overrides`, name=value), they may stand before, between and after its
    options, which argparse by itself allows in one place only."""
    arguments, rest = parser.parse_known_args(words)
    if rest:
        if not hasattr(arguments, "overrides") or any(word.startswith("-") or "=" not in word for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def main() -> None:
    """Parses the command line and calls the sub-command."""
    parser = argparse.ArgumentParser(
        prog="dwslm", description="Pretrain a hybrid language model and score it by slice."
    )
    parser.add_argument("--version", action="version", version=f"dwslm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the one that is asked for: most of them bring PyTorch along.
    asked = [name for name in COMMANDS if sys.argv[1:2] == [name]]
    for name in asked or COMMANDS:
        importlib.import_module(f"dwslm.cli.{name}").add_parser(commands)
    arguments = parse(parser, sys.argv[1:])
    with one_line_errors():
        arguments.run(arguments)
