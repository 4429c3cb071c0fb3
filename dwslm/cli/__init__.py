"""The `dwslm` command; training and scoring have entry points of their own, train.py and eval.py."""

import argparse
import sys

from dwslm import __version__
from dwslm.cli.errors import one_line_errors


def main() -> None:
    """Parses the command line and calls the sub-command."""
    from dwslm.cli import bench, cache, data, demo, page, preflight, prepare, queue, results, run, runs, settings

    parser = argparse.ArgumentParser(
        prog="dwslm", description="Pretrain a hybrid language model and score it by slice."
    )
    parser.add_argument("--version", action="version", version=f"dwslm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (prepare, data, demo, preflight, run, runs, results, queue, bench, page, cache, settings):
        module.add_parser(commands)
    arguments = parser.parse_args(sys.argv[1:])
    with one_line_errors():
        arguments.run(arguments)
