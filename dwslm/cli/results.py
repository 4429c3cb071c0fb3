"""`dwslm results`: decisions, the figures they quote, and verdicts between arms."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dwslm.cli.errors import make_console
from dwslm.cli.runs_tables import said, table, verdict_view
from dwslm.runs.decisions import Decision, check, load
from dwslm.runs.figures import value
from dwslm.runs.folder import list_runs, open_run
from dwslm.runs.verdict import group, verdict

DECISIONS = "results/decisions.toml"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("results", help="results and the decisions they led to, checked against their runs")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
        added.add_argument(
            "--runs-dir", default="runs", metavar="DIR", help="folder of run folders; default %(default)s"
        )
        added.set_defaults(run=run)
        return added

    def file(added: argparse.ArgumentParser) -> None:
        added.add_argument("--file", "--decisions", default=DECISIONS, metavar="FILE", help="default %(default)s")

    file(action("ls", "every test with its result and decision", list_all))
    file(action("check", "check every printed figure against its run; code 1 where one differs", check_all))
    show = action("show", "one test: question, result, decision, figures, verdict", show_one)
    file(show)
    show.add_argument("test", metavar="TEST")
    judge = action("verdict", "arms by tokens and by hours, against the noise between two seeds", show_verdict)
    judge.add_argument("names", nargs="+", metavar="RUN", help="runs, or the name of one test for all runs of it")
    figure = action("value", "a figure of a run, as `results check` finds it", show_value)
    figure.add_argument("run_name", metavar="RUN")
    figure.add_argument("metric", metavar="METRIC", help="see docs/runs.md: bits_per_byte, loss, hours, record.lr, ...")
    figure.add_argument("--step", type=int, metavar="N")


def list_all(arguments: argparse.Namespace) -> int:
    made = table("Results and decisions", ("test", "result", "decision", "K"))
    for decision in load(arguments.file):
        made.add_row(*(said(told) for told in (decision.title, decision.result, decision.decision, decision.number)))
    make_console().print(made)
    return 0


def check_all(arguments: argparse.Namespace) -> int:
    """Returns 0; raises ValueError where something is wrong, after saying what."""
    console = make_console()
    decisions = load(arguments.file)
    wrong = [told for decision in decisions for told in check(decision, arguments.runs_dir)]
    for told in wrong:
        console.print(said(told))
    if wrong:
        raise ValueError(f"{arguments.file}: {len(wrong)} problems in {len(decisions)} decisions")
    figures = [figure for decision in decisions for figure in decision.figures]
    checked = sum(not figure.source for figure in figures)
    console.print(
        f"{len(decisions)} decisions, {checked} figures agree with their runs, {len(figures) - checked} have a source",
        highlight=False,
    )
    return 0


def show_one(arguments: argparse.Namespace) -> int:
    console = make_console()
    decision = _find(arguments)
    for name in ("title", "question", "result", "decision", "number", "date"):
        if told := getattr(decision, name):
            console.print(said(f"{name}: {told}"))
    made = table("Figures", ("printed", "what", "run", "step"), right=("printed", "step"))
    for figure in decision.figures:
        what = f"{figure.metric} minus {figure.minus}" if figure.minus else figure.metric
        made.add_row(
            *(said(str(told)) for told in (figure.printed, what or figure.source, figure.run, figure.step or ""))
        )
    console.print(made)
    for told in check(decision, arguments.runs_dir):
        console.print(said(f"problem: {told}"))
    runs = [open_run(name, arguments.runs_dir) for name in decision.runs]
    if len(group(runs)) > 1:
        console.print(verdict_view(verdict(runs)))
    return 0


def show_verdict(arguments: argparse.Namespace) -> int:
    names = arguments.names
    runs = [run for run in list_runs(arguments.runs_dir)[0] if len(names) == 1 and run.test == names[0]]
    runs = runs or [open_run(name, arguments.runs_dir) for name in names]
    make_console().print(verdict_view(verdict(runs)))
    return 0


def show_value(arguments: argparse.Namespace) -> int:
    found = value(open_run(arguments.run_name, arguments.runs_dir), arguments.metric, arguments.step)
    make_console().print(repr(found), highlight=False)
    return 0


def _find(arguments: argparse.Namespace) -> Decision:
    decisions = load(arguments.file)
    for decision in decisions:
        if arguments.test in (decision.test, decision.title):
            return decision
    known = ", ".join(decision.test for decision in decisions) or "none"
    raise ValueError(f"{Path(arguments.file)}: no test {arguments.test!r}; it holds {known}")
