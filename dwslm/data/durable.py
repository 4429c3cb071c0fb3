"""Small files that are whole or not there, and renames that survive a power cut."""

import json
import os
from pathlib import Path
from typing import Any


def json_bytes(value: Any) -> bytes:
    """A value as readable JSON, the same bytes for the same value."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all: temporary name, fsync, rename, fsync of the folder."""
    tmp = path.with_name(path.name + ".tmp")
    with tmp.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
