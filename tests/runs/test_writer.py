"""Rows: what they carry, that each is one write, and what a full disk does."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dwslm.runs.writer import Clock, RunWriter

ROOT = Path(__file__).resolve().parents[2]

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


def test_rows_carry_what_every_row_must(tmp_path: Path) -> None:
    time = FakeClock()
    with RunWriter(tmp_path, 3, clock=time.clock()) as writer:
        writer.event("resume", step=10, tokens=5120, lr=0.01)
        time.wall, time.mono = 1001.0, 51.0
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
    time = FakeClock()
    writes: list[bytes] = []
    syncs: list[float] = []
    real_write, real_sync = os.write, os.fdatasync

    def write(fd: int, data: bytes) -> int:
        writes.append(bytes(data))
        return real_write(fd, data)

    def fdatasync(fd: int) -> None:
        syncs.append(time.mono)
        real_sync(fd)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    writer = RunWriter(tmp_path, 1, clock=time.clock())
    for second in range(1, 71):
        time.mono = 50.0 + second
        writer.metrics({"step": second, "tokens": second, "text": "x" * 100_000})
        assert len(writes) == second and writes[-1].endswith(b"\n") and writes[-1].count(b"\n") == 1
        assert (tmp_path / "metrics-1.jsonl").read_bytes().endswith(writes[-1])  # in the kernel, not in a buffer
    assert syncs == [80.0, 110.0]  # every 30 s
    writer.event("pin")
    assert syncs == [80.0, 110.0, 120.0]  # at once
    writer.close()
    assert len(syncs) == 4  # the last ten rows; the event was on disk already


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
try:
    for step in range(1, 100):
        writer.metrics({"step": step, "tokens": step})
except OSError as error:
    print(error.errno, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.metrics({"step": 100, "tokens": 100})
"""


def test_a_full_disk_is_one_line_and_costs_one_row(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    path = tmp_path / "metrics-1.jsonl"
    assert out.stdout.strip() == f"27 cannot append a row to {path}: File too large"
    *before, torn, after = path.read_text().splitlines()
    assert len("\n".join([*before, torn])) == 1000
    assert [json.loads(line)["step"] for line in before] == list(range(1, len(before) + 1))
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    assert json.loads(after)["step"] == 100
