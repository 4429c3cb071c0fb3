"""Empty files in compiler caches: what a power cut or a reset leaves behind, and what breaks the next run that reads them."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RECENT_S = 60.0
"""A younger empty file may be one that another process is just writing."""
NEVER_EMPTY = (".lock", ".tmp")
"""Endings of files that are empty by nature or for a moment."""


@dataclass(frozen=True)
class Moved:
    """What was moved: a folder of the cache that held an empty file, or a file that lay at its top."""

    source: Path
    target: Path
    empty: list[str]
    """Names of the empty files in it."""


def empty_files(folder: Path, recent_s: float = RECENT_S) -> list[Path]:
    """Empty files under `folder` that should not be, in order; none where there is no such folder."""
    found = []
    latest = time.time() - recent_s
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if name.endswith(NEVER_EMPTY) or name == "__init__.py" or path.is_symlink():
                continue
            try:
                status = path.stat()
            except OSError:
                continue
            if status.st_size == 0 and status.st_mtime < latest:
                found.append(path)
    return sorted(found)


def move_aside(folders: Iterable[Path], recent_s: float = RECENT_S) -> list[Moved]:
    """Moves every part of a cache that holds an empty file to `<cache>-empty-<time>` beside it.

    The whole folder of an entry goes, not the empty file alone: what is left would name a file that is no longer there. A cache
    makes again what it does not find, so nothing is lost but time. What cannot be moved stays.

    Returns:
        What was moved, in order.
    """
    moved = []
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for folder in folders:
        aside = folder.with_name(f"{folder.name}-empty-{stamp}")
        entries: dict[Path, list[str]] = {}
        for path in empty_files(folder, recent_s):
            entry = path if path.parent == folder else path.parent
            entries.setdefault(entry, []).append(path.name)
        for entry, names in sorted(entries.items(), key=lambda item: len(item[0].parts)):
            if not entry.exists():  # it went with the folder around it
                continue
            target = aside / entry.relative_to(folder)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                entry.rename(target)
            except OSError:
                continue
            moved.append(Moved(entry, target, names))
    return moved
