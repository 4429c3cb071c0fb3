"""Ranks that are processes of this machine, started as Slurm starts them: by the variables of their environment."""

import atexit
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch._inductor  # noqa: F401 (seconds that every process would spend otherwise)

from dwslm.cli.errors import one_line_errors
from dwslm.cli.launch import launch
from dwslm.cli.score import score_checkpoint
from dwslm.config import RunConfig, ScoreConfig
from dwslm.data.loader import Loader
from tests.train import tiny_run

# Forked from a clean server process that has imported everything, since importing takes longer than these runs. There is one
# such server for all tests.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([tiny_run.__name__, __name__])

SIGNALLED = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
FAULTS = ("sleep", "hold the interpreter", "raise", *SIGNALLED)
# Not those that the system gives to connections: another program's could take it before rank 0 does.
PORTS = range(20000, 32000)
_NEXT_PORT = itertools.count(os.getpid() * 101)

PATIENCE = 240.0
"""Seconds for what takes a few: a machine may have other things to do."""
STARTED: list["Ranks"] = []


def kill_all() -> None:
    """No process outlives its test: one that is stopped would hold up the end of all of them."""
    while STARTED:
        for process in STARTED.pop().processes:
            process.kill()
            process.join()


class Ranks:
    """The processes of one run. Standard output and error of rank r go into `<folder>/rank<r>.txt`."""

    def __init__(
        self,
        world: int,
        config: RunConfig | ScoreConfig,
        overrides: Sequence[str],
        folder: Path,
        fault: tuple[int, int, str] | None = None,
    ):
        """fault: (rank, after how many batches, one of FAULTS)."""
        self.folder = folder
        STARTED.append(self)
        folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self.processes: list[BaseProcess] = [
            _CONTEXT.Process(target=_rank, args=(rank, world, port, config, list(overrides), str(folder), fault))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = PATIENCE) -> list[int | None]:
        """Exit codes; None for those that had to be killed because they were still here."""
        until = time.monotonic() + seconds
        codes = []
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        return codes

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def said(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.txt").read_text()


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "what was waited for did not happen"
        time.sleep(0.01)


def _free_port() -> int:
    for number in _NEXT_PORT:
        port = PORTS[number % len(PORTS)]
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def _rank(
    rank: int,
    world: int,
    port: int,
    config: RunConfig | ScoreConfig,
    overrides: list[str],
    folder: str,
    fault: tuple[int, int, str] | None,
) -> None:
    # Not inherited: the next run's ranks must not be taken for children of this one's.
    sys.stdout = sys.stderr = open(Path(folder) / f"rank{rank}.txt", "w", buffering=1)  # noqa: SIM115
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # it looks for the machine's name in the network otherwise, which may take seconds
    }
    if fault is not None and fault[0] == rank:
        _break(*fault[1:])
    with _exit_functions(), one_line_errors():
        if isinstance(config, ScoreConfig):
            score_checkpoint(config, overrides)
        else:
            launch(config, overrides)


@contextlib.contextmanager
def _exit_functions() -> Iterator[None]:
    """What an interpreter does at its end and a process of multiprocessing does not."""
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def _break(batches: int, how: str) -> None:
    """Lets this process fail when it asks for one batch more."""
    real, served = Loader.__next__, 0

    def broken(self: Loader):
        nonlocal served
        if served == batches:
            if how == "sleep":
                time.sleep(3600)
            elif how in SIGNALLED:
                os.kill(os.getpid(), SIGNALLED[how])
            elif how == "raise":
                raise ValueError("this rank has had enough")
            else:
                ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter's lock
        served += 1
        return real(self)

    Loader.__next__ = broken  # type: ignore[method-assign]
