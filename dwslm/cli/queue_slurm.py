"""Workers of the queue as Slurm jobs, through submitit. Slurm gives the GPUs; the queue alone knows the jobs."""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dwslm.cli.find import REPOSITORY
from dwslm.cli.run import DEADLINES, given_deadlines, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="Slurm jobs to submit; default %(default)s")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of each; default %(default)s")
    parser.add_argument("--cpus", type=int, default=8, metavar="N", help="CPU cores of each; default %(default)s")
    parser.add_argument(
        "--minutes", type=int, default=1440, metavar="T", help="time limit of each; default %(default)s"
    )
    parser.add_argument("--warn-seconds", type=int, default=300, metavar="T",
                        help="a worker is told so long before its limit, to save; default %(default)s")  # fmt: skip
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="any other option of sbatch, without dashes; repeatable")  # fmt: skip
    parser.add_argument("--local", action="store_true", help="processes of this machine instead of Slurm, to try it")


class WorkerJob:
    """A worker, in the form that submitit runs, warns and submits again.

    Slurm's warning becomes the worker's SIGTERM: its run saves, its job goes back into the queue, and the same Slurm job is
    requeued to go on.
    """

    def __init__(self, command: list[str]):
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        self.process = subprocess.Popen(self.command)
        while (code := self.process.poll()) is None:
            time.sleep(0.5)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit inside a signal handler, where `process.wait` could wait for itself."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return submitit().helpers.DelayedSubmission(WorkerJob(self.command))


def submit(arguments: argparse.Namespace, folder: Path) -> list[Any]:
    """Submits the workers. Returns submitit's jobs.

    Raises:
        ValueError: where submitit is not installed, an option has no value, or a deadline is none.
    """
    given_deadlines(arguments)
    options = dict(option.partition("=")[::2] for option in arguments.option)
    if any(not value for value in options.values()):
        raise ValueError(f"--option {next(name for name, value in options.items() if not value)}: give NAME=VALUE")
    executor = submitit().AutoExecutor(folder=folder / "slurm", cluster="local" if arguments.local else "slurm")
    executor.update_parameters(
        name="dwslm-queue",
        timeout_min=arguments.minutes,
        gpus_per_node=arguments.gpus,
        cpus_per_task=arguments.cpus,
        nodes=1,
        tasks_per_node=1,
        slurm_signal_delay_s=arguments.warn_seconds,
        slurm_additional_parameters=options,
        **({"slurm_partition": arguments.partition} if arguments.partition else {}),
    )
    code = "import sys; from dwslm.cli import main; sys.argv[0] = 'dwslm'; main()"
    start = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {code}"]
    deadlines = [word for flag in DEADLINES for word in (option(flag), str(getattr(arguments, flag)))]
    command = [*start, "queue", "work", "--queue", str(folder), "--until-empty", *deadlines]
    return [executor.submit(WorkerJob(command)) for _ in range(arguments.workers)]


def submitit() -> Any:
    """The package.

    Raises:
        ValueError: how to get it.
    """
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise ValueError("workers on Slurm need submitit: pip install 'dwslm[submitit]'") from None
