"""Where a run stands: from events, lock and clock."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dwslm.runs.folder import RunFolder, create_run, open_run
from dwslm.runs.state import Facts, judge, standing, state, words
from dwslm.runs.writer import Clock, RunWriter

ROOT = Path(__file__).resolve().parents[2]
MINUTE = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path, "a run", {"hardware": {"host": socket.gethostname()}})


def say(run: RunFolder, kind: str, at: float, /, writer: str = "trainer", **fields: object) -> None:
    with RunWriter(run, run.next_attempt(writer), writer=writer, clock=Clock(lambda: at, lambda: at)) as rows:
        rows.event(kind, **fields)


def report(run: RunFolder, step: int, at: float, mono: float | None = None) -> None:
    row = {"step": step, "tokens": step, "attempt": 1, "time": at, "mono": mono if mono is not None else at}
    with open(run.path / "metrics-1.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def test_queued_until_it_begins(run: RunFolder) -> None:
    assert state(run, 1e6) == "queued"
    say(run, "tag", 1.0, writer="person", add=["x"])
    assert state(run, 1e6) == "queued"


def test_running_turns_stale_at_ten_minutes_of_silence(run: RunFolder) -> None:
    with run.lock():
        say(run, "start", 1000.0)
        assert state(run, 1000.0 + 9 * MINUTE + 50) == "running"
        assert state(run, 1000.0 + 10 * MINUTE + 5) == "stale"
        report(run, 1, 2000.0)
        assert state(run, 2000.0 + 9 * MINUTE + 50) == "running"  # it reports again
        found = standing(run, 2000.0 + 2 * 3600 + 3 * MINUTE)
        assert (found.state, found.reason, found.heard) == ("stale", "silent for 2 h 3 min", 2000.0)


def test_paused_is_not_stale(run: RunFolder) -> None:
    say(run, "start", 1000.0)
    say(run, "paused", 2000.0, reason="the room is too hot")
    found = standing(run, 2000.0 + 1e6)
    assert (found.state, found.reason) == ("paused", "the room is too hot")
    say(run, "preempted", 3000.0, reason="asked to leave by SIGTERM")
    assert state(run, 1e7) == "paused"
    say(run, "queued", 3001.0, writer="queue", reason="a more urgent job")
    assert standing(run, 1e7).state == "queued"


@pytest.mark.parametrize(("kind", "fields", "reason"), [
    ("done", {}, ""), ("stopped", {"reason": "enough"}, "enough"),
    ("failed", {"error": "OSError", "reason": "no space"}, "OSError: no space"),
])  # fmt: skip
def test_the_last_word(run: RunFolder, kind: str, fields: dict, reason: str) -> None:
    say(run, "start", 1000.0)
    say(run, kind, 2000.0, **fields)
    found = standing(run, 1e7)
    assert (found.state, found.reason) == (kind, reason)
    with run.lock():  # it is being resumed, and loads
        assert state(run, 2000.5) == kind  # the process that said so has not left yet
        assert state(run, 2011.0) == "running"


def test_lost_when_its_process_is_gone_without_a_word(run: RunFolder) -> None:
    code = (
        "import os, signal, sys\nfrom dwslm.runs.folder import open_run\nfrom dwslm.runs.writer import RunWriter\n"
        "run = open_run(sys.argv[1], '.')\nlock = run.lock()\nRunWriter(run, 1).event('start')\n"
        "print('up', flush=True)\nsignal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout and child.stdout.readline() == b"up\n"
    heard = standing(run, 0.0).heard
    assert heard is not None
    assert run.held() is True and state(run, heard + 5) == "running"
    child.kill()
    child.wait()
    assert run.held() is False
    found = standing(run, heard + 5)
    assert found.state == "lost" and found.reason == "its process is gone without a word, silent for 5 s"


def test_on_another_machine_only_silence_tells(run: RunFolder) -> None:
    record = json.loads((run.path / "run.json").read_text()) | {"hardware": {"host": "elsewhere"}}
    (run.path / "run.json").write_text(json.dumps(record))
    run = open_run(run.path, run.path.parent)
    say(run, "start", 1000.0)
    assert run.held() is None
    assert [state(run, 1000 + m * MINUTE) for m in (9, 11, 59, 61)] == ["running", "stale", "stale", "lost"]
    (run.path / "lock").write_text(json.dumps({"pid": 1, "host": socket.gethostname()}))  # resumed here, and killed
    assert state(run, 1000 + 9 * MINUTE) == "lost"


def test_looking_at_a_run_does_not_keep_it_from_being_taken(run: RunFolder) -> None:
    run.lock().release()
    look = (
        "import sys\nfrom dwslm.runs.folder import open_run\nrun = open_run(sys.argv[1], '.')\nprint('up', flush=True)\n"
        "while True: run.held()"
    )
    child = subprocess.Popen([sys.executable, "-c", look, str(run.path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout and child.stdout.readline() == b"up\n"
        for _ in range(200):
            run.lock().release()
    finally:
        child.kill()
        child.wait()


def test_a_clock_that_was_set_back(run: RunFolder) -> None:
    with run.lock():
        say(run, "start", 5000.0)
        report(run, 1, 9000.0, mono=6000.0)
        report(run, 2, 5500.0, mono=6060.0)  # set back by an hour between the two
        assert state(run, 5560.0) == "running"
        assert state(run, 5500.0 + 11 * MINUTE) == "stale"


def test_a_supervisor_that_waits_to_try_again(run: RunFolder) -> None:
    say(run, "start", 1000.0)
    say(run, "failed", 1500.0, error="RuntimeError", reason="x")
    say(run, "retry", 1501.0, writer="supervisor", kind="crash", seconds=300.0)
    found = standing(run, 1700.0)
    assert (found.state, found.reason) == ("paused", "will be tried again after: crash")
    assert state(run, 1801.0 + 9 * MINUTE) == "paused"
    assert state(run, 1801.0 + 11 * MINUTE) == "lost"


def test_a_run_that_ends_while_it_is_looked_at(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are read, then it says `done` and frees the lock, then the lock is looked at."""
    say(run, "start", 1000.0)
    told: list[int] = []

    def held(self: RunFolder) -> bool:
        if not told:
            told.append(1)
            say(run, "done", 1001.0)
        return False

    monkeypatch.setattr(RunFolder, "held", held)
    assert state(run, 1002.0) == "done"


def test_the_lock_is_asked_for_only_where_it_decides() -> None:
    def held() -> bool:
        raise AssertionError("asked")

    assert judge(Facts(), held, 0.0).state == "queued"
    assert judge(Facts(kind="done", at=100.0), held, 105.0).state == "done"


def test_a_lock_that_may_not_be_read(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    run.lock().release()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert run.held() is None


@pytest.mark.parametrize(("seconds", "expected"), [
    (0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (605, "10 min"), (3600, "1 h"), (11520, "3 h 12 min"),
    (86400 * 3 + 7200, "3 d 2 h"),
])  # fmt: skip
def test_words(seconds: float, expected: str) -> None:
    assert words(seconds) == expected
