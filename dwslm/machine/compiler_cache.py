"""Damaged files in compiler caches: what a power cut or a reset leaves behind, and what breaks the next run that reads them.

Inductor and Triton rename new files into place without a sync, so a reset leaves names without bytes. Some of these a compiler
takes for a miss, others (shared objects, generated Python, GPU binaries) stop every later run. A cache makes again what it does
not find, so what is damaged is moved aside and nothing is lost but time.
"""

import ast
import contextlib
import ctypes
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dwslm.machine.boot import alive, identity

RECENT_S = 60.0
"""A younger empty file may be one that another process is just writing."""
NEVER_EMPTY = (".lock", ".tmp")
"""Endings of files that are empty by nature or for a moment."""
INDEXES = ("fxgraph", "aotautograd")
"""Inductor's folders of entries that name what lies in the others."""
ELF = (".so", ".o", ".cubin", ".hsaco")
ELF_HEADER, ELF_64, ELF_LITTLE_ENDIAN = 64, 2, 1
TEXT = (".py", ".cpp", ".h", ".c", ".ttir", ".ttgir", ".llir", ".ptx", ".source", ".best_config")
MARKERS = "in-use"
"""Folder of a cache with one file for each process that uses it, removed when it ends cleanly."""


@dataclass(frozen=True)
class Damage:
    """A file of a cache that cannot be right, and why."""

    path: Path
    why: str


@dataclass(frozen=True)
class Moved:
    """What was moved: a folder of the cache that held a damaged file, or a file that lay at its top."""

    source: Path
    target: Path
    empty: list[str]
    """Names of the damaged files in it; none for an index that names what was moved."""


def scan(folder: Path, *, deep: bool = False, recent_s: float = RECENT_S) -> list[Damage]:
    """Damaged files under `folder`, in order; none where there is no such folder.

    Args:
        deep: read the files too: unreadable ones, JSON and Python that do not parse, binaries that are cut, text with zeros.
            Without it only sizes are looked at, some microseconds a file.
        recent_s: younger files are left out.
    """
    found = []
    latest = time.time() - recent_s
    for path in _files(folder):
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_mtime > latest:
            continue
        why = "empty" if status.st_size == 0 else _unreadable(path) if deep else None
        if why is not None:
            found.append(Damage(path, why))
    return sorted(found, key=lambda damage: damage.path)


def empty_files(folder: Path, recent_s: float = RECENT_S) -> list[Path]:
    """Empty files under `folder` that should not be, in order; none where there is no such folder."""
    return [damage.path for damage in scan(folder, recent_s=recent_s)]


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        if MARKERS in folders:
            folders.remove(MARKERS)
        for name in names:
            path = Path(parent, name)
            if not (name.endswith(NEVER_EMPTY) or name == "__init__.py" or path.is_symlink()):
                yield path


def _unreadable(path: Path) -> str | None:
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if path.suffix == ".json":
        try:
            json.loads(content)
        except ValueError:
            return "not JSON"
    elif path.suffix in ELF:
        return _damaged_binary(content)
    elif path.suffix in TEXT and b"\0" in content:
        return "zeros in text"
    elif path.suffix == ".py":
        try:
            ast.parse(content)
        except (SyntaxError, ValueError):
            return "not Python"
    elif not content.strip(b"\0"):
        return "nothing but zeros"
    return None


def _damaged_binary(content: bytes) -> str | None:
    """ELF files end with the table of their sections, whose place and size stand in the first 64 bytes (of the 64-bit kind)."""
    if not content.startswith(b"\x7fELF"):
        return "not a binary"
    if len(content) < ELF_HEADER:
        return "cut"
    if content[4] != ELF_64 or content[5] != ELF_LITTLE_ENDIAN:
        return None
    table = int.from_bytes(content[40:48], "little")
    size, entries = (int.from_bytes(content[at : at + 2], "little") for at in (58, 60))
    if table + size * entries > len(content):
        return "cut"
    # Its first entry is zeros in every file; all of them are only where they were never written.
    return (
        "zeros in a binary" if entries > 1 and not content[table + size : table + size * entries].strip(b"\0") else None
    )


