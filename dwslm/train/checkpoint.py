"""Checkpoints that are whole or not there: saving, finding, pinning, deleting.

    checkpoints/
        step-00000400/                               written once, never changed
            model.safetensors                        float32 master weights by parameter name
            optimizer-00000-of-00001.safetensors     one file a rank
            state.json                               cursors, schedule, guard window, configuration
            manifest.json                            size and sha256 of each file, shapes of the model
        step-00000400.pin-best                       a reason to keep it, an empty file each

The order of a save: everything into `tmp-step-<n>`, the manifest last; fsync files and folder; rename;
fsync the parent. The caller (`saver`) then logs its event, and only then calls `retain`. So a folder under its final
name is whole at any instant, and an older one goes only when the newer is safe. One process at a time
writes here: the run's lock sees to it. Within it one thread does, and the loop only while that one rests.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dwslm.runs.durable import disk_error, sync, write_synced
from dwslm.train.distributed import Ranks
from dwslm.train.shared_save import SharedSave
from dwslm.train.stored import (
    MANIFEST,
    MODEL,
    REPLACED,
    STATE,
    Checkpoint,
    check_verify,
    open_checkpoint,
    optimizer_file,
    step_name,
    step_of,
    write_manifest,
    write_tensors,
)

MARGIN_BYTES = 4 << 20  # headers, the manifest and the file system's own blocks, on top of the tensors


@dataclass
class CheckpointSettings:
    every_tokens: int = 250_000_000
    """Save whenever this many more tokens have been seen (rounded to whole steps)."""

    keep_last: int = 3
    """How many of the newest checkpoints to keep. Pinned ones are kept besides and never count."""

    pin_fractions: list[float] = field(default_factory=lambda: [0.75])
    """Fractions of the planned tokens at which a checkpoint is saved exactly and pinned. At 0.75 the decay
    begins, so other ways through the last quarter can start from there."""

    verify: str = "sha256"
    """What a resume checks before it trusts a checkpoint: `sha256` reads every file, `size` none."""

    max_failures: int = 3
    """The run fails when this many saves in a row have failed, on a full disk for instance. Until then it trains on, and
    older checkpoints stay."""

    grace_seconds: float = 30.0
    """How long whatever starts this run waits between asking it to leave (TERM) and killing it: torchrun and Slurm 30 s, unless
    told otherwise. A note says so where saving takes too long for it."""

    def __post_init__(self) -> None:
        if self.every_tokens < 1:
            raise ValueError(f"checkpoint.every_tokens={self.every_tokens}: must be at least 1")
        if self.keep_last < 1:
            raise ValueError(f"checkpoint.keep_last={self.keep_last}: must be at least 1")
        for fraction in self.pin_fractions:
            if not 0 < fraction <= 1:
                raise ValueError(f"checkpoint.pin_fractions holds {fraction}: must lie in (0, 1]")
        if self.max_failures < 1:
            raise ValueError(f"checkpoint.max_failures={self.max_failures}: must be at least 1")
        if not self.grace_seconds > 0:
            raise ValueError(f"checkpoint.grace_seconds={self.grace_seconds}: must be above 0")
        check_verify(self.verify)


def save(
    root: str | os.PathLike[str],
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
    *,
    pins: Iterable[str] = (),
    shared: SharedSave | None = None,
) -> Checkpoint:
    """Writes `<root>/step-<step>` and returns once it is on disk, pinned for each reason in `pins`.

    `shared`: the save of a rank 0 among several; the others call `save_share`, `optimizer` is its own share, and the caller
    tells them how it ended.
    `state` is strict JSON (finite numbers, string keys, no tuples), so that it comes back equal. A
    checkpoint of the same step is replaced: the run came to this step anew, and its weights are the ones
    that count.
    Raises OSError, one line, where the disk is full or fails: nothing new is left then, and the older ones
    are as they were.
    """
    folder, name = Path(root), step_name(step)
    final, tmp, replaced = folder / name, folder / f"tmp-{name}", folder / f"{REPLACED}{name}"
    reasons = [_check_reason(reason) for reason in pins]
    shared = shared or SharedSave(Ranks(), 0)
    state_text = json.dumps(state, allow_nan=False)
    assert json.loads(state_text) == state, "checkpoint state: string keys, lists and no tuples, or it changes"
    new_pins: list[Path] = []
    try:
        folder.mkdir(exist_ok=True)  # a run's folder that is gone is not made anew, without its record
        clean(folder)
        sequence = 1 + max((one.manifest["sequence"] for one in _open_all(folder)[0]), default=0)
        # Ranks share the optimizer's state about evenly.
        tensor_bytes = sum(t.nbytes for t in model.values()) + shared.world * sum(t.nbytes for t in optimizer.values())
        _check_space(folder, tensor_bytes + len(state_text) + MARGIN_BYTES)
        tmp.mkdir()
        shared.begun()
        write_tensors(tmp / MODEL, model)
        write_tensors(tmp / optimizer_file(0, shared.world), optimizer)
        write_synced(tmp / STATE, state_text)
        shared.wait_written()
        manifest = write_manifest(tmp, step, sequence, model, shared.world)
        sync(tmp)
        # Pins first: at no instant could retention see this checkpoint without them.
        for path in (_pin_path(folder, step, reason) for reason in reasons):
            if not path.exists():
                path.touch()
                new_pins.append(path)
        if final.exists():  # a folder cannot be renamed onto a full one; readers know both names
            final.rename(replaced)
        tmp.rename(final)
        sync(folder)
    except BaseException as error:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        if tmp.exists():  # not committed
            shutil.rmtree(tmp, ignore_errors=True)
            for path in new_pins:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(f"cannot save checkpoint {final}", error) from error
        raise
    if replaced.exists():
        _delete(replaced)
    return Checkpoint(final, step, manifest)


def save_share(root: str | os.PathLike[str], step: int, optimizer: Mapping[str, Tensor], shared: SharedSave) -> None:
    """A rank's part of a save whose rank 0 calls `save`: writes its file, and returns once the whole is on disk.

    Raises OSError where any rank could not do its part; the caller tells the others of this one's.
    """
    shared.wait_begun()
    try:
        write_tensors(Path(root) / f"tmp-{step_name(step)}" / optimizer_file(shared.rank, shared.world), optimizer)
    except OSError as error:
        # Rank 0 may have given up and taken the folder away: what it says is the reason, here as everywhere.
        shared.failed(error)
        shared.wait_committed()
        raise
    shared.written()
    shared.wait_committed()


def clean(root: str | os.PathLike[str]) -> list[str]:
    """Puts in order what a killed save left, with a line for each thing done. `save` begins with it."""
    folder = Path(root)
    done = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith("tmp-step-"):
            shutil.rmtree(path)
            done.append(f"removed {path.name}: a save that did not end")
        elif path.name.startswith(REPLACED) and step_of(path) is not None:
            final = folder / path.name.removeprefix(REPLACED)
            if final.exists():
                _delete(path)
                done.append(f"removed {path.name}: {final.name} has taken its place")
            else:
                path.rename(final)
                done.append(f"put {final.name} back: the save that was to replace it did not end")
    if done:
        sync(folder)
    return done


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        told = f"{needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free; older checkpoints are untouched"
        raise OSError(errno.ENOSPC, told)


def find(root: str | os.PathLike[str]) -> list[Checkpoint]:
    """The checkpoints that have all their files at full length, unread, most recently saved first."""
    found = []
    for checkpoint in _open_all(Path(root))[0]:
        try:
            checkpoint.verify("size")
        except ValueError:
            continue
        found.append(checkpoint)
    return found


def newest_good(
    root: str | os.PathLike[str], verify: str = "sha256"
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The most recently saved checkpoint that verifies, and what was found unusable, each with the reason.

    None where there is no checkpoint at all, the only case for a start from nothing.
    Raises ValueError where there are some and none verifies.
    """
    check_verify(verify)
    opened, rejected = _open_all(Path(root))
    for checkpoint in opened:
        try:
            checkpoint.verify(verify)
            return checkpoint, rejected
        except ValueError as error:
            rejected.append((checkpoint.path, str(error)))
    if rejected:
        reasons = "; ".join(reason for _, reason in rejected)
        raise ValueError(f"{root} has checkpoints but none that can be used: {reasons}")
    return None, []


