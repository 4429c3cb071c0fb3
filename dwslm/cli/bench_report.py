"""`dwslm bench report` and `dwslm bench compare`: benchmark JSON as a page, and two runs side by side."""

import argparse

from dwslm.cli.errors import make_console
from dwslm.page import bench_step, bench_step_page
from dwslm.page.bench_compare import compare_files, lines
from dwslm.page.bench_page import write


def add_arguments_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE.json", help="what `dwslm bench` wrote: one run, or pieces of one"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder for report.md and report.html (of steps: step.md, .html and one joined .json); made if missing",
    )


def add_arguments_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", help="the run to compare with")
    parser.add_argument("after", metavar="B.json", help="the run in question")
    parser.add_argument("--ignore-below", type=float, default=0.0, metavar="PERCENT",
                        help="leave out what moved by no more than this, for runs made hours apart; default 0")  # fmt: skip


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the two files and says where. Returns 0; raises OSError or ValueError for files that cannot be joined."""
    report(arguments.files, arguments.out)
    return 0


def run_compare(arguments: argparse.Namespace) -> int:
    """Prints the comparison. Returns 0 where nothing got worse, 1 where something did."""
    return compare(arguments.before, arguments.after, arguments.ignore_below)


def report(files: list[str], out: str) -> None:
    console = make_console()
    steps = any(bench_step.is_step(file) for file in files)
    for path in bench_step_page.write(files, out) if steps else write(files, out):
        console.print(str(path), markup=False, highlight=False)


def compare(before: str, after: str, ignore_below: float = 0.0) -> int:
    console = make_console()
    comparison = compare_files(before, after, ignore_below / 100)
    for line in lines(comparison):
        console.print(line, markup=False, highlight=False)
    return int(comparison.worse)
