"""Checkpoints: what comes back, what is refused, what is kept."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dwslm.train import checkpoint
from dwslm.train.checkpoint import CheckpointSettings, find, newest_good, open_checkpoint, retain, save
from tests.train.checkpoint_child import content, put, same, steps


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
    (tmp_path / "new").mkdir()
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


def test_the_folder_of_a_run_that_is_gone_is_not_made_anew(tmp_path):
    """Somebody moved it; checkpoints beside it would lack its record."""
    with pytest.raises(OSError, match="cannot save checkpoint .*/moved/checkpoints/step-00000001: No such file"):
        save(tmp_path / "moved" / "checkpoints", 1, {"w": torch.ones(3)}, {}, {})
    assert not list(tmp_path.iterdir())


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
    assert same(load_file(path / "model.safetensors"), content(400, 0)[0])  # any reader of safetensors
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
    assert best is not None and best.step == 10 and same(best.load_model(), content(10, 0)[0])
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
                assert same(one.load_model(), content(1, 0)[0])
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


# -- the same step again, and going back


def test_saving_a_step_again_replaces_it_and_keeps_its_pins(tmp_path: Path) -> None:
    put(tmp_path, 10, turn=1, pins=("best",))
    put(tmp_path, 10, turn=2)
    best, _ = newest_good(tmp_path)
    assert best is not None and best.state["turn"] == 2 and same(best.load_model(), content(10, 2)[0])
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


def test_a_deletion_begins_with_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    real_unlink, real_sync = os.unlink, os.fsync

    def unlink(path: Path, **how: Any) -> None:
        log.append(f"unlink {Path(path).name}")
        real_unlink(path, **how)

    def fsync(fd: int) -> None:
        log.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        real_sync(fd)

    put(tmp_path, 10)
    put(tmp_path, 20)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "fsync", fsync)
    assert retain(tmp_path, 1) == [tmp_path / "step-00000010"]
    assert log[:2] == ["unlink manifest.json", "fsync step-00000010"]
    assert log[-1] == f"fsync {tmp_path.name}"


def test_the_rest_of_a_deletion_is_told_and_then_removed(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20)
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    assert steps(tmp_path) == [20]
    assert newest_good(tmp_path)[1] == [
        (
            tmp_path / "step-00000010",
            f"{tmp_path}/step-00000010 is no whole checkpoint: it has no manifest.json",
        )
    ]
    assert retain(tmp_path, 3) == [tmp_path / "step-00000010"]
    assert os.listdir(tmp_path) == ["step-00000020"]


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
def test_any_sequence_keeps_every_pin_and_the_last(tmp_path_factory: pytest.TempPathFactory, acts: list) -> None:
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
