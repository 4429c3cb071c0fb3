"""Several processes that train one run, as torchrun or Slurm start them: who this one is, and what only the first does."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from dwslm.cli.errors import make_console
from dwslm.config import RunConfig
from dwslm.runs.folder import RunFolder
from dwslm.runs.track import Trackers
from dwslm.runs.writer import RunWriter
from dwslm.train.distributed import Ranks, RankSettings, join
from dwslm.train.rank_watch import RankLost, Verdict
from dwslm.train.signals import Preempted

# Entries of NCCL's flight recorder, and what it does with a collective that failed: end the process without cleaning up,
# which could hang.
NCCL = {"TORCH_FR_BUFFER_SIZE": "20000", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}


@contextmanager
def meet() -> Iterator[Ranks]:
    """The ranks that the launcher has started, this process alone without one; they part at the end, however it comes.

    An error here ends the others as well. One that comes of theirs is raised as RankLost.

    Raises:
        ValueError: where the launcher's environment names a rank that can't be.
    """
    rank, world, local = (
        _number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world} in the environment: ranks go from 0 to WORLD_SIZE - 1")
    if world > 1:
        for name, value in NCCL.items():
            os.environ.setdefault(name, value)
    ranks = join(rank, world, local, gpus=torch.cuda.is_available(), silence=RankSettings().silence_seconds)
    try:
        yield ranks
    except BaseException as raised:
        error = ranks.why(raised)
        ranks.failed(error)
        # Once the error is printed: the first rank stays a moment, for the others, and a launcher may not let it.
        atexit.register(ranks.close, orderly=ranks.agreed and isinstance(error, Preempted))
        if isinstance(error, RankLost) and not ranks.speaks_of(error):
            raise SystemExit(1) from raised
        if error is raised:
            raise
        raise error from raised
    ranks.close(orderly=True)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    with suppress(ValueError):
        return int(text or default)
    raise ValueError(f"{name}={text!r} in the environment is no number: start with torchrun, or without it")


def rank_console(ranks: Ranks) -> Console:
    """Standard output for rank 0, nothing for the others."""
    return make_console() if ranks.leads else Console(quiet=True)


@contextmanager
def holding(run: RunFolder, ranks: Ranks) -> Iterator[None]:
    """The run's lock, which rank 0 holds for all."""
    with run.lock() if ranks.leads else nullcontext():
        yield


@contextmanager
def writing(config: RunConfig, run: RunFolder, ranks: Ranks, console: Console) -> Iterator[RunWriter]:
    """The writer of this attempt: rank 0's, with trackers beside it; that of the others keeps silent."""
    attempt = int(ranks.tell(lambda: str(run.next_attempt())))
    ranks.set_silence(config.ranks.silence_seconds)
    if not ranks.leads:
        ranks.guard(run.path, str(attempt), lambda verdict: _tell_lost(ranks, verdict))
        yield QuietWriter(attempt)
        return
    with RunWriter(run, attempt) as writer, Trackers(config.track, run, attempt, console.print):

        def lost(verdict: Verdict) -> None:
            error = RankLost(verdict)
            _tell_lost(ranks, verdict)
            writer.event("failed", error=type(error).__name__, reason=str(error)[:500])

        ranks.guard(run.path, str(attempt), lost)
        yield writer


class QuietWriter(RunWriter):
    """The writer of every rank but the first: rows go nowhere."""

    def __init__(self, attempt: int):
        self.attempt = attempt

    def metrics(self, row: dict[str, Any]) -> None: ...

    def event(self, kind: str, /, **fields: Any) -> None: ...

    def evals(self, row: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def next_attempt(self, attempt: int) -> None: ...

    def close(self) -> None: ...


def _tell_lost(ranks: Ranks, verdict: Verdict) -> None:
    if ranks.speaks_of(RankLost(verdict)):
        Console(stderr=True).print(Text(f"error: {verdict}"), soft_wrap=True)
