"""Checkpoints: what comes back, what is refused, and what kills and full disks leave behind."""

import errno
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dwslm.train import checkpoint
from dwslm.train.checkpoint import CheckpointSettings, clean, find, newest_good, open_checkpoint, retain, save

CHILD = Path(__file__).with_name("checkpoint_child.py")
ROOT = Path(__file__).resolve().parents[2]


def load_child() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_child", CHILD)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


child = load_child()


def put(root: Path, step: int, turn: int = 0, pins: tuple[str, ...] = ()) -> Path:
    return save(root, step, *child.content(step, turn), pins=pins).path


def steps(root: Path) -> list[int]:
    return [one.step for one in find(root)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = {
        "embedding": torch.randn(7, 3).to(torch.bfloat16),
        "gain": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "view": torch.randn(4, 6).t(),  # not contiguous
        "empty": torch.zeros(0, 5),
    }
    optimizer = {"gain.step": torch.tensor(3, dtype=torch.int64), "gain.radius": torch.tensor(1 / 3)}
    state = {
        "row": 2**40,
        "lr": 0.1 + 0.2,
        "rng": [1, 2, 3],
        "guard": {"window": [1e-300, None]},
        "name": "é",
    }
    made = save(tmp_path / "new" / "checkpoints", 123, model, optimizer, state)
    assert made.path.name == "step-00000123"
    best, rejected = newest_good(tmp_path / "new" / "checkpoints")
    assert best is not None and best.step == 123 and rejected == []
    loaded = best.load_model()
    for name, tensor in model.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        as_bytes = [t.contiguous().view(torch.uint8).tolist() for t in (loaded[name], tensor)]
        assert as_bytes[0] == as_bytes[1]
    assert same(best.load_optimizer(), optimizer)
    assert best.state == state
    assert best.manifest["model"]["embedding"] == {"shape": [7, 3], "dtype": "bfloat16"}


def test_the_folder_holds_what_the_layout_says(tmp_path: Path) -> None:
    path = put(tmp_path, 400, pins=("best", "phase-0.75"))
    assert sorted(os.listdir(path)) == [
        "manifest.json", "model.safetensors", "optimizer-00000-of-00001.safetensors", "state.json",
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == [
        "step-00000400", "step-00000400.pin-best", "step-00000400.pin-phase-0.75",
    ]  # fmt: skip
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 1 and manifest["step"] == 400 and manifest["world"] == 1
    for name, written in manifest["files"].items():
        told = subprocess.run(["sha256sum", path / name], capture_output=True, text=True, check=True).stdout
        assert (written["sha256"], written["bytes"]) == (told.split()[0], (path / name).stat().st_size)
    assert sorted(manifest["files"]) == sorted(set(os.listdir(path)) - {"manifest.json"})
    assert same(load_file(path / "model.safetensors"), child.content(400, 0)[0])  # any reader of safetensors
    modes = {stat.S_IMODE((path / name).stat().st_mode) for name in os.listdir(path)}
    assert modes == {stat.S_IMODE(path.stat().st_mode) & 0o666}  # who may read the run may read them


def test_everything_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_sync(fd)

    def rename(source: Path, target: Path) -> None:
        log.append(f"{Path(source).name} -> {Path(target).name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    put(tmp_path, 1)
    files = ["model.safetensors", "optimizer-00000-of-00001.safetensors", "state.json", "manifest.json"]
    assert log == [*files, "tmp-step-00000001", "tmp-step-00000001 -> step-00000001", tmp_path.name]


def test_state_that_json_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no tuples"):
        save(tmp_path, 1, {}, {}, {"rng": (1, 2)})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(tmp_path, 1, {}, {}, {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


# -- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


FILES = ("model.safetensors", "optimizer-00000-of-00001.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_a_damaged_newest_is_passed_over_and_named(tmp_path: Path, name: str, damage: str) -> None:
    put(tmp_path, 10)
    path = put(tmp_path, 20) / name
    size = path.stat().st_size
    if damage == "flip":
        flip(path, size // 2)
    elif damage == "missing":
        path.unlink()
    else:
        os.truncate(path, size - 1 if damage == "cut" else 0)
        if damage == "cut" and name == "manifest.json":
            os.truncate(path, size - 3)  # its last byte is only a newline
    best, rejected = newest_good(tmp_path)
    assert best is not None and best.step == 10 and same(best.load_model(), child.content(10, 0)[0])
    [(bad, reason)] = rejected
    assert bad == tmp_path / "step-00000020"
    assert name in reason and "step-00000020" in reason and "\n" not in reason
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.raises(ValueError, match="has checkpoints but none that can be used: .*step-00000020"):
        newest_good(tmp_path)  # and not a start from nothing
    put(tmp_path, 30)
    retain(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step-00000030"]


def test_every_byte_counts(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    for name in FILES:
        size = (path / name).stat().st_size
        for at in sorted({0, 7, 8, 9, size // 3, size - 2, *range(11, size, max(1, size // 40))}):
            flip(path / name, at)
            try:
                one = open_checkpoint(path)
                one.verify()
                # what may pass is a change that changes nothing, such as another white space
                assert name == "manifest.json" and one.manifest["step"] == 1
                assert same(one.load_model(), child.content(1, 0)[0])
            except ValueError:
                pass
            flip(path / name, at)
    open_checkpoint(path).verify()


def test_size_alone_may_be_asked_for(tmp_path: Path) -> None:
    put(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "model.safetensors", -1)
    assert newest_good(tmp_path, "size")[0] is not None
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: its sha256 differs"):
        newest_good(tmp_path, "sha256")
    with pytest.raises(ValueError, match="checkpoint.verify='md5': must be sha256 or size"):
        newest_good(tmp_path, "md5")
    (tmp_path / "step-00000001" / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        open_checkpoint(tmp_path / "step-00000001").load_model()


def test_a_checkpoint_renamed_by_hand_is_not_taken_for_another(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20).rename(tmp_path / "step-00000099")
    best, [(path, reason)] = newest_good(tmp_path)
    assert best is not None and best.step == 10
    assert path.name == "step-00000099" and "was renamed: its manifest says step 20" in reason
    shutil.rmtree(tmp_path / "step-00000010")
    (tmp_path / "step-00000099").rename(tmp_path / "step-20.bak")
    with pytest.raises(ValueError, match=r"none that can be used: .*step-20\.bak was renamed"):
        newest_good(tmp_path)  # nor is it taken for nothing
    assert open_checkpoint(tmp_path / "step-20.bak").step == 20  # by its path it can still be had


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "absent") == (None, [])
    assert find(tmp_path / "absent") == [] and checkpoint.pins(tmp_path / "absent") == {}
    (tmp_path / "tmp-step-00000010").mkdir()
    (tmp_path / "tmp-step-00000010" / "manifest.json").write_text("{}")
    assert newest_good(tmp_path) == (None, [])  # the first save never ended
    with pytest.raises(ValueError, match=r"absent is no whole checkpoint: it has no manifest\.json"):
        open_checkpoint(tmp_path / "absent")


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dwslm.train import stored

    monkeypatch.setattr(stored, "FORMAT_VERSION", 2)
    put(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 2, this program reads 1"):
        newest_good(tmp_path)


def test_another_model_is_named_by_its_first_tensor(tmp_path: Path) -> None:
    one = open_checkpoint(put(tmp_path, 1))
    right = {"head": torch.Size([64, 32]), "gain": torch.Size([32])}
    one.check_matches(right)
    with pytest.raises(ValueError, match=r"model: head has shape \[64, 32\] there and \[32, 64\] here"):
        one.check_matches({"head": torch.Size([32, 64]), "gain": torch.Size([1])})
    with pytest.raises(ValueError, match="step-00000001 is of another model: it has no bias, which"):
        one.check_matches({"bias": torch.Size([1]), **right})
    with pytest.raises(ValueError, match="it has gain, which this one has not"):
        one.check_matches({"head": torch.Size([64, 32])})


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    one = open_checkpoint(put(tmp_path, 1))
    with pytest.raises(ValueError, match="was written by 1 ranks, this run has 2"):
        one.load_optimizer(rank=1, world=2)


# -- the same step again, and going back


def test_saving_a_step_again_replaces_it_and_keeps_its_pins(tmp_path: Path) -> None:
    put(tmp_path, 10, turn=1, pins=("best",))
    put(tmp_path, 10, turn=2)
    best, _ = newest_good(tmp_path)
    assert best is not None and best.state["turn"] == 2 and same(best.load_model(), child.content(10, 2)[0])
    assert checkpoint.pins(tmp_path) == {10: ["best"]}
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000010.pin-best"]


def test_the_newest_is_the_last_saved_even_after_going_back(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step)
    put(tmp_path, 15)  # the run went back to 10 and took another way
    assert steps(tmp_path) == [15, 30, 20, 10]
    best, _ = newest_good(tmp_path)
    assert best is not None and best.step == 15
    assert {path.name for path in retain(tmp_path, 2)} == {"step-00000010", "step-00000020"}


def test_a_cut_checkpoint_never_pushes_out_a_good_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step)
    for step in (20, 30):
        os.truncate(tmp_path / f"step-000000{step}" / "model.safetensors", 5)
    assert retain(tmp_path, 2) == []
    put(tmp_path, 40)
    assert len(retain(tmp_path, 2)) == 2
    assert steps(tmp_path) == [40, 10]


# -- pins


def test_pins_by_hand(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        put(tmp_path, step)
    checkpoint.pin(tmp_path, 10, "hand")
    checkpoint.pin(tmp_path, 10, "hand")
    checkpoint.pin(tmp_path, 10, "best")
    retain(tmp_path, 1)
    assert steps(tmp_path) == [40, 10] and checkpoint.pins(tmp_path) == {10: ["best", "hand"]}
    checkpoint.unpin(tmp_path, 10, "hand")
    retain(tmp_path, 1)
    assert steps(tmp_path) == [40, 10]
    checkpoint.unpin(tmp_path, 10, "best")
    retain(tmp_path, 1)
    assert steps(tmp_path) == [40]
    with pytest.raises(ValueError, match=r"cannot pin step 10: no such checkpoint in .*, which has 40"):
        checkpoint.pin(tmp_path, 10, "hand")
    with pytest.raises(ValueError, match="step 40 in .* is not pinned for best, but for nothing"):
        checkpoint.unpin(tmp_path, 40, "best")
    for reason in ("", "a/b", "two words", "../x"):
        with pytest.raises(ValueError, match="pin reason .*: up to 64 letters"):
            checkpoint.pin(tmp_path, 40, reason)
        with pytest.raises(ValueError, match="pin reason"):
            put(tmp_path, 50, pins=(reason,))
    assert steps(tmp_path) == [40]


def test_a_damaged_pinned_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    put(tmp_path, 10, pins=("phase",))
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    for step in (20, 30):
        put(tmp_path, step)
        retain(tmp_path, 1)
    assert (tmp_path / "step-00000010" / "model.safetensors").exists()
    assert steps(tmp_path) == [30]


ACTION = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 6), st.sampled_from([(), (), ("phase",), ("best", "hand")])),
    st.tuples(st.just("pin"), st.integers(1, 6), st.sampled_from(["best", "hand"])),
    st.tuples(st.just("unpin"), st.integers(1, 6), st.sampled_from(["best", "phase"])),
    st.tuples(st.just("retain"), st.integers(1, 3), st.none()),
)


@given(st.lists(ACTION, min_size=1, max_size=14))
@settings(max_examples=40)
def test_any_sequence_keeps_every_pin_and_the_last(
    tmp_path_factory: pytest.TempPathFactory, acts: list
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    there: dict[int, int] = {}  # step -> turn, in the order of saving
    pinned: dict[int, set[str]] = {}
    for turn, (act, number, extra) in enumerate(acts):
        if act == "save":
            tensor = {"w": torch.tensor([number, turn])}
            save(root, number, tensor, {}, {"turn": turn}, pins=extra)
            there.pop(number, None)
            there[number] = turn
            pinned.setdefault(number, set()).update(extra)
        elif act == "pin" and number in there:
            checkpoint.pin(root, number, extra)
            pinned[number].add(extra)
        elif act == "unpin" and extra in pinned.get(number, ()):
            checkpoint.unpin(root, number, extra)
            pinned[number].remove(extra)
        elif act == "retain":
            retain(root, number)
            last = [step for step in reversed(there) if not pinned[step]][:number]
            there = {step: t for step, t in there.items() if pinned[step] or step in last}
        assert {one.step: one.state["turn"] for one in find(root)} == there
        assert steps(root) == list(reversed(there))
        assert checkpoint.pins(root) == {step: sorted(why) for step, why in sorted(pinned.items()) if why}


# -- kill -9


def check_survivor(folder: Path) -> None:
    """Whatever the instant: the last one that was told safe loads, no half one is listed, and saving goes on."""
    root = folder / "checkpoints"
    said = (
        [json.loads(line) for line in (folder / "said").read_text().splitlines()]
        if (folder / "said").exists()
        else []
    )
    best, _ = newest_good(root)
    for one in find(root):
        one.verify()
    assert (best is not None) or not said
    if best is not None:
        turn = best.state["turn"]
        assert turn in ([said[-1][1], said[-1][1] + 1] if said else [0])
        model, optimizer, state = child.content(best.step, turn)
        assert same(best.load_model(), model) and same(best.load_optimizer(), optimizer)
        assert best.state == state and best.step == child.STEPS[turn]
    reached = {step for step, _ in said}
    assert set(child.PINNED) & reached <= set(steps(root))
    for step in set(child.PINNED) & reached:
        assert checkpoint.pins(root)[step] == list(child.PINNED[step])
    # The next attempt cleans up, and its save works.
    clean(root)
    assert (
        not [name for name in os.listdir(root) if name.startswith(("tmp-", "replaced-"))]
        if root.exists()
        else True
    )
    put(root, 1000, turn=3)
    retain(root, 1)
    assert steps(root)[0] == 1000 and set(steps(root)[1:]) <= set(child.PINNED)
    assert newest_good(root)[1] == []


def run_child(*arguments: str) -> int:
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
    tried = run_child("phases", str(memory_disk))
    assert tried > 150  # two to each operation: five saves, two of them replacements, and the deletions
    for instant in range(1, tried + 1):
        check_survivor(memory_disk / str(instant))


@pytest.mark.slow
def test_kill_nine_at_random_instants(memory_disk: Path) -> None:
    for n in range(run_child("random", str(memory_disk), "40", "0")):
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
    with pytest.raises(
        OSError, match=r"step-00000020: 12 MB needed, 6 MB free; older checkpoints are"
    ) as caught:
        save(root, 20, large, {}, {})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(
        checkpoint, "_check_space", lambda folder, needed: None
    )  # another process took the room
    with pytest.raises(OSError, match=r"step-00000020: model.safetensors: .*No space left") as caught:
        save(root, 20, large, {}, {}, pins=("phase",))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(root) == ["step-00000010"]
    assert newest_good(root)[0] is not None
    put(root, 20)


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000))
    put(tmp_path, 11)
    with pytest.raises(OSError, match=r"cannot save checkpoint .*/step-00000020: 6 MB needed, 5 MB free"):
        save(tmp_path, 20, {"w": torch.zeros(400_000)}, {}, {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000011"]


def test_settings_are_checked() -> None:
    assert CheckpointSettings().pin_fractions == [0.75]
    for wrong, message in (
        ({"every_tokens": 0}, "checkpoint.every_tokens=0: must be at least 1"),
        ({"keep_last": 0}, "checkpoint.keep_last=0: must be at least 1"),
        ({"pin_fractions": [0.5, 75]}, r"checkpoint.pin_fractions holds 75: must lie in \(0, 1\]"),
        ({"verify": "crc"}, "checkpoint.verify='crc': must be sha256 or size"),
    ):
        with pytest.raises(ValueError, match=message):
            CheckpointSettings(**wrong)  # type: ignore[arg-type]
