"""Files that survive a crash, strict JSON, and one clear line where the disk says no."""

import json
import math
import os
from pathlib import Path
from typing import Any

SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How the numbers that JSON lacks are written. Browsers and other parsers refuse Python's own bare NaN."""

ENCODER = json.JSONEncoder(allow_nan=False)


def to_json(value: Any) -> str:
    """`value` as one line of strict JSON, non-finite floats as the strings of `SPELLED`.

    Raises ValueError where the value holds something that is not plain data (a tensor, a path, an array).
    """
    try:
        try:
            return ENCODER.encode(value)
        except ValueError:  # rare, so that the usual row pays for one pass only
            return ENCODER.encode(_spell(value))
    except TypeError as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error


def from_json(text: str) -> Any:
    """The value that `to_json` wrote; the strings of `SPELLED` become floats again. Raises ValueError."""
    value = json.loads(text)
    return _unspell(value) if "NaN" in text or "Infinity" in text else value


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value


def _unspell(value: Any) -> Any:
    if isinstance(value, str):
        return SPELLED.get(value, value)
    if isinstance(value, dict):
        return {key: _unspell(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unspell(item) for item in value]
    return value


def sync(path: Path) -> None:
    """fsync of a file or a folder. A folder holds the names, so a new file is safe only after both."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, text: str) -> None:
    """A new file with `text`, on disk when this returns (its name is on disk after `sync(path.parent)`)."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def disk_error(doing: str, error: OSError) -> OSError:
    """`error` told as one line that names what failed and where; `errno` is kept."""
    told = OSError(f"{doing}: {error.strerror or error}")
    told.errno = error.errno
    return told
