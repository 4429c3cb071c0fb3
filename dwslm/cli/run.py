"""`dwslm run -- ...`: a training run under a supervisor that leases the GPU, watches health and deadlines, and tries again."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dwslm.cli.child import ANNOUNCE, cache_folders, cache_key, cache_root
from dwslm.cli.find import REPOSITORY
from dwslm.machine import compiler_cache
from dwslm.machine.health import Gpu, list_gpus
from dwslm.machine.lease import Lease, take
from dwslm.machine.notify import FIELDS, parse
from dwslm.machine.supervisor import Job, Supervisor, SupervisorSettings
from dwslm.machine.watch import Deadlines
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import events
from dwslm.runs.writer import RunWriter

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCRIPT = "train.py"
DEADLINES = {
    "start_minutes": ("start", 60.0, "until the first row of metrics, and after a change of context"),
    "step_seconds": ("step", 1.0, "between two rows, at least; ten times the usual where that is longer"),
    "save_minutes": ("save", 60.0, "for a save, at least; three times the last where that is longer"),
    "evaluation_minutes": ("evaluation", 60.0, "for a scoring, at least; three times the last where that is longer"),
}
"""Flag -> the deadline that it sets, its unit in seconds, and what it says."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="train under a supervisor: GPU lease, health, deadlines, retries",
        description="After -- come the words that would follow `python train.py`, or a whole command that holds train.py, "
        "such as torchrun --nproc-per-node=2 train.py experiment=main. See docs/operations.md.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="after --")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to lease; default: 1, or torchrun's processes")
    parser.add_argument("--retries", type=int, default=SupervisorSettings.retries, metavar="N",
                        help="tries in all after the first; default %(default)s")  # fmt: skip
    parser.add_argument("--clock-cap", type=int, metavar="MHZ", help="the cap that the GPUs' clocks should have")
    parser.add_argument("--notify-command", metavar="COMMAND",
                        help="run on failure, stall and end, with the event as JSON on its standard input; "
                        f"{', '.join(f'{{{name}}}' for name in FIELDS)} may stand in it")  # fmt: skip
    add_deadlines(parser)
    parser.set_defaults(run=run)


def add_deadlines(parser: argparse.ArgumentParser) -> None:
    """Options for how long a run may be silent."""
    for flag, (name, unit, meaning) in DEADLINES.items():
        default = getattr(Deadlines, name) / unit
        parser.add_argument(
            option(flag), type=float, default=default, metavar="T", help=f"{meaning}; default {default:g}"
        )


