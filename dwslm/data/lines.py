"""Lines of a file, plain or compressed, with damage told from a regular end."""

import gzip
import importlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CHUNK_BYTES = 1 << 20  # of lines that are handled together: small beside memory, large beside what a hand-over costs
_BLOCK = 1 << 20
_LONGEST_LINE = 1 << 30  # a damaged file without line ends must not fill the memory
_ZSTD_WINDOW = 1 << 31  # `zstd --long=31`; without this the library stops at 128 MiB


class Lines(NamedTuple):
    """Some lines of a file, one after the other."""

    first: int
    """Number of the first, counted from 1."""
    raw: bytes
    """The lines with their ends; the last line of a file may lack its own."""
    offset: int
    """Bytes of the file, as it lies on the disk, that were read to get here."""


def read_chunks_of_lines(path: Path) -> Iterator[Lines]:
    """A plain, .gz or .zst file, cut behind the first line that brings a chunk to `CHUNK_BYTES`.

    Where it is cut depends on the text alone, not on how it is compressed.

    Raises:
        ValueError: the file is damaged or cut short (after all lines before that), or has a line of more than
            a GiB.
    """
    parts: list[bytes] = []
    size = number = offset = 0
    line_bytes = 0  # of the line under way
    failure = None
    blocks = _blocks(path)
    while True:
        try:
            text, offset = next(blocks)
        except StopIteration:
            break
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            failure = error
            break
        start = 0
        while (cut := text.find(b"\n", start + max(0, CHUNK_BYTES - size - 1)) + 1) > 0:
            raw = b"".join((*parts, text[start:cut]))
            yield Lines(number + 1, raw, offset)
            number += raw.count(b"\n")
            parts, size, start, line_bytes = [], 0, cut, 0
        parts.append(text[start:])
        size += len(text) - start
        last_end = text.rfind(b"\n", start)
        line_bytes = line_bytes + len(text) - start if last_end < 0 else len(text) - 1 - last_end
        if line_bytes > _LONGEST_LINE:
            raise ValueError(f"{path}: a line of more than {_LONGEST_LINE >> 20} MiB; is this JSON lines?")
    raw = b"".join(parts)
    if failure is not None:
        raw = raw[: len(raw) - line_bytes]
    if raw:
        yield Lines(number + 1, raw, offset)
    if failure is not None:
        number += raw.count(b"\n")
        raise ValueError(f"{path}:{number + 1}: the compressed file is damaged or cut short ({failure})")


def split_lines(raw: bytes) -> list[bytes]:
    """Lines without their ends; b"" has none, and a last line needs no end."""
    lines = raw.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Text of a file, piece by piece, with the bytes of the file read so far."""
    with path.open("rb") as file:
        if path.name.endswith((".gz", ".zst")) and not os.fstat(file.fileno()).st_size:
            raise EOFError("it has no bytes, and even no text has some when compressed")
        if path.name.endswith(".zst"):
            yield from _zstd_blocks(path, file)
            return
        text: Any = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
        while block := text.read(_BLOCK):
            yield block, file.tell()


def _zstd_blocks(path: Path, file: Any) -> Iterator[tuple[bytes, int]]:
    """Frame after frame; the library's own file reader would take a file cut short for a finished one."""
    zstandard = library("zstandard", path)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = decompressor.decompressobj()
    inside = False  # of a frame
    while block := file.read(_BLOCK >> 4):  # few, since they can become thousands of times as many
        while block:
            try:
                text = frame.decompress(block)
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None
            if text:
                yield text, file.tell()
            inside = not frame.eof
            block = b""
            if frame.eof:
                block = frame.unused_data
                frame = decompressor.decompressobj()
    if inside:
        raise EOFError("the last frame has no end")


def library(name: str, what: object) -> Any:
    """Import a library that only this kind of input needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(f"{what}: reading it needs the package {package}; `pip install {package}`") from None
