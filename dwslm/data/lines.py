"""Lines of a file, plain or compressed, with damage told from a regular end."""

import gzip
import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20
_LONGEST_LINE = 1 << 30  # a damaged file without line ends must not fill the memory
_ZSTD_WINDOW = 1 << 31  # `zstd --long=31`; without this the library stops at 128 MiB


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a plain, .gz or .zst file, without their line ends; memory for a few lines at most.

    Raises:
        ValueError: the file is damaged or cut short, or has a line of more than a GiB.
    """
    number = 0
    lines = _lines(_blocks(path), path)
    while True:
        try:
            line = next(lines)
        except StopIteration:
            return
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            where = f"{path}:{number + 1}"
            raise ValueError(f"{where}: the compressed file is damaged or cut short ({error})") from None
        number += 1
        yield line


def _blocks(path: Path) -> Iterator[bytes]:
    if path.name.endswith(".zst"):
        yield from _zstd_blocks(path)
        return
    opener: Callable[[Path, str], Any] = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _zstd_blocks(path: Path) -> Iterator[bytes]:
    """Frame after frame; the library's own file reader would take a file cut short for a finished one."""
    zstandard = library("zstandard", path)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = decompressor.decompressobj()
    inside = False  # of a frame
    with path.open("rb") as file:
        while block := file.read(_BLOCK >> 4):  # few, since they can become thousands of times as many
            while block:
                try:
                    text = frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise zlib.error(str(error)) from None
                if text:
                    yield text
                inside = not frame.eof
                block = b""
                if frame.eof:
                    block = frame.unused_data
                    frame = decompressor.decompressobj()
    if inside:
        raise EOFError("the last frame has no end")


def _lines(blocks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        first, *rest = block.split(b"\n")
        parts.append(first)
        length += len(first)
        if length > _LONGEST_LINE:
            raise ValueError(f"{path}: a line of more than {_LONGEST_LINE >> 20} MiB; is this JSON lines?")
        if rest:
            yield b"".join(parts)
            yield from rest[:-1]
            parts = [rest[-1]]
            length = len(rest[-1])
    if length:
        yield b"".join(parts)


def library(name: str, what: object) -> Any:
    """Import a library that only this kind of input needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(f"{what}: reading it needs the package {package}; `pip install {package}`") from None
