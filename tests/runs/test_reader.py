"""Reading back: damaged files, overlapping attempts, clocks that jump."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwslm.runs import reader
from dwslm.runs.reader import evals, events, last_lifecycle, last_metrics, metrics, read_rows
from dwslm.runs.writer import Clock, RunWriter

ROOT = Path(__file__).resolve().parents[2]


def attempt(
    folder: Path,
    number: int,
    steps: list[int],
    resumed: int | None = None,
    wall: float | None = None,
    writer: str = "trainer",
) -> None:
    """Writes one attempt whose rows hold the attempt's number as their loss."""
    with RunWriter(folder, number, writer=writer, clock=Clock(wall=lambda: wall or 1000.0 + number)) as rows:
        if resumed is not None:
            rows.event("resume", step=resumed, tokens=resumed * 10)
        for step in steps:
            rows.metrics({"step": step, "tokens": step * 10, "loss": float(number)})


def curve(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics(folder)]


def test_one_attempt_comes_back_as_written(tmp_path: Path) -> None:
    attempt(tmp_path, 1, [1, 2, 3])
    assert curve(tmp_path) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert "superseded" not in metrics(tmp_path)[0]
    assert metrics(tmp_path)[0]["tokens"] == 10


def test_a_resume_supersedes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    attempt(tmp_path, 1, [1, 2, 3, 4, 5])
    attempt(tmp_path, 2, [4, 5, 6], resumed=3)
    assert curve(tmp_path) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    marked = [(row["attempt"], row["step"], row["superseded"]) for row in metrics(tmp_path, superseded=True)]
    assert marked == [
        (1, 1, False), (1, 2, False), (1, 3, False), (1, 4, True), (1, 5, True),
        (2, 4, False), (2, 5, False), (2, 6, False),
    ]  # fmt: skip


def test_the_resume_event_counts_before_and_between_rows(tmp_path: Path) -> None:
    attempt(tmp_path, 1, [10, 20, 30])
    attempt(tmp_path, 2, [], resumed=15)  # killed before its first row
    assert curve(tmp_path) == [(10, 1)]
    attempt(tmp_path, 3, [30], resumed=15)  # reports every tenth step: 20 was not reported again
    assert curve(tmp_path) == [(10, 1), (30, 3)]


def test_the_row_of_the_checkpoint_itself_stands(tmp_path: Path) -> None:
    attempt(tmp_path, 1, [10, 20, 30])
    attempt(tmp_path, 2, [], resumed=20)
    assert curve(tmp_path) == [(10, 1), (20, 1)]
    attempt(tmp_path, 3, [], resumed=19)
    assert curve(tmp_path) == [(10, 1)]


def test_without_a_resume_event_the_first_row_decides(tmp_path: Path) -> None:
    attempt(tmp_path, 1, [1, 2, 3, 4])
    attempt(tmp_path, 2, [3, 4, 5])
    assert curve(tmp_path) == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_attempts_are_numbers_and_three_may_overlap(tmp_path: Path) -> None:
    for number in range(1, 12):
        attempt(tmp_path, number, [1, 2, 3], resumed=0, wall=5000.0 - number)  # the clock runs backwards
    assert curve(tmp_path) == [(1, 11), (2, 11), (3, 11)]


def test_going_back_within_an_attempt_and_duplicates(tmp_path: Path) -> None:
    attempt(tmp_path, 1, [1, 2, 3, 4, 2, 3, 3])
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3]
    assert [row["step"] for row in last_metrics(tmp_path, 2)] == [2, 3]
    flags = [row["superseded"] for row in metrics(tmp_path, superseded=True)]
    assert flags == [False, True, True, True, False, True, False]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_merged_rows_are_those_of_the_weights(tmp_path_factory: pytest.TempPathFactory, plan: list) -> None:
    """Against a model that replays the run: a dictionary of steps, cut at each resume."""
    folder = tmp_path_factory.mktemp("run")
    truth: dict[int, float] = {}
    for number, (start, length) in enumerate(plan, start=1):
        resumed = min(start, max(truth, default=0))
        steps = list(range(resumed + 1, resumed + 1 + length))
        attempt(folder, number, steps, resumed=resumed)
        truth = {step: loss for step, loss in truth.items() if step <= resumed}
        truth |= {step: float(number) for step in steps}
    assert curve(folder) == sorted(truth.items())
    for count in (1, 3, 20):
        assert last_metrics(folder, count) == metrics(folder)[-count:]


