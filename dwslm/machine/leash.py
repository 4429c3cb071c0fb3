"""Holds a process tree by a leash: when the holder dies, however it dies, everything below is killed.

The leash is a process of its own between holder and command. It reads a pipe whose other end only the holder has: the kernel
closes it with the holder, kill -9 included. It forwards signals to the command and ends the way the command ended. Whatever
the command leaves running is killed then, in a session of its own or not.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dwslm.machine.boot import below, catches

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
DUMP = signal.SIGUSR2
"""Goes to every process below that has a handler for it, and to no other: its default would end them."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl(2)
NOT_FOUND = 127
ROUNDS = 100  # of killing what keeps forking, a hundredth of a second each


def leash_command(fds: Sequence[int], command: Sequence[str]) -> list[str]:
    """The command line of a leash around `command`.

    It must inherit `fds`: the pipe's reading end first, then what is to stay open (locks) until nothing is left below.
    """
    root = str(Path(__file__).resolve().parents[2])
    call = f"from dwslm.machine.leash import run; run({list(fds)!r}, {list(command)!r})"
    return [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {root!r}); {call}"]


def run(fds: Sequence[int], command: Sequence[str]) -> NoReturn:
    """Runs the command on the leash, in the leash's process; does not return."""
    for fd in fds:
        os.set_inheritable(fd, False)  # the command gets none of them
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what its parents leave behind comes to us
    me = os.getpid()
    child = os.fork()  # before there is a thread
    if child == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the leash itself be killed
        if os.getppid() != me:
            os._exit(1)
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(NOT_FOUND)

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    def dump(number: int, frame: FrameType | None) -> None:
        for pid in below(me):
            if catches(pid, number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.signal(DUMP, dump)
    threading.Thread(target=_watch, args=(fds[0],), daemon=True).start()
    while True:  # also reaps what was left to us
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    _kill_below()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    # The holder sees what the command died of; a second core file would be of us.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(me, -code)
    time.sleep(1)  # the signal ends this thread or another at once
    os._exit(128 - code)


def _watch(holder: int) -> None:
    """Until the holder's end of the pipe closes; then the end of all."""
    while os.read(holder, 1):
        pass
    _kill_below()
    os._exit(128 + signal.SIGKILL)


def _kill_below() -> None:
    """Kills all descendants, again and again until none is left: one may fork while another is killed."""
    me = os.getpid()
    for _ in range(ROUNDS):
        left = below(me)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the pipe alone has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
