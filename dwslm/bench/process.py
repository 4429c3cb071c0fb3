"""The other end of the measuring process: starts it, asks it, ends it when it takes too long."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
GOING_S = 20.0
LAST_WORDS = 5  # lines of its log that explain how a process ended


class Ended(Exception):
    """The process is no more: it broke, or was `late` and was ended."""

    def __init__(self, reason: str, late: bool = False):
        super().__init__(reason)
        self.late = late


class Process:
    """A worker in a process of its own. `log` receives what libraries print."""

    def __init__(self, log: Path):
        self.log = log
        self._popen: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def ask(self, message: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
        """Answers as they come, up to the last.

        Raises:
            Ended: where the last answer does not come within `seconds`, or the process ends before it. It is gone then.
            ValueError: what the user did wrong.
        """
        until = time.monotonic() + seconds
        self._start()
        popen = self._popen
        assert popen is not None and popen.stdin is not None
        try:
            popen.stdin.write(json.dumps(message) + "\n")
            popen.stdin.flush()
        except OSError:
            self._raise_ended()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.close()
                raise Ended(f"not finished after {seconds:.0f} s", late=True) from None
            if line is None:
                self._raise_ended()
                return
            answer = json.loads(line)
            if "wrong" in answer:
                raise ValueError(answer["wrong"])
            yield answer
            if answer["done"]:
                return

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None

    def _start(self) -> None:
        if self.running:
            return
        self._lines = queue.Queue()
        with self.log.open("a", encoding="utf-8") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "dwslm.bench.worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        assert self._popen.stdout is not None
        threading.Thread(target=_pump, args=(self._popen.stdout, self._lines), daemon=True).start()

    def _raise_ended(self) -> None:
        assert self._popen is not None
        try:
            code = self._popen.wait(GOING_S)
        except subprocess.TimeoutExpired:  # a broken device can hold a process back
            self._popen.kill()
            code = self._popen.wait()
        self._popen = None
        words = " / ".join(self.log.read_text(encoding="utf-8", errors="replace").split("\n")[-LAST_WORDS - 1 :]).strip(
            " /"
        )
        raise Ended(f"the measuring process ended with code {code}: {words[-500:]}")


def _pump(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


class Inline:
    """A worker in this process, for a CPU: nothing there has to be ended from outside."""

    running = True

    def __init__(self) -> None:
        from dwslm.bench.worker import Worker

        self._worker = Worker()

    def ask(self, message: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
        """Answers as they come; `seconds` is not looked at."""
        yield from self._worker.answer(message)

    def close(self) -> None:
        """Nothing to end."""
