"""Saving while training goes on: a copy of the state is taken at once, and a thread writes it."""

import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor

from dwslm.optim.optimizer import Optimizer
from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.writer import RunWriter
from dwslm.train import checkpoint as checkpoints
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.distributed import Ranks
from dwslm.train.shared_save import SharedSave
from dwslm.train.stored import step_name

Copied = tuple[torch.cuda.Event, torch.cuda.Event]
Arguments = tuple[int, int, dict[str, Any], str | None, Copied | None, float]

# Leaving may begin just after a save has: that one ends first, then the step is saved.
SAVES_TO_LEAVE = 2


class Saver:
    """Writes one checkpoint at a time, in the order that `checkpoint.save` keeps; then the event, then retention.

    A save that the disk refuses leaves training and the older checkpoints as they are, with an event. After
    `checkpoint.max_failures` of them in a row, or for any other error, the next call here raises it. A pinned
    checkpoint cannot be made later, so that one is tried again before its copy is overwritten. A checkpoint that is on disk
    counts as saved, whatever becomes of those that were to go for it.

    Among several ranks all save at once, each its share of the optimizer's state, and a save succeeds or fails for all.
    Rank 0 keeps the weights, and order in the folder.
    """

    def __init__(
        self,
        run: RunFolder,
        writer: RunWriter,
        console: Console,
        optimizer: Optimizer,
        settings: CheckpointSettings,
        ranks: Ranks | None = None,
    ):
        self.ranks = ranks or Ranks()
        self.run, self.writer, self.console = run, writer, console
        self.optimizer, self.settings = optimizer, settings
        # Filled again for each save: making them costs more than filling them, above all pinned ones.
        pin = optimizer.device.type == "cuda"
        kept = optimizer.params if self.ranks.leads else {}
        self._model = {name: _host(p.shape, torch.float32, pin) for name, p in kept.items()}
        self._state = {name: _host(t.shape, t.dtype, pin) for name, t in optimizer.state().items()}
        self._thread: threading.Thread | None = None
        self._failed: deque[OSError] = deque()  # in a row
        self._error: BaseException | None = None
        self._owed: Arguments | None = None
        self._saves = 0
        self.saved_step: int | None = None
        """Of the last checkpoint, once it is safe on disk."""
        self._noted_grace = False

    def __enter__(self) -> Self:
        saves = [event for event in reader.events(self.run) if event["event"] == "checkpoint"]
        if saves:
            self._note_grace(saves[-1]["seconds"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:  # what is under way comes to its end, whatever happened here
            self._thread.join()

    def save(self, step: int, tokens: int, state: dict[str, Any], pin: str | None) -> None:
        """Takes a copy of weights and optimizer state as of now; returns while it is being written.

        Waits for the save before. Raises its error as `check` does.
        """
        started = time.perf_counter()
        self.wait()
        if self._owed is not None:
            self._write(*self._owed, self._shared())
            if self._owed is not None:
                raise self._failed[-1]
        self.saved_step = None
        copied = self._copy()
        blocked = time.perf_counter() - started
        arguments = step, tokens, state, pin, copied, blocked, self._shared()
        self._thread = threading.Thread(target=self._write, args=arguments, name="saver")
        self._thread.start()

    def wait(self) -> None:
        """Returns once nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises OSError where saving has failed too often, or any other error of the thread."""
        if self._error is not None:
            raise self._error
        if len(self._failed) >= self.settings.max_failures:
            last = self._failed[-1]
            told = OSError(f"{last}; {len(self._failed)} saves failed in a row")
            told.errno = last.errno
            raise told from last

    @property
    def failure(self) -> OSError | None:
        """Why the last save failed; None where it did not."""
        return self._failed[-1] if self._failed else None

    def _shared(self) -> SharedSave:
        self._saves += 1
        return SharedSave(self.ranks, self._saves)

    def _copy(self) -> Copied | None:
        """Fills the buffers. On a GPU the copies are queued between two events; what is queued later comes after them."""
        if self.optimizer.device.type != "cuda":
            self.optimizer.copy_to(self._model, self._state)
            return None
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.optimizer.device)
        begun.record(stream)
        self.optimizer.copy_to(self._model, self._state)
        done.record(stream)
        return begun, done

    def _write(
        self,
        step: int,
        tokens: int,
        state: dict[str, Any],
        pin: str | None,
        copied: Copied | None,
        blocked: float,
        shared: SharedSave,
    ) -> None:
        """The thread: from the copy to the end of retention. No error leaves it."""
        self._owed = None
        try:
            if copied is not None:
                begun, done = copied
                done.synchronize()
                # The device did nothing else meanwhile, though the host went on.
                blocked = max(blocked, begun.elapsed_time(done) / 1000)
            started = time.perf_counter()
            self.writer.flush()  # a checkpoint does not outlive the rows of its steps
            root, pins = self.run.checkpoints, [pin] if pin else []
            if self.ranks.leads:
                checkpoints.save(root, step, self._model, self._state, state, pins=pins, shared=shared)
            else:
                checkpoints.save_share(root, step, self._state, shared)
            written = time.perf_counter() - started
            self.writer.event(
                "checkpoint",
                step=step,
                tokens=tokens,
                path=step_name(step),
                seconds=blocked + written,
                blocked_seconds=blocked,
                write_seconds=written,
                pinned=pin,
            )
            shared.committed()
        except OSError as error:
            shared.failed(error)
            self._failed.append(error)
            if pin is not None:
                self._owed = step, tokens, state, pin, copied, blocked
            self._tell(step, tokens, error)
            return
        except BaseException as error:  # whatever it is, it belongs to the loop
            shared.failed(error)
            self._error = error
            return
        # For all ranks alike: whatever fails from here on, the checkpoint is there.
        self.saved_step = step
        self._failed.clear()
        try:
            self.retain()
            self._note_grace(blocked + time.perf_counter() - started)
        except OSError:
            pass  # of a row, which is kept and tried again: the next save begins with it, and fails where it must
        except BaseException as error:
            self._error = error

    def retain(self) -> None:
        """Deletes what need not be kept, with an event for each. Not while something is being written elsewhere.

        What the disk does not let go stays, with an event, until the next time: the newest checkpoint is none the worse.
        """
        if not self.ranks.leads:
            return
        try:
            for path in checkpoints.retain(self.run.checkpoints, self.settings.keep_last):
                self.writer.event("checkpoint_deleted", path=path.name)
        except OSError as error:
            self.writer.event("retention_failed", reason=str(error))

    def _note_grace(self, seconds: float) -> None:
        """Says once where a save of `seconds` is too slow for the time between TERM and KILL."""
        grace = self.settings.grace_seconds
        if self._noted_grace or SAVES_TO_LEAVE * seconds <= grace:
            return
        self._noted_grace = True
        self.writer.event("slow_save", save_seconds=seconds, grace_seconds=grace)
        self.console.print(
            f"note: a save takes {seconds:.1f} s, and leaving may take {SAVES_TO_LEAVE} of them and a step, but "
            f"checkpoint.grace_seconds={grace:g}: give the launcher more time, and say so there",
            highlight=False,
        )

    def _tell(self, step: int, tokens: int, error: OSError) -> None:
        try:
            self.writer.event(
                "checkpoint_failed",
                step=step,
                tokens=tokens,
                reason=str(error),
                in_a_row=len(self._failed),
                allowed=self.settings.max_failures,
            )
        except OSError as also:  # not even a line can be written
            self._error = also


def _host(shape: torch.Size, dtype: torch.dtype, pin: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=pin)
