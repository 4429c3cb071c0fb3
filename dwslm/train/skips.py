"""Steps that the guard left out, as the host knows them: heard of late, told as events, and counted."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from dwslm.data.loader import GlobalBatch
from dwslm.runs.writer import RunWriter
from dwslm.train.guard import UNREAD, Guard, Verdict


@dataclass(frozen=True)
class Unheard:
    """A step whose verdict the host has not read, and the data that it read."""

    step: int
    tokens: int
    first_row: int
    next_row: int
    docs: NDArray[np.int64]


@dataclass(frozen=True)
class Skip:
    """A step that was left out, and the rows it read."""

    step: int
    first_row: int
    next_row: int


class Skips:
    """What was left out within the last `guard.stretch` steps, and how often the run went back; saved with the run."""

    def __init__(self, guard: Guard, writer: RunWriter, console: Console):
        self.guard, self.writer, self.console = guard, writer, console
        self.recent: deque[Skip] = deque()
        self.rollbacks = 0
        self._unheard: list[Unheard] = []

    def note(self, step: int, tokens: int, batch: GlobalBatch) -> None:
        """A step was queued; what becomes of it is not known yet."""
        self._unheard.append(Unheard(step, tokens, batch.first_row, batch.next_row, batch.docs))

    @property
    def must_hear(self) -> bool:
        """Whether the guard can hold no more verdicts."""
        return len(self._unheard) == UNREAD

    def hear(self) -> Verdict:
        """Reads what was decided of the steps noted, with an event for each that was left out.

        Waits for the device. Returns the verdict of the last step.
        """
        verdicts = self.guard.read(len(self._unheard))
        for verdict, at in zip(verdicts, self._unheard, strict=True):
            if verdict.taken:
                continue
            self.recent.append(Skip(at.step, at.first_row, at.next_row))
            self.writer.event(
                "skip",
                step=at.step,
                tokens=at.tokens,
                reason=verdict.reason,
                loss=verdict.loss,
                grad_norm=verdict.norm,
                loss_limit=verdict.loss_limit,
                norm_limit=verdict.norm_limit,
                rows=[at.first_row, at.next_row],
                documents=at.docs.tolist(),
            )
            self.console.print(f"step {at.step:,}: left out, {verdict.reason}", highlight=False)
            self._forget(at.step)
        self._unheard.clear()
        return verdicts[-1]

    def _forget(self, step: int) -> None:
        """Drops what was left out longer ago than `guard.stretch` steps before this one."""
        while self.recent and self.recent[0].step <= step - self.guard.settings.stretch:
            self.recent.popleft()

    @property
    def too_many(self) -> bool:
        return len(self.recent) > self.guard.settings.max_skips

    @property
    def told(self) -> str:
        """What there are too many of, in words."""
        return f"{len(self.recent)} steps were left out from step {self.recent[0].step} to {self.recent[-1].step}"

    def state(self) -> dict[str, Any]:
        """The guard's window and the counts here, for a checkpoint. Call it when all steps have been heard of."""
        assert not self._unheard
        recent = [[skip.step, skip.first_row, skip.next_row] for skip in self.recent]
        return {**self.guard.state(), "recent": recent, "rollbacks": self.rollbacks}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state. One from before there was a guard has none, and the window starts empty."""
        if "guard" in state:
            self.guard.load(state["guard"])
            self.recent = deque(Skip(*skip) for skip in state["guard"]["recent"])
            self.rollbacks = state["guard"]["rollbacks"]
            self._forget(state["step"])  # it was kept to other settings, which may have let more be left out
