"""`dwslm runs`: every run of a folder, one up close, several side by side."""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live

from dwslm.cli import runs_tables as tables
from dwslm.cli.errors import make_console
from dwslm.config import flatten
from dwslm.runs import reader
from dwslm.runs.figures import hours
from dwslm.runs.folder import RunFolder, list_runs, open_run
from dwslm.runs.follow import send
from dwslm.runs.sinks import SINKS, WANDB_MODES, require
from dwslm.runs.state import STATES, state
from dwslm.runs.summary import OVER, summaries, summary
from dwslm.runs.verdict import group, verdict
from dwslm.runs.writer import RunWriter

RUN_HELP = "its folder, name, id or other ending of the folder's name, or `latest`"
WATCH_EVENTS = 10
RUNS = "runs"  # the default of runs_dir


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("runs", help="list, show, watch and compare runs")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help)
        added.add_argument("--runs-dir", default=RUNS, metavar="DIR", help="folder of run folders; default %(default)s")
        added.set_defaults(run=run)
        return added

    ls = action("ls", "every run, newest first", list_all)
    ls.add_argument("--state", action="append", choices=STATES, help="only runs in this state; may be given again")
    ls.add_argument("--test", metavar="NAME", help="only runs of this test")
    ls.add_argument("--tag", metavar="TAG", help="only runs with this tag")
    ls.add_argument("--limit", type=int, metavar="N", help="only the N newest of them")
    show = action("show", "one run up close: facts, scores by slice, latest events", show_one)
    show.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    show.add_argument("--events", type=int, default=10, metavar="N", help="how many events; default %(default)s")
    watch = action("watch", "all runs, or one, as they go on; ends with Ctrl-C, or with the run", watch_them)
    watch.add_argument("run_name", nargs="?", metavar="RUN", help=RUN_HELP + "; all runs without it")
    watch.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="default %(default)s")
    events = action("events", "what happened, newest first", show_events)
    events.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    events.add_argument("--kind", action="append", metavar="EVENT", help="only these; may be given again")
    events.add_argument("--limit", type=int, default=50, metavar="N", help="default %(default)s")
    compare = action("compare", "runs side by side, and what follows where they are arms of a test", compare_them)
    compare.add_argument("run_names", nargs="+", metavar="RUN", help=RUN_HELP)
    diff = action("diff", "the settings in which two runs differ", diff_them)
    diff.add_argument("run_names", nargs=2, metavar="RUN", help=RUN_HELP)
    tag = action("tag", "give a run tags, or take them away; without any, print them", tag_it)
    tag.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    tag.add_argument("tags", nargs="*", metavar="TAG", help="tags to give")
    tag.add_argument("--remove", nargs="+", default=[], metavar="TAG", help="tags to take away")
    sending = action("send", "send all rows of a run to a tracker, now", send_it)
    sending.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    sending.add_argument("--to", required=True, choices=sorted(SINKS))
    sending.add_argument("--mode", choices=WANDB_MODES, default="offline", help="of wandb; default %(default)s")
    sending.add_argument("--project", default="dwslm", help="of wandb; default %(default)s")
    sending.add_argument("--entity", help="of wandb: user or team")


def whole(number: int | None, option: str) -> int | None:
    """Raises ValueError for a number of rows below 0."""
    if number is not None and number < 0:
        raise ValueError(f"{option} {number} is below 0")
    return number


def list_all(arguments: argparse.Namespace) -> None:
    console = make_console()
    limit = whole(arguments.limit, "--limit")
    if arguments.runs_dir == RUNS and not Path(RUNS).exists():
        console.print(f"no runs yet in {RUNS}")
        return
    root = _root(arguments)
    now = time.time()
    found = [
        run
        for run in summaries(root, now)
        if (not arguments.state or run.state in arguments.state)
        and arguments.test in (None, run.test)
        and (arguments.tag is None or arguments.tag in run.tags)
    ]
    unreadable = list_runs(root)[1]
    console.print(tables.runs_table(found[:limit], len(unreadable), now))
    for path, reason in unreadable:
        console.print(tables.said(f"{path.name}: {reason}"))


def show_one(arguments: argparse.Namespace) -> None:
    console = make_console()
    run = _open(arguments)
    console.print(_view(run, whole(arguments.events, "--events") or 0, time.time()))


def watch_them(arguments: argparse.Namespace) -> None:
    """A live view on a terminal; elsewhere a line for each change."""
    if not 0 < arguments.every < math.inf:
        raise ValueError(f"--every {arguments.every} must be above 0")
    console = make_console()
    run = _open(arguments) if arguments.run_name else None
    if not console.is_terminal:
        follow(console, run, _root(arguments), arguments.every)
        return

    def view() -> RenderableType:
        now = time.time()
        told = (
            tables.runs_table(summaries(_root(arguments), now), 0, now)
            if run is None
            else _view(run, WATCH_EVENTS, now)
        )
        return Group(told, tables.updated(now))

    with Live(view(), console=console, auto_refresh=False) as live:
        while run is None or state(run, time.time()) not in OVER:
            time.sleep(arguments.every)
            live.update(view(), refresh=True)


