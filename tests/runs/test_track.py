"""Trackers: what they are sent, and that nothing they do reaches the run."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dwslm.runs import track
from dwslm.runs.folder import RunFolder, create_run
from dwslm.runs.follow import Follower, follow, send
from dwslm.runs.reader import Row, metrics, read_rows
from dwslm.runs.sinks import numbers, score
from dwslm.runs.track import Trackers, TrackSettings
from dwslm.runs.writer import RunWriter

FAKE = """
import json, os, time
OUT = {out!r}
def note(kind, **what):
    with open(OUT, "a") as file:
        file.write(json.dumps({{"kind": kind, "pid": os.getpid(), **what}}) + "\\n")
class Settings:
    def __init__(self, **given): pass
class Run:
    def define_metric(self, *a, **k): pass
    def log(self, row): {log}
    def finish(self, exit_code): note("finish", exit_code=exit_code)
def init(**given):
    note("init", mode=given["mode"], id=given["id"], name=given["name"])
    {init}
    return Run()
"""


def fake_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str = "pass", log: str = 'note("log", row=row)'
) -> Path:
    """A package of that name for child processes; returns the file that it notes its calls in."""
    place, out = tmp_path / "fake", tmp_path / "calls"
    place.mkdir()
    (place / "wandb.py").write_text(FAKE.format(out=str(out), init=init, log=log))
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.syspath_prepend(str(place))
    return out


def calls(out: Path, kind: str) -> list[Row]:
    rows = read_rows(out)[0] if out.exists() else []
    return [row for row in rows if row["kind"] == kind]


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "runs", "a [b] <c>", {"config": {"optim": {"lr": 0.01}}})


def write(run: RunFolder, steps: range, attempt: int = 1) -> None:
    with RunWriter(run, attempt) as writer:
        for step in steps:
            writer.metrics({"step": step, "tokens": step * 10, "loss": 1 / step if step != 3 else math.nan})
            if step % 5 == 0:
                for kind, source in (("source", "wiki"), ("overall", None)):
                    writer.evals(
                        {"step": step, "tokens": step * 10, "slice": kind, "source": source, "bits_per_byte": 1.5}
                    )


def test_a_tracker_is_sent_every_row(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fake_wandb(tmp_path, monkeypatch)
    said: list[str] = []
    with Trackers(TrackSettings(wandb="offline"), run, 1, said.append):
        write(run, range(1, 11))
    assert said == []
    assert [(row["mode"], row["id"], row["name"]) for row in calls(out, "init")] == [
        ("offline", run.path.name, "a [b] <c>")
    ]
    rows = [row["row"] for row in calls(out, "log")]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses.keys() == set(range(1, 11)) and math.isnan(losses.pop(3))
    assert losses == {step: 1 / step for step in losses}
    assert {(row["step"], row["tokens"]) for row in rows if "eval/bits_per_byte" in row} == {(5, 50), (10, 100)}
    assert len([row for row in rows if "eval/source/wiki/bits_per_byte" in row]) == 2
    assert [row["exit_code"] for row in calls(out, "finish")] == [0]


def test_only_the_attempts_of_this_process_are_sent(run: RunFolder) -> None:
    write(run, range(1, 11), attempt=1)
    write(run, range(6, 9), attempt=2)
    follower = Follower(run, 2)
    assert [(kind, row["attempt"], row["step"]) for kind, row in follower.new()] == [
        ("metrics", 2, s) for s in (6, 7, 8)
    ]
    assert follower.new() == []
    with open(run.path / "metrics-2.jsonl", "ab") as file:
        file.write(b'{"step": 9, "attempt": 2, "tok')  # being written
        file.flush()
        assert follower.new() == []
        file.write(b'ens": 1}\n')
        file.flush()
        assert [row["step"] for _, row in follower.new()] == [9]


DEEDS = {
    "init blocks": ("time.sleep(60)", "pass"),
    "a row blocks": ("pass", "time.sleep(60)"),
    "init raises": ("raise RuntimeError('no')", "pass"),
    "a row raises": ("pass", "raise RuntimeError('no')"),
    "it dies": ("pass", "os._exit(9)"),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_whatever_a_tracker_does_the_run_has_all_its_rows(
    deed: str, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = fake_wandb(tmp_path, monkeypatch, *DEEDS[deed])
    said: list[str] = []
    started = time.monotonic()
    with Trackers(TrackSettings(wandb="online", finish_seconds=0.5), run, 1, said.append) as trackers:
        process = trackers.processes["wandb"]
        wait_until(lambda: bool(calls(out, "init")))
        write(run, range(1, 1001))
    assert process.poll() is not None
    assert time.monotonic() - started < 20  # not the 60 s that it sleeps
    assert [row["step"] for row in metrics(run)] == list(range(1, 1001))
    assert len(said) == 1 and f"dwslm runs send {run.path.name} --to wandb" in said[0]


def test_a_tracker_that_is_killed_costs_the_run_nothing(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = fake_wandb(tmp_path, monkeypatch)
    said: list[str] = []
    with Trackers(TrackSettings(wandb="offline"), run, 1, said.append) as trackers, RunWriter(run, 1) as writer:
        for step in range(1, 2001):
            writer.metrics({"step": step, "tokens": step})
            if step == 1000:
                wait_until(lambda: bool(calls(out, "log")))
                os.kill(trackers.processes["wandb"].pid, signal.SIGKILL)
    assert [row["step"] for row in metrics(run)] == list(range(1, 2001))
    assert len(said) == 1 and "code -9" in said[0]


ORPHAN = """
import sys, time
from dwslm.runs.folder import open_run
from dwslm.runs.track import Trackers, TrackSettings
from dwslm.runs.writer import RunWriter
run = open_run(sys.argv[1], ".")
with RunWriter(run, 1) as writer, Trackers(TrackSettings(wandb="offline"), run, 1, print) as trackers:
    for step in range(1, 101):
        writer.metrics({"step": step, "tokens": step})
    writer.flush()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_run_that_is_killed_leaves_no_tracker_behind(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = fake_wandb(tmp_path, monkeypatch)
    root = str(Path(__file__).resolve().parents[2])
    child = subprocess.Popen([sys.executable, "-c", ORPHAN, str(run.path)], stdout=subprocess.PIPE, cwd=root)
    assert child.stdout and child.stdout.readline() == b"ready\n"
    wait_until(lambda: bool(calls(out, "init")))
    child.kill()
    child.wait()
    wait_until(lambda: bool(calls(out, "finish")))  # it sends the rest and leaves
    assert len(calls(out, "log")) == 100


def test_a_run_may_be_sent_later(run: RunFolder, tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.closed: list[bool] = []

        def metrics(self, row: Row) -> None:
            self.steps.append(row["step"])

        def evals(self, row: Row) -> None:
            self.steps.append(-row["step"])

        def close(self, failed: bool) -> None:
            self.closed.append(failed)

    write(run, range(1, 6), attempt=1)
    write(run, range(4, 6), attempt=2)
    sink = Sink()
    assert follow(run, sink, 1, lambda seconds: True) == 11
    assert sink.steps == [1, 2, 3, 4, 5, 4, 5, -5, -5, -5, -5] and sink.closed == [False]


def test_what_counts_as_a_figure() -> None:
    row = {"step": 1, "tokens": 2, "time": 3.0, "loss": math.inf, "note": "x", "flag": True, "skipped": 0, "mfu": None}
    assert numbers(row) == {"loss": math.inf, "skipped": 0.0}
    assert score({"slice": "crossed", "source": "wiki", "language": "de", "bits_per_byte": 1.0}) == (
        "eval/crossed/wiki/de/bits_per_byte",
        1.0,
    )
    assert score({"slice": "overall"}) is None


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (
        ({"wandb": "yes"}, 'track.wandb="yes" must be off, offline or online'),
        ({"project": ""}, "track.project is empty"),
        ({"finish_seconds": -1.0}, "track.finish_seconds=-1.0"),
    ):
        with pytest.raises(ValueError, match=expected):
            TrackSettings(**given)
    assert TrackSettings().sinks() == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensorboard is not installed: python -m pip install tensorboard"):
        TrackSettings(tensorboard=True).sinks()


# ---- the real ones, where they are installed -------------------------------------------------------------


def test_tensorboard_holds_the_rows(run: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event

    write(run, range(1, 11))
    with pytest.raises(ValueError, match="is there already"):
        for _ in range(2):
            send(run, "tensorboard", {})
    (path,) = (run.path / "tensorboard" / "attempt-1").iterdir()
    data, found = path.read_bytes(), {}
    while data:  # the record format: length, its checksum, bytes, their checksum
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    losses = {step: value for (step, tag), value in found.items() if tag == "train/loss"}
    assert losses.keys() == set(range(1, 11)) and math.isnan(losses.pop(3))
    assert losses == {step: pytest.approx(1 / step) for step in losses}
    assert found[10, "eval/bits_per_byte"] == 1.5


def wandb_loss(run: RunFolder) -> dict[int, float]:
    """Read back with the client's own viewer."""
    (path,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    told = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for line in told.stdout.splitlines():
        row = json.loads(line).get("history", {}).get("item", {})
        if "train/loss" in row:
            found[row["step"]] = float(row["train/loss"])
    return found


@pytest.mark.slow
def test_wandb_offline_holds_the_rows_and_may_be_killed(run: RunFolder) -> None:
    pytest.importorskip("wandb")
    said: list[str] = []
    with Trackers(TrackSettings(wandb="offline"), run, 1, said.append):
        write(run, range(1, 11))
    assert said == []
    found = wandb_loss(run)
    assert found.keys() == set(range(1, 11)) and math.isnan(found.pop(3))
    assert found == {step: pytest.approx(1 / step) for step in found}
    killed = TrackSettings(wandb="offline", finish_seconds=5)
    with RunWriter(run, 2) as writer, Trackers(killed, run, 2, said.append) as trackers:
        for step in range(1, 301):
            writer.metrics({"step": step, "tokens": step})
            time.sleep(0.01)
            if step == 200:  # with its own processes
                os.killpg(trackers.processes["wandb"].pid, signal.SIGKILL)
    assert len(read_rows(run.path / "metrics-2.jsonl")[0]) == 300 and len(said) == 1


def test_leaving_early_gives_trackers_less_time(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_wandb(tmp_path, monkeypatch, init="time.sleep(60)")
    monkeypatch.setattr(track, "LEAVE_S", 0.2)
    started = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        Trackers(TrackSettings(wandb="offline", finish_seconds=50), run, 1, lambda told: None),
    ):
        raise KeyboardInterrupt
    assert time.monotonic() - started < 20
