"""Rows: what they carry, that each is one write, and what a full disk does."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dwslm.runs import spool
from dwslm.runs.reader import read_rows
from dwslm.runs.spool import Lines, Spool
from dwslm.runs.writer import Clock, RunWriter

ROOT = Path(__file__).resolve().parents[2]


class FakeClock:
    def __init__(self) -> None:
        self.wall, self.mono = 1000.0, 50.0

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.wall, mono=lambda: self.mono)


def lines(path: Path) -> list[dict]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.0005)


def test_rows_carry_what_every_row_must(tmp_path: Path) -> None:
    at = FakeClock()
    with RunWriter(tmp_path, 3, clock=at.clock()) as writer:
        writer.event("resume", step=10, tokens=5120, lr=0.01)
        at.wall, at.mono = 1001.0, 51.0
        writer.metrics({"step": 11, "tokens": 5632, "loss": 2.5})
        writer.event("checkpoint", path="step-00000011")  # step and tokens are those of the last row
        writer.evals({"step": 10, "tokens": 5120, "source": "wiki", "bits_per_byte": 0.9})
    head = {"schema": 1, "attempt": 3}
    later = {"time": 1001.0, "mono": 51.0}
    at_11 = {"step": 11, "tokens": 5632}
    assert lines(tmp_path / "events-trainer-3.jsonl") == [
        head | {"step": 10, "tokens": 5120, "time": 1000.0, "mono": 50.0, "event": "resume", "lr": 0.01},
        head | at_11 | later | {"event": "checkpoint", "path": "step-00000011"},
    ]
    assert lines(tmp_path / "metrics-3.jsonl") == [head | at_11 | later | {"loss": 2.5}]
    assert lines(tmp_path / "evals-trainer.jsonl") == [
        head | {"step": 10, "tokens": 5120} | later | {"source": "wiki", "bits_per_byte": 0.9}
    ]


def test_numbers_that_json_lacks_are_strings(tmp_path: Path) -> None:
    with RunWriter(tmp_path, 1) as writer:
        row = {"step": 1, "tokens": 1, "loss": math.nan, "norm": math.inf, "parts": [-math.inf, 1.5]}
        writer.metrics(row)
        writer.event("skip", values={"loss": math.nan})
    text = (tmp_path / "metrics-1.jsonl").read_text()

    def refuse(word: str) -> None:
        raise AssertionError(f"bare {word} in the file")

    read = json.loads(text, parse_constant=refuse)
    assert (read["loss"], read["norm"], read["parts"]) == ("NaN", "Infinity", ["-Infinity", 1.5])
    assert lines(tmp_path / "events-trainer-1.jsonl")[0]["values"] == {"loss": "NaN"}


def test_a_row_is_one_write_and_syncs_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = FakeClock()
    writes: list[bytes] = []
    syncs: list[float] = []
    real_write, real_sync = os.write, os.fdatasync

    def write(fd: int, data: bytes) -> int:
        taken = real_write(fd, data)
        writes.append(bytes(data))
        return taken

    def fdatasync(fd: int) -> None:
        syncs.append(at.mono)
        real_sync(fd)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(spool, "POLL_SECONDS", 0.001)
    writer = RunWriter(tmp_path, 1, clock=at.clock())
    for second in range(1, 71):
        at.mono = 50.0 + second
        writer.metrics({"step": second, "tokens": second, "text": "x" * 100_000})
        wait_until(lambda rows=second: len(writes) == rows)
        assert writes[-1].endswith(b"\n") and writes[-1].count(b"\n") == 1
        assert (tmp_path / "metrics-1.jsonl").read_bytes().endswith(writes[-1])  # in the kernel, not in a buffer
    assert syncs == [81.0, 112.0]  # 30 s after the first row that was not on disk yet
    writer.event("pin")
    assert syncs == [81.0, 112.0, 120.0, 120.0]  # at once, and with it the rows before
    writer.close()
    assert len(syncs) == 4  # all was on disk already


def test_an_attempt_is_never_written_to_twice(tmp_path: Path) -> None:
    RunWriter(tmp_path, 1).close()
    with pytest.raises(ValueError, match=r"events-trainer-1\.jsonl is already there: this attempt"):
        RunWriter(tmp_path, 1)
    (tmp_path / "metrics-2.jsonl").touch()
    with (
        RunWriter(tmp_path, 2) as writer,
        pytest.raises(ValueError, match=r"metrics-2\.jsonl is already there"),
    ):
        writer.metrics({"step": 1, "tokens": 1})


def test_evals_go_on_after_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "evals-trainer.jsonl"
    path.write_bytes(b'{"step": 1, "tokens": 1, "attempt": 1}\n{"step": 2, "tok')
    with RunWriter(tmp_path, 2) as writer:
        writer.evals({"step": 2, "tokens": 2})
    text = path.read_text().splitlines()
    assert text[1] == '{"step": 2, "tok' and json.loads(text[2])["step"] == 2


def test_bad_rows_name_the_file_or_the_writer(tmp_path: Path) -> None:
    with RunWriter(tmp_path, 1) as writer:
        with pytest.raises(ValueError, match=r"row for metrics-1\.jsonl cannot be written as JSON: .*bytes"):
            writer.metrics({"step": 1, "tokens": 1, "loss": b"2"})
        writer.metrics({"step": 2, "tokens": 2})
    assert [row["step"] for row in lines(tmp_path / "metrics-1.jsonl")] == [2]
    with pytest.raises(ValueError, match=r"writer name '\.\./x': letters"):
        RunWriter(tmp_path, 1, writer="../x")
    with pytest.raises(OSError, match=r"cannot create .*/absent/events-trainer-1\.jsonl: No such file"):
        RunWriter(tmp_path / "absent", 1)


FULL = """
import resource, signal, sys
from dwslm.runs.writer import RunWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RunWriter(sys.argv[1], 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # takes a part of a row, then none
for step in range(1, 100):
    writer.metrics({"step": step, "tokens": step})  # not a word of it here: training goes on
for wait in (writer.flush, lambda: writer.event("checkpoint")):
    try:
        wait()
    except OSError as error:
        print(error.errno, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
if sys.argv[2] == "flush":
    writer.flush()
writer.metrics({"step": 100, "tokens": 100})  # and ends without close
"""


@pytest.mark.parametrize("end", ["flush", "exit"])
def test_a_full_disk_is_one_line_and_costs_no_row(tmp_path: Path, end: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), end], capture_output=True, text=True, check=True, cwd=ROOT
    )
    path = tmp_path / "metrics-1.jsonl"
    told = f"27 cannot append a row to {path}: File too large"
    assert out.stdout.strip().splitlines() == [told, told]
    rows, damaged = read_rows(path)
    assert [row["step"] for row in rows] == list(range(1, 101)) and damaged == 1  # the part that fitted
    assert [row["event"] for row in read_rows(tmp_path / "events-trainer-1.jsonl")[0]] == ["checkpoint"]


def blocked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing until the event is set."""
    free = threading.Event()
    real = os.write

    def write(fd: int, data: bytes) -> int:
        assert free.wait(60)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    return free


def test_a_disk_that_blocks_holds_up_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = blocked(monkeypatch)
    writer = RunWriter(tmp_path, 1)
    for step in range(1, 1001):
        writer.metrics({"step": step, "tokens": step})  # would not return if it waited
    assert (tmp_path / "metrics-1.jsonl").stat().st_size == 0
    waiting = threading.Thread(target=writer.flush)
    waiting.start()
    assert waiting.is_alive()
    free.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert [row["step"] for row in read_rows(tmp_path / "metrics-1.jsonl")[0]] == list(range(1, 1001))
    writer.close()


def test_a_row_is_what_it_was_when_it_was_handed_over(tmp_path: Path) -> None:
    """Also where the thread makes its text later, and whatever kind of plain data it holds."""
    row: dict[str, Any] = {
        "step": 1,
        "tokens": 8,
        "loss": math.inf,
        "note": "ä\n",
        "flag": True,
        "mfu": None,
        "big": 2**70,
    }
    nested = {"step": 2, "tokens": 16, "list": [1, math.nan], "map": {"a": [2.0]}}
    with RunWriter(tmp_path, 1) as writer:
        writer.metrics(row)
        writer.metrics({**row, "big": 7})
        writer.metrics(nested)
        with pytest.raises(ValueError, match=r"row for metrics-1\.jsonl .*integer string conversion"):
            writer.metrics({**row, "big": 10**5000})
        row["loss"], row["note"] = 0.0, "later"
        nested["list"].append(9)
        nested["map"]["a"][0] = 0.0
    first, second, third = (json.loads(line) for line in (tmp_path / "metrics-1.jsonl").read_text().splitlines())
    assert (first["loss"], first["note"], first["big"], first["flag"], first["mfu"]) == (
        "Infinity",
        "ä\n",
        2**70,
        True,
        None,
    )
    assert (second["loss"], second["note"], second["big"]) == ("Infinity", "ä\n", 7)
    assert (third["list"], third["map"]) == ([1, "NaN"], {"a": [2.0]})


def test_a_full_queue_waits_and_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = blocked(monkeypatch)
    lines = Lines(tmp_path / "rows", new=True)
    lines.open()
    line = Spool(time.monotonic, limit=10)
    done: list[int] = []

    def write() -> None:
        for number in range(25):
            line.put(lines, f"{number}\n".encode)
            done.append(number)

    writing = threading.Thread(target=write)
    writing.start()
    wait_until(lambda: len(done) == 10)
    time.sleep(0.05)
    assert len(done) == 10 and writing.is_alive()
    free.set()
    writing.join(10)
    line.close()
    assert (tmp_path / "rows").read_text().split() == [str(number) for number in range(25)]


def test_a_full_queue_on_a_disk_that_refuses_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    lines = Lines(tmp_path / "rows", new=True)
    lines.open()
    line = Spool(time.monotonic, limit=3)
    with pytest.raises(OSError, match=r"cannot append a row to .*rows: No space left"):
        for number in range(100):
            line.put(lines, f"{number}\n".encode)
            time.sleep(0.01)
    monkeypatch.undo()
    line.close()
    assert (tmp_path / "rows").read_text().split() == ["0", "1", "2"]


def test_an_error_on_its_way_is_not_hidden_by_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(FloatingPointError), RunWriter(tmp_path, 1) as writer:
        monkeypatch.setattr(os, "write", write)
        writer.metrics({"step": 1, "tokens": 1})
        raise FloatingPointError
    monkeypatch.undo()
    with pytest.raises(OSError, match="metrics-2"), RunWriter(tmp_path, 2) as writer:
        monkeypatch.setattr(os, "write", write)
        writer.metrics({"step": 1, "tokens": 1})


def test_rows_go_to_their_attempt(tmp_path: Path) -> None:
    with RunWriter(tmp_path, 1) as writer:
        for number in range(1, 6):
            for step in range(200):
                writer.metrics({"step": step, "tokens": step, "of": number})
            writer.next_attempt(number + 1)
    for number in range(1, 6):
        rows = read_rows(tmp_path / f"metrics-{number}.jsonl")[0]
        assert [(row["attempt"], row["of"], row["step"]) for row in rows] == [(number, number, s) for s in range(200)]
    assert not (tmp_path / "metrics-6.jsonl").exists()


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    with RunWriter(tmp_path, 1) as writer:

        def work(name: int) -> None:
            for number in range(100):
                writer.evals({"step": number, "tokens": 0, "by": name})
            writer.event("finished", by=name)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows, damaged = read_rows(tmp_path / "evals-trainer.jsonl")
    assert damaged == 0
    for name in range(4):
        assert [row["step"] for row in rows if row["by"] == name] == list(range(100))