def follow(console: Console, run: RunFolder | None, root: Path, every: float) -> None:
    """Prints reports and events of a run as they come until it is over; of all runs, their changes of state."""
    seen: dict[Any, Any] = {}
    while True:
        over = (
            run is not None and state(run, time.time()) in OVER
        )  # asked before reading, so that the last words are read
        if run is None:
            for one in reversed(summaries(root)):
                if seen.get(one.path) != one.state:
                    console.print(
                        tables.said(f"{one.path.name}: {one.state}" + (f", {one.reason}" if one.reason else ""))
                    )
                seen[one.path] = one.state
        else:
            rows = [("report", row) for row in reader.metrics(run)] + [("event", row) for row in reader.events(run)]
            for kind, row in sorted(rows, key=lambda pair: float(pair[1].get("time") or 0)):
                key = (kind, row.get("writer"), row["attempt"], row.get("step"), row.get("event"), row.get("mono"))
                if key not in seen:
                    seen[key] = True
                    what = tables.report_line(row) if kind == "report" else f"{row['event']} {tables.event_words(row)}"
                    console.print(tables.said(what))
        if over:
            return
        time.sleep(every)


def show_events(arguments: argparse.Namespace) -> None:
    console = make_console()
    run = _open(arguments)
    rows = [row for row in reversed(reader.events(run)) if not arguments.kind or row["event"] in arguments.kind]
    if arguments.kind and not rows:
        there = sorted({row["event"] for row in reader.events(run)})
        raise ValueError(f"{run.path} has no event {' or '.join(arguments.kind)}: it has {', '.join(there) or 'none'}")
    shown = rows[: whole(arguments.limit, "--limit")]
    console.print(tables.events_table(shown, f"{len(shown)} of {len(rows)} events of {run.name}, newest first"))


def compare_them(arguments: argparse.Namespace) -> None:
    console = make_console()
    runs = [open_run(name, _root(arguments)) for name in arguments.run_names]
    spent = [hours(run, reader.metrics(run)) for run in runs]
    rows = [(summary(run), took[-1] if took else None) for run, took in zip(runs, spent, strict=True)]
    console.print(tables.compare_table(rows))
    if len(group(runs)) > 1:
        console.print(tables.verdict_view(verdict(runs)))


def diff_them(arguments: argparse.Namespace) -> None:
    console = make_console()
    a, b = (open_run(name, _root(arguments)) for name in arguments.run_names)
    console.print(tables.diff_table(a, b, differences(a, b)))


def differences(a: RunFolder, b: RunFolder) -> list[tuple[str, Any, Any]]:
    """Settings, then other facts of run.json, in which two runs differ; "(none)" where one has no such thing."""
    found = []
    for kind in ("config", "versions", "engines", "hardware", "dataset", "sizes"):
        one, other = flatten(a.record.get(kind) or {}), flatten(b.record.get(kind) or {})
        prefix = "" if kind == "config" else f"{kind}: "
        found += [
            (f"{prefix}{key}", one.get(key, "(none)"), other.get(key, "(none)"))
            for key in sorted(one.keys() | other.keys())
            if one.get(key, "(none)") != other.get(key, "(none)")
        ]
    for key in ("commit", "lr", "steps", "planned_tokens", "stream"):
        if a.record.get(key) != b.record.get(key):
            found.append((key, a.record.get(key, "(none)"), b.record.get(key, "(none)")))
    return found


def tag_it(arguments: argparse.Namespace) -> None:
    console = make_console()
    run = _open(arguments)
    for tag in (*arguments.tags, *arguments.remove):
        if not tag.strip() or "," in tag or not tag.isprintable():
            raise ValueError(f"tag {tag!r}: some printable text without commas")
    if arguments.tags or arguments.remove:
        with RunWriter(run, run.next_attempt("person"), writer="person") as writer:
            writer.event("tag", add=arguments.tags, remove=arguments.remove)
    console.print(tables.said(f"{run.path.name}: {', '.join(summary(run).tags) or 'no tags'}"))


def send_it(arguments: argparse.Namespace) -> None:
    console = make_console()
    run = _open(arguments)
    require(arguments.to)
    settings = {"mode": arguments.mode, "project": arguments.project, "entity": arguments.entity}
    rows = send(run, arguments.to, settings if arguments.to == "wandb" else {})
    console.print(tables.said(f"{rows:,} rows of {run.path.name} sent to {arguments.to}"))


def _view(run: RunFolder, events: int, now: float) -> RenderableType:
    parts: list[RenderableType] = [tables.facts_table(run, summary(run, now), now)]
    slices = tables.slices_table(run)
    if slices is not None:
        parts.append(slices)
    rows = reader.events(run)
    parts.append(tables.events_table(rows[: -events - 1 : -1], "Latest events, newest first"))
    return Group(*parts)


def _root(arguments: argparse.Namespace) -> Path:
    root = Path(arguments.runs_dir)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder (seen from {Path.cwd()}): name the folder of runs with --runs-dir")
    return root


def _open(arguments: argparse.Namespace) -> RunFolder:
    return open_run(arguments.run_name, _root(arguments))
