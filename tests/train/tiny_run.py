"""A run of seconds that has every part of a real one, and a child process to run it in."""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dwslm.cli.launch import launch
from dwslm.config import DataSettings, RunConfig
from dwslm.data.mixture import MixtureSettings, Phase
from dwslm.data.packing import PackingSettings
from dwslm.evaluate.bits_per_byte import EvalSettings
from dwslm.optim.settings import OptimSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.settings import TrainSettings
from tests.model.small import SMALL

STEPS = 24


def tiny_config(data: Path, runs: Path, **train) -> RunConfig:
    """24 steps of 256 tokens in two micro-batches; saves every 4 steps, scores every 8, changes its mixture at 75 %."""
    return RunConfig(
        name="tiny",
        runs_dir=str(runs),
        data=DataSettings(
            path=str(data),
            packing=PackingSettings(context=64, segments_per_row=8, window_tokens=1024),
            mixture=MixtureSettings(phases=[Phase(start=0.75, scale={"books": 3.0})]),
        ),
        model=SMALL,
        optim=OptimSettings(lr=0.02, warmup=0.1),
        train=TrainSettings(
            **{
                "tokens": STEPS * 256,
                "batch_tokens": 256,
                "micro_batch_tokens": 128,
                "log_every": 1,
                "eval_every_tokens": 8 * 256,
                "device": "cpu",
                "threads": 1,
                **train,
            }
        ),
        checkpoint=CheckpointSettings(every_tokens=4 * 256, keep_last=2),
        evaluate=EvalSettings(micro_batch_tokens=512, segments_per_row=8, bootstrap_samples=10),
    )


# Children are forked from a clean server process: this one may have threads by now, with which a fork can hang.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def in_child(
    config: RunConfig, overrides: list[str], kill_when: Callable[[float], bool], file_bytes: int | None = None
) -> int | None:
    """Launches in a child process; kills it with SIGKILL once `kill_when(seconds since the start)` holds.

    `file_bytes` limits the size of any file it writes. Returns its exit code, None if it was killed.
    """
    process = _CONTEXT.Process(target=_launch, args=(config, overrides, file_bytes))
    process.start()
    started = time.monotonic()
    while process.exitcode is None:
        if kill_when(time.monotonic() - started):
            process.kill()
            process.join()
            return None
        time.sleep(0.002)
    return process.exitcode


def _launch(config: RunConfig, overrides: list[str], file_bytes: int | None) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the process ends with it)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    launch(config, overrides)