def newest_before(root: str | os.PathLike[str], step: int) -> Checkpoint | None:
    """The most recently saved checkpoint of a step below `step` that verifies in full; None where there is none."""
    for checkpoint in find(root):
        if checkpoint.step < step:
            with contextlib.suppress(ValueError):
                checkpoint.verify()
                return checkpoint
    return None


def _open_all(root: Path) -> tuple[list[Checkpoint], list[tuple[Path, str]]]:
    """Those with a whole manifest, most recently saved first, and the rest with the reason."""
    opened: list[Checkpoint] = []
    rejected: list[tuple[Path, str]] = []
    for path in _step_folders(root):
        try:
            opened.append(open_checkpoint(path))
        except ValueError as error:
            rejected.append((path, str(error)))
    opened.sort(key=lambda checkpoint: checkpoint.manifest["sequence"], reverse=True)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if step_of(path) is None and not path.name.startswith("tmp-") and (path / MANIFEST).exists():
            rejected.append((path, f"{path} was renamed: a checkpoint is named step-<n>"))
    return opened, rejected


def _step_folders(root: Path) -> list[Path]:
    """Everything under a checkpoint's name, highest step first; one being replaced only without its heir."""
    found: dict[int, Path] = {}
    for path in root.iterdir() if root.is_dir() else []:
        step = step_of(path)
        if step is not None and not (path.name.startswith(REPLACED) and step in found):
            found[step] = path
    return [found[step] for step in sorted(found, reverse=True)]