def option(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def given_deadlines(arguments: argparse.Namespace) -> Deadlines:
    """Raises ValueError for a deadline that is none."""
    return Deadlines(**{name: getattr(arguments, flag) * unit for flag, (name, unit, _) in DEADLINES.items()})


def run(arguments: argparse.Namespace) -> None:
    settings = SupervisorSettings(
        deadlines=given_deadlines(arguments),
        retries=arguments.retries,
        notify=parse(arguments.notify_command) if arguments.notify_command is not None else [],
        clock_cap_mhz=arguments.clock_cap,
    )
    launcher, overrides = split(arguments.words)
    known = resumed(overrides)
    if known is not None:
        overrides = [f"resume={known.path}" if word.startswith("resume=") else word for word in overrides]
    environment = dict(os.environ)
    gpus, leases = lease_gpus(arguments.gpus, launcher, overrides)
    if gpus:
        environment[VISIBLE] = ",".join(gpus)
    root = cache_root() / cache_key()
    folders = list(cache_folders(root, os.environ).values())
    job = Job(
        command=[*launcher, *overrides],
        resume=resume_command(launcher, overrides),
        environment=environment,
        announce=ANNOUNCE,
        open_log=open_log,
        run=known.path if known else None,
        history=[row for row in events(known) if row["writer"] == "supervisor"] if known else [],
        heal_caches=lambda: len(compiler_cache.move_all(folders)),
        sync_caches=lambda: sync(folders),
    )
    try:
        code = Supervisor(job, settings, gpus=gpus, leases=leases, say=say).run()
    finally:
        for lease in leases:
            lease.release()
    if code:
        sys.exit(code)


def say(text: str) -> None:
    print(f"supervisor: {text}", file=sys.stderr, flush=True)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command up to train.py, and what follows it.

    Raises:
        ValueError: for a command without train.py.
    """
    for place, word in enumerate(words):
        if Path(word).name == SCRIPT:
            return list(words[: place + 1]), list(words[place + 1 :])
    if words and "=" not in words[0] and not words[0].startswith(("-", "+", "~")):
        raise ValueError(
            f"{words[0]!r} is no setting, and no {SCRIPT} follows it: give `name=value` words, or a whole command with {SCRIPT}"
        )
    return [sys.executable, str(REPOSITORY / SCRIPT)], list(words)


def resumed(overrides: Sequence[str]) -> RunFolder | None:
    """The run that a command line goes on with, None for a new one.

    Raises:
        ValueError: where there is no such run.
    """
    given = dict(word.split("=", 1) for word in overrides if "=" in word)
    which = given.get("resume")
    return open_run(which, given.get("runs_dir", "runs")) if which not in (None, "null") else None


def resume_command(launcher: list[str], overrides: list[str]) -> Callable[[Path], list[str]]:
    """The command that goes on with a run. What a resume was given it is given again; a new run's settings lie in the run."""

    def again(folder: Path) -> list[str]:
        if any(word.startswith("resume=") for word in overrides):
            return [*launcher, *overrides]
        return [*launcher, f"resume={folder}"]

    return again


def open_log(folder: Path) -> RunWriter:
    found = open_run(folder, folder.parent)
    return RunWriter(folder, found.next_attempt("supervisor"), writer="supervisor")


def sync(folders: Sequence[Path]) -> None:
    for folder in folders:
        compiler_cache.sync_filesystem(folder)


def lease_gpus(wanted: int | None, launcher: list[str], overrides: list[str]) -> tuple[dict[str, Gpu], list[Lease]]:
    """GPUs by UUID with a lease each: the first free ones of those that are visible. None where there is none or none is wanted.

    Raises:
        ValueError: where too few are there or free.
    """
    if "train.device=cpu" in overrides:
        return {}, []
    there = visible(list_gpus(), os.environ.get(VISIBLE))
    if not there:
        if wanted:
            raise ValueError(f"--gpus {wanted}: no GPU is visible here")
        return {}, []
    count = wanted if wanted is not None else processes(launcher)
    if count > len(there):
        raise ValueError(f"{count} GPUs wanted, {len(there)} are visible here")
    leases = take(there, count, what=shlex.join(["dwslm", *sys.argv[1:]]))
    gpus = {lease.gpu: there[lease.gpu] for lease in leases}
    for gpu in gpus.values():
        gpu.watch_xid()
    return gpus, leases


def visible(gpus: Sequence[Gpu], chosen: str | None) -> dict[str, Gpu]:
    """GPUs by UUID in the order of CUDA_VISIBLE_DEVICES, all of them where it is not set."""
    named = {str(gpu.name()[1]): gpu for gpu in gpus}
    if chosen is None:
        return named
    found = {}
    for word in chosen.split(","):
        word = word.strip()
        uuids = [uuid for uuid in named if word and uuid.startswith(word)]
        if word.isdigit() and int(word) < len(named):
            uuids = [list(named)[int(word)]]
        if len(uuids) != 1:
            break  # as CUDA does: the first that does not fit ends the list
        found[uuids[0]] = named[uuids[0]]
    return found


def processes(launcher: Sequence[str]) -> int:
    """How many processes torchrun starts here; 1 without it."""
    for place, word in enumerate(launcher):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == "--nproc-per-node":
            value = value or (launcher[place + 1] if place + 1 < len(launcher) else "")
            if not value.isdigit():
                raise ValueError(f"{word}: say how many GPUs to lease with --gpus N")
            return int(value)
    return 1
