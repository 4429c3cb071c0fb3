"""One training process on a leash: started, listened to, asked for its stacks, ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from dwslm.machine.boot import below, catches
from dwslm.machine.leash import leash_command

KEPT_BYTES = 1 << 16
"""Of standard error, for telling why it ended."""
DUMP_S = 5.0
"""Seconds that a process has to write its stacks."""
QUIET_S = 0.3
"""Silence that says it has written them."""
KILL_S = 15.0


class Attempt:
    """A command that runs; its standard error is passed on and its end kept. With it dies everything below, and with us it does.

    Raises OSError where no process can be made.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        keep_open: Sequence[int] = (),
        stderr: BinaryIO | None = None,
    ):
        """
        Args:
            keep_open: descriptors of locks, held until all of it is gone.
            stderr: where its standard error is passed on to; ours if none is given.
        """
        self.command = list(command)
        self._out = stderr or sys.stderr.buffer
        self._text = bytearray()
        self._seen = 0
        self._changed = threading.Condition()
        reading, self._hold = os.pipe()
        fds = [reading, *keep_open]
        try:
            self.process = subprocess.Popen(
                leash_command(fds, command),
                env=dict(environment),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C reaches it through us, and once
            )
        except BaseException:
            os.close(self._hold)
            raise
        finally:
            os.close(reading)
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Its exit code once it has ended, -N for a death by signal N."""
        return self.process.poll()

    def send(self, number: int) -> None:
        """Passes a signal on."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> int:
        """Kills it and everything below. Returns its exit code."""
        self._let_go()
        try:
            return self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:  # something below cannot be killed: it waits inside the kernel
            self.process.kill()
            return self.process.wait()

    def close(self) -> str:
        """After its end: what is left of its standard error, as text."""
        self._let_go()
        self._reader.join(KILL_S)
        return self.text()

    def text(self) -> str:
        """The end of its standard error so far."""
        with self._changed:
            return self._text.decode(errors="replace")

    def stacks(self, wait_s: float = DUMP_S) -> str:
        """The stacks of all threads of all processes that give them; through py-spy, if it is there, where none does."""
        processes = below(self.process.pid)
        if processes and not any(catches(pid, signal.SIGUSR2) for pid in processes):
            return self._py_spy()
        with self._changed:
            before = self._seen
        self.send(signal.SIGUSR2)
        end = time.monotonic() + wait_s
        with self._changed:
            seen = before
            while (left := end - time.monotonic()) > 0:
                self._changed.wait(min(left, QUIET_S))
                if self._seen > before and self._seen == seen:
                    break  # it wrote, and then nothing for a while
                seen = self._seen
            new = self._seen - before
            if new:
                return bytes(self._text[-new:]).decode(errors="replace")
        return self._py_spy()

    def _py_spy(self) -> str:
        program = shutil.which("py-spy")
        told = []
        for pid in below(self.process.pid) if program else []:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                done = subprocess.run(
                    [str(program), "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=KILL_S
                )
                told.append(done.stdout)
        return "\n".join(told)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        fd = self.process.stderr.fileno()
        while data := os.read(fd, KEPT_BYTES):
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more: that is no reason to stop
                self._out.write(data)
                self._out.flush()
            with self._changed:
                self._text += data
                self._seen += len(data)
                del self._text[:-KEPT_BYTES]
                self._changed.notify_all()

    def _let_go(self) -> None:
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1
