"""One checkpoint on disk: its files, the manifest that vouches for them, and reading them back.

No pickle anywhere: tensors are safetensors, the rest is JSON.
"""

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dwslm.optim.shares import join
from dwslm.runs.durable import sync, write_synced

FORMAT_VERSION = 1
MODEL, STATE, MANIFEST = "model.safetensors", "state.json", "manifest.json"
# A checkpoint that a save of the same step is replacing: it counts as step-<n> until the new one is that.
REPLACED = "replaced-"


def optimizer_file(rank: int, world: int) -> str:
    return f"optimizer-{rank:05d}-of-{world:05d}.safetensors"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name claims; None where it is not a checkpoint's name."""
    match = re.fullmatch(rf"(?:{REPLACED})?step-(\d{{8,}})", path.name)
    return int(match[1]) if match else None


def check_verify(how: str) -> None:
    if how not in ("sha256", "size"):
        raise ValueError(f"checkpoint.verify={how!r}: must be sha256 or size")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole and fits its folder's name; `verify` tells about its files."""

    path: Path
    step: int
    manifest: dict[str, Any]

    def verify(self, how: str = "sha256") -> None:
        """Raises ValueError, one line with the file's name, unless every file is as it was written."""
        check_verify(how)
        for name, written in self.manifest["files"].items():
            path = self.path / name
            try:
                size = path.stat().st_size
                if size != written["bytes"]:
                    raise ValueError(f"{path} has {size} bytes, {written['bytes']} were written")
                if how == "sha256" and _sha256(path) != written["sha256"]:
                    raise ValueError(f"{path} is damaged: its sha256 differs from the manifest's")
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error

    def check_matches(self, expected: Mapping[str, torch.Size]) -> None:
        """Raises ValueError naming the first tensor unlike `expected` (parameter name -> shape)."""
        held = {name: list(entry["shape"]) for name, entry in self.manifest["model"].items()}
        other = f"{self.path} is of another model"
        for name, shape in expected.items():
            if name not in held:
                raise ValueError(f"{other}: it has no {name}, which this one needs")
            if held[name] != list(shape):
                raise ValueError(f"{other}: {name} has shape {held[name]} there and {list(shape)} here")
        for name in held:
            if name not in expected:
                raise ValueError(f"{other}: it has {name}, which this one has not")

    def load_model(self) -> dict[str, Tensor]:
        """Parameter name -> weights on the CPU, in the dtype saved."""
        return _load(self.path / MODEL)

    @property
    def world(self) -> int:
        """How many ranks wrote it."""
        return int(self.manifest["world"])

    def load_optimizer(self) -> dict[str, Tensor]:
        """The optimizer state of all ranks on the CPU, whole blocks under their names, however many ranks wrote it.

        Raises ValueError where a file cannot be read, or they do not fit together.
        """
        try:
            return join([_load(self.path / optimizer_file(rank, self.world)) for rank in range(self.world)])
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}" if str(self.path) not in str(error) else str(error)) from error

    @property
    def state(self) -> dict[str, Any]:
        """The JSON given to `save`, equal to what it was."""
        try:
            state: dict[str, Any] = json.loads((self.path / STATE).read_text(encoding="utf-8"))
            return state
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / STATE} cannot be read: {error}") from error


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in this folder; its other files are not looked at.

    Raises ValueError where the manifest is missing or damaged, or where the folder has another step's name.
    A copy under a name that is no `step-<n>` is taken as it is.
    """
    folder = Path(path)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(manifest):
            raise ValueError("its own checksum differs")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is no whole checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged: {error}") from error
    if (version := manifest["format_version"]) != FORMAT_VERSION:
        raise ValueError(f"{folder} has format version {version}, this program reads {FORMAT_VERSION}")
    if step_of(folder) not in (None, manifest["step"]):
        raise ValueError(f"{folder} was renamed: its manifest says step {manifest['step']}")
    return Checkpoint(folder, manifest["step"], manifest)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, on disk when this returns. Raises OSError."""
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_cpu, path)
    except SafetensorError as error:  # it tells a full disk in words only
        found = re.search(r"os error (\d+)", str(error))
        raise OSError(int(found[1]) if found else errno.EIO, f"{path.name}: {error}") from error
    # safetensors makes files that only their owner can read; let them follow the folder like the rest
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)


def write_manifest(folder: Path, step: int, sequence: int, model: Mapping[str, Tensor], world: int) -> dict[str, Any]:
    """Vouches for every file that is in `folder` now; the last file of a checkpoint. Returns what it wrote.

    `sequence` is the order of saving, which differs from the order of steps once a run went back to an
    older one.
    """
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    shapes = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in model.items()
    }
    manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "step": step, "sequence": sequence}
    manifest |= {"time": time.time(), "world": world, "files": files, "model": shapes}
    manifest["sha256"] = _digest(manifest)
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    """sha256 of the manifest's other entries: no other file vouches for them."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
