"""Numbers out of JSON lines by field, read on as the file grows.

A row of a long run is one of tens of thousands, and a page wants a handful of its numbers. Arrow parses such files several times
faster than Python; what it refuses (a damaged line, a number as text, an infinity) is parsed again by the rules of `runs.reader`.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.json

from dwslm.runs.durable import from_json

CHUNK = 1 << 22  # bytes parsed at once, so that one odd line costs no more than its chunk
WHOLE = ("step", "tokens", "attempt")
"""Whole numbers; a row without step and attempt is no row."""


class Columns:
    """The rows of one file so far. `read` takes in what was appended since; a file that was replaced is read anew.

    Every column is float64, NaN where a row lacks the field or holds no number there. A nested field is named `outer.inner`.
    """

    def __init__(self, path: str | os.PathLike[str], fields: tuple[str, ...], *, needs: tuple[str, ...] = ()):
        """fields: names of the columns; needs: those without which a row is left out."""
        self.path, self.fields, self.needs = Path(path), fields, needs
        self._start()

    def _start(self) -> None:
        self._offset, self._inode = 0, 0
        self._parts: dict[str, list[np.ndarray]] = {name: [np.empty(0)] for name in self.fields}

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts[self.fields[0]])

    def __getitem__(self, name: str) -> np.ndarray:
        parts = self._parts[name]
        if len(parts) > 1:
            self._parts[name] = parts = [np.concatenate(parts)]
        return parts[0]

    def read(self) -> bool:
        """Returns whether there was anything new. Raises OSError where the file cannot be read."""
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self._offset or (self._inode and status.st_ino != self._inode):
                self._start()
            self._inode = status.st_ino
            before = self._offset
            file.seek(before)
            while chunk := file.read(CHUNK):
                end = chunk.rfind(b"\n") + 1
                if not end:  # a line longer than a chunk
                    chunk += file.readline()
                    end = chunk.rfind(b"\n") + 1
                if not end:
                    break  # no newline yet: it is being written, or torn
                self._add(chunk, end)
                self._offset += end
                file.seek(self._offset)
        return self._offset > before

    def _add(self, chunk: bytes, end: int) -> None:
        found = None
        if chunk.isascii() and b"\0" not in chunk:  # ours are; others may not even be UTF-8
            found = self._arrow(memoryview(chunk)[:end])
            if found is None and b': "NaN"' in chunk:  # the one oddity that a sound file has
                found = self._arrow(memoryview(chunk[:end].replace(b': "NaN"', b": null")))
        if found is None:
            found = self._python(chunk[:end])
        keep = np.ones(len(found[self.fields[0]]), bool)
        for name in self.needs:
            keep &= np.isfinite(found[name])
        for name, values in found.items():
            self._parts[name].append(values if keep.all() else values[keep])

    def _arrow(self, chunk: memoryview) -> dict[str, np.ndarray] | None:
        """None where Arrow refuses the chunk."""
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(chunk), 1))
        parse = pyarrow.json.ParseOptions(explicit_schema=_schema(self.fields), unexpected_field_behavior="ignore")
        try:
            table = pyarrow.json.read_json(pyarrow.BufferReader(chunk), read_options=read, parse_options=parse)
        except pyarrow.ArrowException:
            return None
        found = {}
        for name in self.fields:
            outer, _, inner = name.partition(".")
            column = table.column(outer).combine_chunks()
            if inner:
                column = column.flatten()[column.type.get_field_index(inner)]
            found[name] = column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        return found

    def _python(self, chunk: bytes) -> dict[str, np.ndarray]:
        rows: list[list[float]] = []
        for line in chunk.split(b"\n"):
            line = line.strip(b"\0")
            try:
                row = from_json(line.decode("utf-8")) if line else None
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append([_number(row, name) for name in self.fields])
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(self.fields))
        return {name: table[:, i] for i, name in enumerate(self.fields)}


def _number(row: dict[str, Any], name: str) -> float:
    outer, _, inner = name.partition(".")
    value = row.get(outer)
    if inner:
        value = value.get(inner) if isinstance(value, dict) else None
    right = int if outer in WHOLE else int | float
    if not isinstance(value, right) or isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return float("nan")


def _schema(fields: tuple[str, ...]) -> pyarrow.Schema:
    """Of the wanted fields alone."""
    nested: dict[str, list[str]] = {}
    for name in fields:
        outer, _, inner = name.partition(".")
        nested.setdefault(outer, []).append(inner)
    number = pyarrow.float64()
    types = {
        outer: pyarrow.struct([(name, number) for name in inner])
        if inner != [""]
        else (pyarrow.int64() if outer in WHOLE else number)
        for outer, inner in nested.items()
    }
    return pyarrow.schema(list(types.items()))
