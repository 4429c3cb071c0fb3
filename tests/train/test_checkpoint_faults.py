"""Checkpoints under kill -9 and on a disk that is full or fails."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dwslm.train import checkpoint
from dwslm.train.checkpoint import clean, find, newest_good, retain, save
from tests.train.checkpoint_child import PINNED, STEPS, content, put, same, steps

ROOT = Path(__file__).resolve().parents[2]
CHILD = ROOT / "tests" / "train" / "checkpoint_child.py"


# -- kill -9


def check_survivor(folder: Path) -> None:
    """The last one that was told safe loads, no half one is listed, and saving goes on."""
    root, notes = folder / "checkpoints", folder / "said"
    said = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    best, _ = newest_good(root)
    for one in find(root):
        one.verify()
    assert (best is not None) or not said
    if best is not None:
        turn = best.state["turn"]
        assert turn in ([said[-1][1], said[-1][1] + 1] if said else [0])
        model, optimizer, state = content(best.step, turn)
        assert same(best.load_model(), model) and same(best.load_optimizer(), optimizer)
        assert best.state == state and best.step == STEPS[turn]
    reached = {step for step, _ in said}
    assert set(PINNED) & reached <= set(steps(root))
    for step in set(PINNED) & reached:
        assert checkpoint.pins(root)[step] == list(PINNED[step])
    # The next attempt cleans up, and its save works.
    clean(root)
    assert not [name for name in os.listdir(root) if name.startswith(("tmp-", "replaced-"))] if root.exists() else True
    put(root, 1000, turn=3)
    retain(root, 1)
    assert steps(root)[0] == 1000 and set(steps(root)[1:]) <= set(PINNED)
    assert newest_good(root)[1] == []


def run_program(*arguments: str) -> int:
    out = subprocess.run(
        [sys.executable, CHILD, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert out.returncode == 0, out.stderr
    return int(out.stdout)


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill leaves the same there, and a sync costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        yield Path(where)


@pytest.mark.slow
def test_kill_nine_at_every_instant_of_a_save(memory_disk: Path) -> None:
    tried = run_program("phases", str(memory_disk))
    assert tried > 150  # two to each operation: five saves, two of them replacements, and the deletions
    for instant in range(1, tried + 1):
        check_survivor(memory_disk / str(instant))


@pytest.mark.slow
def test_kill_nine_at_random_instants(memory_disk: Path) -> None:
    for n in range(run_program("random", str(memory_disk), "40", "0")):
        check_survivor(memory_disk / str(n))


def test_what_a_killed_replacement_leaves_still_counts(tmp_path: Path) -> None:
    put(tmp_path, 10)
    final, replaced = tmp_path / "step-00000010", tmp_path / "replaced-step-00000010"
    final.rename(replaced)
    assert steps(tmp_path) == [10] and newest_good(tmp_path)[0] is not None
    assert clean(tmp_path) == ["put step-00000010 back: the save that was to replace it did not end"]
    shutil.copytree(final, replaced)
    (tmp_path / "tmp-step-00000020").mkdir()
    assert steps(tmp_path) == [10]
    assert clean(tmp_path) == [
        "removed replaced-step-00000010: step-00000010 has taken its place",
        "removed tmp-step-00000020: a save that did not end",
    ]
    assert os.listdir(tmp_path) == ["step-00000010"] and clean(tmp_path) == []


# -- the disk says no


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("again", [False, True])
def test_a_disk_that_fails_at_any_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int, again: bool
) -> None:
    """Fails the first, the second, ... operation of a save; up to the commit nothing may have changed."""
    target = 10 if again else 20
    for at in range(1, 30):
        root = tmp_path / str(at)
        put(root, 10, pins=("best",))
        before = sorted(os.listdir(root))
        left = at

        def fail(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError(failure, os.strerror(failure))
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "chmod"):
                patch.setattr(os, name, fail(getattr(os, name)))
            try:
                put(root, target, turn=5, pins=("phase",))
            except OSError as error:
                message = str(error)
                assert error.errno == failure and os.strerror(failure) in message and "\n" not in message
                assert message.startswith(("cannot save checkpoint ", "cannot delete "))
            else:
                assert left > 0  # all operations passed
                break
        best, rejected = newest_good(root)
        assert best is not None and rejected == []
        assert best.state["turn"] in (0, 5) and (10 in steps(root))
        if best.state["turn"] == 0:
            assert sorted(os.listdir(root)) == before
        put(root, 30)
    else:
        raise AssertionError("a save does not have that many operations")
    assert at > 5


LIMITED = """
import resource, signal, sys
import torch
from dwslm.train.checkpoint import save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save(sys.argv[1], 1, {"w": torch.ones(1000)}, {}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    save(sys.argv[1], 2, {"w": torch.ones(100_000)}, {}, {})
except OSError as error:
    print(error.errno, error)
"""


def test_a_write_that_ends_in_the_middle(tmp_path: Path) -> None:
    """A real short write, by the limit on a file's size: what writes tensors is not Python."""
    out = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert out.stdout.startswith(f"27 cannot save checkpoint {tmp_path}/step-00000002: model.safetensors: ")
    assert out.stdout.count("\n") == 1 and "File too large" in out.stdout
    assert os.listdir(tmp_path) == ["step-00000001"]
    best, rejected = newest_good(tmp_path)
    assert best is not None and best.step == 1 and rejected == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 6 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", where], capture_output=True)
    if done.returncode:
        pytest.skip("may not mount a file system here")
    yield where
    subprocess.run(["umount", where], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small_disk / "checkpoints"
    put(root, 10)
    large = {"w": torch.zeros(2_000_000)}
    with pytest.raises(OSError, match=r"step-00000020: 12 MB needed, 6 MB free; older checkpoints are") as caught:
        save(root, 20, large, {}, {})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(checkpoint, "_check_space", lambda folder, needed: None)  # another process took the room
    with pytest.raises(OSError, match=r"step-00000020: model.safetensors: .*No space left") as caught:
        save(root, 20, large, {}, {}, pins=("phase",))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(root) == ["step-00000010"]
    assert newest_good(root)[0] is not None
    put(root, 20)


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000))
    put(tmp_path, 11)
    with pytest.raises(OSError, match=r"cannot save checkpoint .*/step-00000020: 6 MB needed, 5 MB free"):
        save(tmp_path, 20, {"w": torch.zeros(400_000)}, {}, {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000011"]
