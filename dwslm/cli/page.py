"""`dwslm page export` and `dwslm page serve`: every run, the results and decisions, and one run up close."""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.page.export import export
from dwslm.page.server import LOOPBACK, PageServer, is_loopback
from dwslm.page.site import Site

RUNS, DECISIONS, QUEUE, PORT = "runs", "results/decisions.toml", "queue", 8250


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("page", help="the page of all runs: as files, or live for this machine's browser")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    write = verbs.add_parser(
        "export",
        help="write the page as a folder of files, readable without JavaScript",
        description="Makes what has changed since the last export into the same folder. Fails where a decision prints a "
        "figure that is not its run's. See docs/page.md.",
    )
    write.add_argument("--out", default="page", metavar="DIR", help="folder to write; default %(default)s")
    write.set_defaults(run=run_export)
    serve = verbs.add_parser(
        "serve",
        help="show the page live at an address of this machine",
        description="Answers on the loopback address alone unless told otherwise; there is no password. From another machine: "
        f"ssh -L {PORT}:localhost:{PORT} HOST, then open http://localhost:{PORT}/ there. See docs/page.md.",
    )
    serve.add_argument("--port", type=int, default=PORT, metavar="N", help="default %(default)s; 0 takes a free one")
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to answer on; default %(default)s"
    )
    serve.add_argument("--allow-remote", action="store_true",
                       help="needed for an address that other machines reach; whoever reaches it sees all runs")  # fmt: skip
    serve.add_argument("--name", action="append", default=[], metavar="NAME",
                       help="a host name under which browsers will ask for it (again for more)")  # fmt: skip
    serve.set_defaults(run=run_serve)
    for verb in (write, serve):
        verb.add_argument(
            "--runs", "--runs-dir", default=RUNS, metavar="DIR", help="folder of runs; default %(default)s"
        )
        verb.add_argument(
            "--decisions", metavar="FILE", help=f"results and decisions; default {DECISIONS}, if it is there"
        )
        verb.add_argument("--queue", metavar="DIR", help=f"folder of the queue; default {QUEUE}, if it is there")


def decisions_file(arguments: argparse.Namespace) -> str | None:
    if arguments.decisions is not None:
        return str(arguments.decisions)
    return DECISIONS if Path(DECISIONS).is_file() else None


def queue_folder(arguments: argparse.Namespace) -> str | None:
    if arguments.queue is not None:
        return str(arguments.queue)
    return QUEUE if Path(QUEUE, "log").is_dir() else None


def run_export(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    done = export(
        arguments.runs, arguments.out, decisions_file(arguments), now=time.time(), queue=queue_folder(arguments)
    )
    seconds = time.monotonic() - started
    text = f"{done.index}: {done.runs} run{'s' * (done.runs != 1)}, {done.made} of them drawn anew, {seconds:.1f} s"
    make_console().print(Text(text), highlight=False)


def run_serve(arguments: argparse.Namespace) -> None:
    """Answers until it is interrupted.

    Raises:
        ValueError: for an address that other machines reach, unless it was allowed; for a folder of runs that is not there.
        OSError: where the port is taken.
    """
    if not is_loopback(arguments.host) and not arguments.allow_remote:
        raise ValueError(
            f"--host {arguments.host} is reached by other machines, and there is no password: "
            "add --allow-remote if that is meant, or tunnel to the default with ssh -L"
        )
    if not Path(arguments.runs).is_dir():
        raise ValueError(f"no folder of runs at {arguments.runs}; give it with --runs DIR")
    site = Site(arguments.runs, decisions_file(arguments), queue_folder(arguments))
    names = LOOPBACK | frozenset(name.lower() for name in arguments.name)
    console = make_console()
    try:
        server = PageServer(site, arguments.host, arguments.port, names=names)
    except (OSError, OverflowError) as error:
        told = f"cannot answer on {arguments.host} port {arguments.port}: {getattr(error, 'strerror', None) or error}"
        raise ValueError(f"{told}; give another with --port N (0 takes a free one)") from error
    with server:
        site.index(server.overview())  # read once, so that the first who asks does not wait for it
        console.print(Text(f"Runs of {arguments.runs} at {server.url} (Ctrl-C ends it)"), highlight=False)
        server.serve_forever()
