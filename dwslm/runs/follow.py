"""A process that reads what a run writes and sends it to a tracker. It is told what to do on standard input.

It reads the same files as everybody else, so nothing that becomes of it can reach the training process: it may hang, die or be
killed, and later be sent the rows again.
"""

import json
import os
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import Row, parse
from dwslm.runs.sinks import SINKS, Sink

POLL_S = 1.0
END = b"end\n"
NICENESS = 10


class Follower:
    """The rows of a run as they appear, from one attempt on."""

    def __init__(self, run: RunFolder, attempt: int):
        self.run, self.attempt = run, attempt
        self._read: dict[str, int] = {}  # file -> bytes that were read of it

    def new(self) -> list[tuple[str, Row]]:
        """What came since the last call: ("metrics" or "evals", row), in the order of attempts."""
        found = []
        names = [(attempt, kind, name) for name in os.listdir(self.run.path) for attempt, kind in _kind(name)]
        for attempt, kind, name in sorted(names):
            if kind == "metrics" and attempt < self.attempt:
                continue
            for row in self._rows(self.run.path / name):
                row = row if kind == "evals" else {**row, "attempt": attempt}
                if isinstance(row.get("attempt"), int) and row["attempt"] >= self.attempt and "step" in row:
                    found.append((kind, row))
        return found

    def _rows(self, path: Path) -> list[Row]:
        at = self._read.get(path.name, 0)
        with open(path, "rb") as file:
            file.seek(at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[path.name] = at + len(whole) + len(newline)
        return [row for line in whole.split(b"\n") if (row := parse(line)) is not None]


def _kind(name: str) -> list[tuple[int, str]]:
    if match := re.fullmatch(r"metrics-(\d+)\.jsonl", name):
        return [(int(match[1]), "metrics")]
    return [(1 << 30, "evals")] if name == "evals-trainer.jsonl" else []  # scores after the rows that they follow


def follow(run: RunFolder, sink: Sink, attempt: int, ended: Callable[[float], bool]) -> int:
    """Sends rows until `ended(seconds)`, which waits so long for the end, says so; then the rest. Returns how many."""
    follower = Follower(run, attempt)
    sent = 0
    failed = True
    try:
        over = False
        while True:
            for kind, row in follower.new():
                sink.metrics(row) if kind == "metrics" else sink.evals(row)
                sent += 1
            if over:
                break
            over = ended(POLL_S)
        failed = False
    finally:
        sink.close(failed)
    return sent


def send(run: RunFolder, name: str, settings: dict[str, Any]) -> int:
    """Sends all that a run has written so far. Returns the number of rows."""
    return follow(run, SINKS[name](run, settings), 1, lambda seconds: True)


def main() -> None:
    """One line of JSON on standard input says what to do; `end`, the end of the input, or our parent's death ends it."""
    os.nice(NICENESS)
    parent = os.getppid()
    text = b""
    while b"\n" not in text:
        text += os.read(0, 1 << 16) or b"\n"
    line, _, rest = text.partition(b"\n")
    job = json.loads(line)
    heard = bytearray(rest)

    def ended(seconds: float) -> bool:
        if heard == END or os.getppid() != parent:
            return True
        if not select.select([0], [], [], seconds)[0]:
            return False
        data = os.read(0, 1 << 16)
        heard.extend(data)
        return not data or heard == END

    run = open_run(job["run"], Path(job["run"]).parent)
    follow(run, SINKS[job["sink"]](run, job["settings"]), job["attempt"], ended)


if __name__ == "__main__":
    main()
