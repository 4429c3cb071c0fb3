"""Trackers beside a run: a process for each, that the run never waits for."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dwslm.runs.folder import RunFolder
from dwslm.runs.follow import END
from dwslm.runs.sinks import WANDB_MODES, require

LEAVE_S = 5.0
"""What trackers get where the run leaves early: a signal may be followed by a kill."""

MOST_FINISH_S = 1e9  # which a clock can wait for


@dataclass
class TrackSettings:
    """Trackers that are sent what a run writes. Each reads its files in a process of its own; training never waits for them."""

    wandb: str = "off"
    """Weights & Biases: "offline" writes into the run's folder, "online" sends, "off"."""
    project: str = "dwslm"
    """Its project."""
    entity: str | None = None
    """Its user or team; null for your own."""
    tensorboard: bool = False
    """TensorBoard's files in the run's folder."""
    finish_seconds: float = 30.0
    """How long a tracker may take for the rest when training is done; then it is killed, and the run has lost nothing."""

    def __post_init__(self) -> None:
        if self.wandb not in ("off", *WANDB_MODES):
            raise ValueError(f'track.wandb="{self.wandb}" must be off, offline or online')
        if not self.project:
            raise ValueError("track.project is empty")
        if not 0 <= self.finish_seconds <= MOST_FINISH_S:
            raise ValueError(f"track.finish_seconds={self.finish_seconds} must be from 0 to {MOST_FINISH_S:g}")

    def sinks(self) -> dict[str, dict[str, Any]]:
        """Those that are on, by name, with what each is told.

        Raises:
            ValueError: where the package of one is not installed.
        """
        found: dict[str, dict[str, Any]] = {}
        if self.wandb != "off":
            found["wandb"] = {"mode": self.wandb, "project": self.project, "entity": self.entity}
        if self.tensorboard:
            found["tensorboard"] = {}
        for name in found:
            require(name)
        return found


class Trackers:
    """The processes, while a run trains; a context manager. What becomes of them is said at the end and changes nothing."""

    def __init__(self, settings: TrackSettings, run: RunFolder, attempt: int, say: Callable[[str], None]):
        """
        Args:
            attempt: the first one whose rows are sent.
            say: is given a line for each tracker that did not end well.
        """
        self.settings, self.run, self.attempt, self.say = settings, run, attempt, say
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parents[2]  # a checkout that is not installed works, too
        code = f"import sys; sys.path.append({str(root)!r}); from dwslm.runs.follow import main; main()"
        for name, settings in self.settings.sinks().items():
            job = {"run": str(self.run.path.resolve()), "sink": name, "settings": settings, "attempt": self.attempt}
            with open(self._log(name), "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run, whose end it then hears of
                )
            self.processes[name] = process
            self._tell(name, json.dumps(job).encode() + b"\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = self.settings.finish_seconds if kind is None else min(LEAVE_S, self.settings.finish_seconds)
        deadline = time.monotonic() + seconds
        for name in self.processes:
            self._tell(name, END)
        for name, process in self.processes.items():
            told = ""
            try:
                if code := process.wait(max(0.0, deadline - time.monotonic())):
                    told = f"ended with code {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait()
                told = f"was not done {seconds:g} s after the run and was ended"
            if told:
                self.say(
                    f"{name} {told}, see {self._log(name)}. The run has lost nothing by it; "
                    f"send it again with: dwslm runs send {self.run.path.name} --to {name}"
                )

    def _tell(self, name: str, words: bytes) -> None:
        stdin = self.processes[name].stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it is dead already; its exit code tells
            stdin.write(words)
            stdin.flush()

    def _log(self, name: str) -> Path:
        return self.run.path / f"track-{name}.log"
