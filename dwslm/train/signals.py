"""Signals that ask a run to save and leave: TERM, INT, USR1, HUP.

The first one is noted, and the loop leaves at its next step boundary. Where there is nothing that a save would
keep (the first step, which compiles, and scoring, which follows a save), it ends that work at once. A second
signal ends the process there and then. One that follows within a second is the first one once more: Slurm and
Ctrl-C reach a launcher and its workers alike, and the launcher passes it on.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not done, and worth another try
RELAYED_SECONDS = 1.0
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Preempted(BaseException):
    """The run was asked to leave and has left everything in order. No Exception, so that nothing takes it for an error."""

    def __init__(self, name: str):
        super().__init__(f"asked to leave by {name}")
        self.name = name
        """Of the signal, "SIGTERM" for instance."""


class Signals:
    """Holds the handlers while it is open, as a context manager in the main thread.

    Args:
        says: tell at once, on stderr, that a signal has come: the step under way may take a while.

    Attributes:
        received: name of the signal that came, None until then.
    """

    def __init__(self, says: bool = False) -> None:
        self._says = says
        self.received: str | None = None
        self._first = 0.0  # when it came, by the monotonic clock
        self._may_end_at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in CAUGHT:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup, or a shell's background job: somebody wants it ignored
                self._before[number] = before
                signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self, name: str | None) -> None:
        """A signal that another rank has received, or this one: from here on it has come to this process too."""
        if name is not None and self.received is None:
            self.received, self._first = name, time.monotonic()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For work that may be dropped: a signal that is here or comes raises Preempted."""
        self._may_end_at_once = True
        try:
            if self.received is not None:
                raise Preempted(self.received)
            yield
        finally:
            self._may_end_at_once = False

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number).name, time.monotonic()
            if self._says:
                does = "leaves at once" if self._may_end_at_once else "saves after this step and leaves"
                with suppress(OSError):  # a terminal that has hung up; print may be in the midst of a line of its own
                    os.write(2, f"\n{self.received}: {does}; once more ends at once\n".encode())
            if self._may_end_at_once:
                raise Preempted(self.received)
        elif time.monotonic() - self._first > RELAYED_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
