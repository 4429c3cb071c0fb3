"""`dwslm demo`: the whole product in minutes on a laptop: prepare, train, be killed, resume, score."""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.cli.page import PORT
from dwslm.cli.prepare import prepare_sample
from dwslm.data.prepare_settings import DEMO_DATA
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import metrics

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 4096  # the main model's 32,768 would spend most of a CPU's minutes in the output head
KILL_AT = 0.4  # of the run's steps


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="prepare the sample, train a small hybrid, kill and resume it, score it",
        description="Extra arguments are overrides of experiment=demo, for instance model.local=gdn.",
    )
    parser.add_argument("overrides", nargs="*", metavar="name=value")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    console = make_console()
    started = time.monotonic()

    def heading(text: str) -> None:
        console.print(Text(f"\n[{time.monotonic() - started:.0f} s] {text}", style="bold"))

    heading("1. Prepare: the sample text becomes a tokenizer and shards")
    prepare_sample(console, out=DEMO_DATA, vocab_size=VOCAB_SIZE)
    heading("2. Train a small hybrid (Kimi Delta Attention and global layers, MuonH)")
    name = train_and_kill(["experiment=demo", *arguments.overrides], console)
    heading("3. Resume it from its last checkpoint")
    check(["train.py", f"resume={name}"])
    heading("4. Score it on held-out text")
    check(["eval.py", f"checkpoint={name}", "baselines=true"])
    heading("done")
    console.print(Text("\n".join(how_to_look(name, Path.cwd()))))


def how_to_look(name: str, here: Path) -> list[str]:
    """The page of the run, live and as files; `here` is the folder that the reader is in."""
    dwslm = Path(sys.executable).with_name("dwslm")
    command = dwslm.relative_to(here) if dwslm.is_relative_to(here) else dwslm
    runs = "" if here == REPOSITORY else f" --runs {REPOSITORY / 'runs'}"
    return [
        f"See it:     {command} page serve{runs}",
        f"then open   http://127.0.0.1:{PORT}/#run={name}",
        f"As files:   {command} page export{runs} --out page",
    ]


def check(command: list[str]) -> None:
    """Runs one of the entry points to its end.

    Raises:
        ValueError: where it failed; it has said why.
    """
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with code {done.returncode}; see above")


def train_and_kill(overrides: list[str], console: Console) -> str:
    """Starts training and kills it as a power cut would, once it has saved and is past `KILL_AT` of its steps.

    Returns:
        The name of the run's folder.

    Raises:
        ValueError: where training ends by itself before that.
    """
    before = time.time()
    process = subprocess.Popen([sys.executable, "train.py", *overrides], cwd=REPOSITORY)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            run = run_since(before)
            if run is not None and (step := killable_step(run)):
                process.kill()  # SIGKILL: it cannot be caught, nothing is cleaned up
                console.print(Text(f"\nkill -9 after its report of step {step:,}", style="bold red"))
                return run.path.name
    finally:
        process.kill()
        process.wait()
    raise ValueError(f"train.py ended with code {process.returncode} before it could be killed; see above")


def run_since(since: float) -> RunFolder | None:
    """The newest run, if it began after `since`."""
    try:
        run = open_run("latest", REPOSITORY / "runs")
    except ValueError:
        return None
    return run if run.record["created"] >= since else None


def killable_step(run: RunFolder) -> int | None:
    """The step that the run has reported, if it has a checkpoint and is far enough."""
    rows = metrics(run)
    saved = any(run.checkpoints.glob("step-*/manifest.json"))
    return rows[-1]["step"] if rows and saved and rows[-1]["step"] >= KILL_AT * run.record["steps"] else None