def move_aside(folders: Iterable[Path], recent_s: float = RECENT_S, *, deep: bool = False) -> list[Moved]:
    """Moves every part of a cache that holds a damaged file to `<cache>-quarantine-<time>` beside it.

    The whole folder of an entry goes, not the damaged file alone: what is left would name a file that is no longer there. With
    anything but an index entry Inductor's indexes go too, since their entries name what lies elsewhere. What is refused stays.

    Returns:
        What was moved, in order.
    """
    moved = []
    for folder in folders:
        damaged = scan(folder, deep=deep, recent_s=recent_s)
        entries: dict[Path, list[str]] = {}
        for damage in damaged:
            entry = damage.path if damage.path.parent == folder else damage.path.parent
            entries.setdefault(entry, []).append(damage.path.name)
        if any(damage.path.relative_to(folder).parts[0] not in INDEXES for damage in damaged):
            for index in INDEXES:
                if (folder / index).is_dir():
                    entries.setdefault(folder / index, [])
        aside = quarantine(folder)
        for entry, names in sorted(entries.items(), key=lambda item: len(item[0].parts)):
            if entry.exists() and (target := _move(entry, aside / entry.relative_to(folder))):
                moved.append(Moved(entry, target, names))
    return moved


def move_all(folders: Iterable[Path]) -> list[Moved]:
    """Moves whole caches aside: where one is known to be damaged, but not which file of it."""
    moved = []
    for folder in folders:
        aside = quarantine(folder)
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.name != MARKERS and (target := _move(entry, aside / entry.name)):
                moved.append(Moved(entry, target, []))
    return moved


def quarantine(folder: Path) -> Path:
    """A folder beside the cache `folder` that is not there yet."""
    name = f"{folder.name}-quarantine-{time.strftime('%Y%m%d-%H%M%S')}"
    aside, number = folder.with_name(name), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{name}-{number}")
    return aside


def _move(entry: Path, target: Path) -> Path | None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        entry.rename(target)
    except OSError:
        return None
    return target


def size(folder: Path) -> tuple[int, int]:
    """Files and bytes under a folder."""
    files = total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
                files += 1
    return files, total


def remove(folder: Path) -> None:
    """Deletes a cache or a quarantine; what another process writes meanwhile may stay."""
    shutil.rmtree(folder, ignore_errors=True)


def sync_filesystem(folder: Path) -> bool:
    """Everything that was written to the file system of `folder` is on disk when this returns. False where it cannot be done."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0)
    except AttributeError:  # not Linux
        os.sync()
        return True
    finally:
        os.close(fd)


# ---- who uses a cache -----------------------------------------------------------------------------------


def begin(root: Path) -> tuple[Path | None, bool, bool]:
    """Marks a cache as used by this process.

    Returns:
        The marker, for `end` (None where it cannot be written); whether a process that used it did not end cleanly (a kill, a
        reset of the machine), which is forgotten with this call; and whether another process uses it now.
    """
    folder = root / MARKERS
    mine = folder / identity()
    unclean = others = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for marker in folder.iterdir():
            if marker == mine:
                continue
            if alive(marker.name):
                others = True
            else:
                unclean = True
                marker.unlink(missing_ok=True)
        mine.touch()
    except OSError:
        return None, unclean, others
    return mine, unclean, others


def users(root: Path) -> int:
    """How many living processes use a cache."""
    folder = root / MARKERS
    return sum(alive(marker.name) for marker in folder.iterdir()) if folder.is_dir() else 0


def end(marker: Path | None) -> None:
    """Takes the marker away, after a sync, so that "ended cleanly" means that the cache is on disk."""
    if marker is not None and marker.exists() and marker.name == identity():  # not a fork of the process that began
        sync_filesystem(marker.parent)
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