@pytest.mark.parametrize(
    "tail", [b'{"step": 9, "tok', b"\0" * 4096, b'{"step": 9,' + b"\0" * 50, b"{", b"\xff\xfe", b"9"]
)
def test_a_damaged_tail_costs_itself_only(tmp_path: Path, tail: bytes) -> None:
    attempt(tmp_path, 1, [1, 2, 3])
    with open(tmp_path / "metrics-1.jsonl", "ab") as file:
        file.write(tail)
    assert curve(tmp_path) == [(1, 1), (2, 1), (3, 1)]
    attempt(tmp_path, 2, [3, 4], resumed=2)
    assert curve(tmp_path) == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_damage_in_the_middle_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics-1.jsonl"
    row = {"attempt": 1, "step": 1, "tokens": 1, "loss": 1.0, "future": {"a": [1]}}
    good = json.dumps(row).encode()
    zeros_before = b"\0" * 64 + json.dumps(row | {"step": 2}).encode()
    path.write_bytes(b"\n".join([good, b'{"step": 2', b"\xff", b"[1]", b"", b'"x"', zeros_before, b""]))
    rows, damaged = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2] and damaged == 4
    assert metrics(tmp_path)[0]["future"] == {"a": [1]}  # unknown keys are passed on


@given(
    st.binary(max_size=40),
    st.lists(st.sampled_from([b"", b"a", b"bc" * 20, b"\0", b"{}"]), max_size=12),
    st.integers(1, 30),
)
@settings(max_examples=100)
def test_lines_backwards_are_the_lines(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, parts: list[bytes], block: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows"
    path.write_bytes(b"".join(part + b"\n" for part in parts) + tail)
    whole = path.read_bytes().split(b"\n")[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", block)
        assert list(reader.lines_backwards(path)) == whole[::-1]


def test_rows_that_are_no_metric_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics-1.jsonl").write_text('{"attempt": 1, "step": "x"}\n{"loss": 1}\n{"attempt": 1, "step": 1}\n')
    assert [row["step"] for row in metrics(tmp_path)] == [1]
    (tmp_path / "metrics-draft.jsonl").write_text("not ours\n")
    assert len(metrics(tmp_path)) == 1


def test_every_cut_of_a_file_gives_whole_rows(tmp_path: Path) -> None:
    """A file read while it grows: at whatever byte, the rows are a prefix of the rows."""
    attempt(tmp_path, 1, [1, 2, 3])
    path = tmp_path / "metrics-1.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        steps = [row["step"] for row in metrics(tmp_path)]
        assert steps == [1, 2, 3][: whole[:cut].count(b"\n")]
        assert [row["step"] for row in last_metrics(tmp_path, 2)] == steps[-2:]


def test_non_finite_numbers_survive(tmp_path: Path) -> None:
    with RunWriter(tmp_path, 1) as writer:
        writer.metrics({"step": 1, "tokens": 1, "loss": math.nan, "parts": {"a": [math.inf, -math.inf, "NaNcy"]}})
        writer.event("skip", loss=math.inf)
    row = metrics(tmp_path)[0]
    assert math.isnan(row["loss"])
    assert row["parts"] == {"a": [math.inf, -math.inf, "NaNcy"]}
    assert events(tmp_path)[0]["loss"] == math.inf


@given(st.floats(allow_nan=False, allow_infinity=True))
@settings(max_examples=100)
def test_floats_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    folder = tmp_path_factory.mktemp("run")
    with RunWriter(folder, 1) as writer:
        writer.metrics({"step": 1, "tokens": 1, "loss": value})
    assert metrics(folder)[0]["loss"].hex() == value.hex()


def test_events_of_all_writers_come_in_the_order_of_time(tmp_path: Path) -> None:
    def log(writer: str, number: int, *walls: float) -> None:
        ticks = iter(walls)
        with RunWriter(tmp_path, number, writer=writer, clock=Clock(wall=lambda: next(ticks))) as rows:
            for wall in walls:
                rows.event("note", text=f"{writer}-{number}@{wall:g}")

    log("trainer", 1, 100, 110, 90, 120)  # the clock was set back and forward
    log("trainer", 2, 80)  # and back again before the resume
    log("supervisor", 1, 95, 105, 130)
    log("eval-a", 1, 104)
    assert [row["text"] for row in events(tmp_path)] == [
        "supervisor-1@95", "trainer-1@100", "eval-a-1@104", "supervisor-1@105", "trainer-1@110",
        "trainer-1@90", "trainer-1@120", "trainer-2@80", "supervisor-1@130",
    ]  # fmt: skip
    assert {row["writer"] for row in events(tmp_path)} == {"trainer", "supervisor", "eval-a"}


def test_the_last_lifecycle_event(tmp_path: Path) -> None:
    assert last_lifecycle(tmp_path) is None
    with RunWriter(tmp_path, 1) as writer:
        writer.event("start", step=0, tokens=0)
        writer.event("failed", error="x")
        writer.event("checkpoint_deleted", path="y")
    last = last_lifecycle(tmp_path)
    assert last is not None and (last["event"], last["error"]) == ("failed", "x")


def test_evals_are_merged_and_hand_made_scores_stand(tmp_path: Path) -> None:
    def score(number: int, step: int, resumed: int | None = None, writer: str = "trainer") -> None:
        with RunWriter(tmp_path, number, writer=writer) as rows:
            if resumed is not None:
                rows.event("resume", step=resumed, tokens=0)
            for source in ("books", "wiki"):
                rows.evals({"step": step, "tokens": step, "source": source})

    score(1, 100)
    score(2, 200)  # will be undone
    score(3, 100, resumed=100)  # killed between save and eval, so the eval is done again
    score(4, 150, resumed=120)
    score(1, 200, writer="eval")
    rows = [(row["writer"], row["attempt"], row["step"], row["source"]) for row in evals(tmp_path)]
    assert rows == [
        ("trainer", 3, 100, "books"), ("trainer", 3, 100, "wiki"),
        ("trainer", 4, 150, "books"), ("trainer", 4, 150, "wiki"),
        ("eval", 1, 200, "books"), ("eval", 1, 200, "wiki"),
    ]  # fmt: skip
    assert [row["superseded"] for row in evals(tmp_path, superseded=True)] == [True] * 4 + [False] * 6


TYPIST = """
import sys
from dwslm.runs.writer import RunWriter
writer = RunWriter(sys.argv[1], int(sys.argv[2]))
step = int(sys.argv[3])
writer.event("resume", step=step, tokens=step)
while True:
    step += 1
    writer.metrics({"step": step, "tokens": step, "loss": 1 / step, "pad": "x" * (step % 7 * 5000)})
    if step % 5 == 0:
        writer.flush()
        print(step, flush=True)
"""


def test_kill_nine_at_random_instants_loses_no_row_that_was_flushed(tmp_path: Path) -> None:
    rng = random.Random(0)
    step = 0
    for number in range(1, 6):
        child = subprocess.Popen(
            [sys.executable, "-c", TYPIST, str(tmp_path), str(number), str(step)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert child.stdout and child.stdout.readline()
        time.sleep(rng.random() * 0.05)
        os.kill(child.pid, signal.SIGKILL)
        said = [int(line) for line in child.communicate()[0].splitlines(keepends=True) if line.endswith(b"\n")]
        rows, damaged = read_rows(tmp_path / f"metrics-{number}.jsonl")
        assert damaged == 0
        steps = [row["step"] for row in rows]
        assert steps == list(range(step + 1, steps[-1] + 1))
        assert steps[-1] >= (said[-1] if said else step + 1)
        assert all(row["loss"] == 1 / row["step"] for row in rows)
        step = steps[-1] // 2  # the next one resumes from an older step
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, len(metrics(tmp_path)) + 1))