def pins(root: str | os.PathLike[str]) -> dict[int, list[str]]:
    """Step -> sorted reasons why its checkpoint is kept."""
    found: dict[int, list[str]] = {}
    for path in sorted(Path(root).glob("step-*.pin-*")):
        if match := re.fullmatch(r"step-(\d{8,})\.pin-(.+)", path.name):
            found.setdefault(int(match[1]), []).append(match[2])
    return found


def pin(root: str | os.PathLike[str], step: int, reason: str) -> None:
    """Keeps the checkpoint of `step` until every reason is taken away. ValueError where there is none."""
    folder = Path(root)
    if not (folder / step_name(step) / MANIFEST).is_file():
        there = ", ".join(str(checkpoint.step) for checkpoint in find(folder)) or "none"
        raise ValueError(f"cannot pin step {step}: no such checkpoint in {folder}, which has {there}")
    _pin_path(folder, step, _check_reason(reason)).touch()
    sync(folder)


def unpin(root: str | os.PathLike[str], step: int, reason: str) -> None:
    """Takes one reason away. Raises ValueError where the checkpoint is not pinned for it."""
    folder = Path(root)
    try:
        _pin_path(folder, step, _check_reason(reason)).unlink()
    except FileNotFoundError as error:
        held = ", ".join(pins(folder).get(step, [])) or "nothing"
        raise ValueError(f"step {step} in {folder} is not pinned for {reason}, but for {held}") from error
    sync(folder)


def retain(root: str | os.PathLike[str], keep_last: int) -> list[Path]:
    """Deletes what is neither pinned nor among the `keep_last` most recently saved; returns what went.

    Only checkpoints with all their files count as kept, so one that is cut short never pushes out a good one.
    Call it after the newest is committed and its event is written.
    """
    assert keep_last >= 1
    folder = Path(root)
    pinned = pins(folder)
    kept = [one.path for one in find(folder) if one.step not in pinned][:keep_last]
    deleted = []
    for path in _step_folders(folder):
        # Pins are looked up again for each: a person may set one meanwhile.
        if path in kept or step_of(path) in pins(folder):
            continue
        half_deleted = not (path / MANIFEST).exists()
        if half_deleted or len(kept) == keep_last:  # a damaged one goes when enough good ones are left
            _delete(path)
            deleted.append(path)
    return deleted


def _delete(path: Path) -> None:
    """The manifest first, so that a deletion cut short leaves no checkpoint."""
    try:
        (path / MANIFEST).unlink(missing_ok=True)
        sync(path)
        shutil.rmtree(path)
        sync(path.parent)
    except OSError as error:
        raise disk_error(f"cannot delete {path}", error) from error


def _pin_path(root: Path, step: int, reason: str) -> Path:
    return root / f"{step_name(step)}.pin-{reason}"


def _check_reason(reason: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", reason):
        raise ValueError(f"pin reason {reason!r}: up to 64 letters, digits, dots, dashes and underscores")
    return reason
