"""Killed at any instant and run again: the same bytes as one straight run."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests.data.prepare_case import contents, neighbours, records, run, write_jsonl

# Chunks of 2 kB, so that two workers have much to do for 300 documents; options that keep state from chunk to chunk.
WAYS = {
    "given": {"workers": 2, "chunk_bytes": 2000, "dedup": True, "min_characters": 20, "decontaminate": "report"},
    "split": {"workers": 2, "chunk_bytes": 2000, "valid": [], "valid_fraction": 0.2, "dedup": True},
    "alone": {"workers": 1},
}


@pytest.fixture
def text(tmp_path):
    rows = records(300)
    for number in (40, 170, 290):
        rows[number]["text"] = rows[number - 33]["text"]
    return write_jsonl(tmp_path / "train.jsonl.gz", rows), write_jsonl(tmp_path / "valid.jsonl", records(40, "v"))


def kill_and_repeat(tmp_path, text, way, trials, seed):
    whole = run(tmp_path / "whole", text, **WAYS[way])
    assert whole.returncode == 0, whole.stderr
    expected = contents(tmp_path / "whole")
    instants = int(whole.stdout.split()[0])
    assert instants > 30
    draw = random.Random(seed)
    for trial in range(trials):
        out = tmp_path / f"killed{trial}"
        for again in range(draw.choice([1, 1, 2])):
            killed = run(out, text, kill_at=draw.randint(1, instants if not again else instants // 2), **WAYS[way])
            if killed.returncode == 0:  # a second call has less left to do than the instant drawn
                break
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            assert not out.exists() or contents(out) == expected
        finished = run(out, text, **WAYS[way])
        assert finished.returncode == 0, finished.stderr
        assert contents(out) == expected
        assert neighbours(out) == [out.name]


@pytest.mark.parametrize(("way", "trials"), [("given", 3), ("split", 1), ("alone", 1)])
def test_killed_at_random_and_run_again(tmp_path, text, way, trials):
    kill_and_repeat(tmp_path, text, way, trials, seed=way)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "trials"), [("given", 20), ("split", 5), ("alone", 5)])
def test_killed_many_times_and_run_again(tmp_path, text, way, trials):
    kill_and_repeat(tmp_path, text, way, trials, seed=f"{way} {trials}")


def test_workers_end_with_their_parent(tmp_path, text):
    mark = f"parent-{tmp_path.name}-{time.time_ns()}"
    # Workers carry a mark in their command line. The parent dies when it has given out ten chunks.
    before = (
        f"import dwslm.data.workers as w; w._START += ' # {mark}'; sent = []; send = w._send\n"
        "def send_or_die(*frame):\n"
        "    send(*frame)\n"
        "    sent.append(frame)\n"
        "    len(sent) < 12 or os.kill(os.getpid(), signal.SIGKILL)\n"
        "w._send = send_or_die"
    )
    killed = run(tmp_path / "out", text, before=before, **WAYS["given"])
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while left := subprocess.run(["pgrep", "-f", f"^{sys.executable}.*{mark}"], capture_output=True).stdout:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
