"""Inputs as chunks of about a MiB: reading is cheap and done in one place, parsing is dear and can be done anywhere.

A chunk is bytes: lines of a JSON lines file, a batch of rows of a Parquet file in Arrow's own form, or documents
that were parsed already (plain text, the `datasets` library). How inputs are cut into chunks depends on their
content alone, so a chunk's number means the same in every call.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dwslm.data.lines import CHUNK_BYTES, library, read_chunks_of_lines, split_lines
from dwslm.data.readers import (
    BadDocument,
    DatasetSource,
    Document,
    FieldSettings,
    Input,
    Item,
    checked,
    decode,
    document,
    list_files,
    not_utf8,
    relative_name,
)

_MAX_ROWS = 1 << 16  # of a Parquet batch, however small the rows are


class Part(NamedTuple):
    """One file of an input, or a whole `DatasetSource`."""

    given: Input
    file: Path | None
    kind: str
    """ "jsonl", "parquet", "text" or "datasets"."""
    size: int
    """Bytes on the disk; 0 where nobody can say."""


@dataclass(frozen=True)
class Chunk:
    """Documents that are handled together, in raw form; `parse` makes them of it."""

    kind: str
    """ "lines", "arrow" or "documents"."""
    path: str
    """For messages."""
    name: str
    """For the ids of documents that have none."""
    first: int
    """Number of the first line or row."""
    payload: bytes
    offset: int
    """Bytes of all files that were read to get here."""


def list_parts(inputs: Iterable[Input], form: str = "auto") -> list[Part]:
    """Every file of the inputs, in the order in which they are read; of a folder, in the order of their paths.

    Raises:
        FileNotFoundError, ValueError: as for `list_files`.
    """
    parts = []
    for given in inputs:
        if isinstance(given, DatasetSource):
            parts.append(Part(given, None, "datasets", 0))
        else:
            parts += [Part(given, file, kind, file.stat().st_size) for file, kind in list_files(given, form)]
    return parts


def read_documents(inputs: Iterable[Input], fields: FieldSettings, form: str = "auto") -> Iterator[Item]:
    """Every document of the inputs, in order.

    Args:
        inputs: files, folders and `DatasetSource`s.
        form: see `list_files`.

    Raises:
        FileNotFoundError: an input that is not there, or a folder with nothing to read.
        ValueError: an input of unknown kind, a damaged file, or a missing optional library.
    """
    for chunk in read_chunks(list_parts(inputs, form), fields):
        yield from parse(chunk, fields)


def read_chunks(parts: Iterable[Part], fields: FieldSettings) -> Iterator[Chunk]:
    """The chunks of the parts, in order.

    Raises:
        ValueError: a damaged file, or a missing optional library.
    """
    before = waiting = 0
    items: list[Item] = []  # documents of small text files that wait for a chunk to fill
    for part in parts:
        if part.kind == "text":
            assert part.file is not None and not isinstance(part.given, DatasetSource)
            items.append(_read_text(part.file, relative_name(part.file, part.given), fields))
            waiting += part.size
            if waiting >= CHUNK_BYTES:
                yield _parsed(items, before + part.size)
                items, waiting = [], 0
        else:
            if items:
                yield _parsed(items, before)
                items, waiting = [], 0
            if part.file is None:
                assert isinstance(part.given, DatasetSource)
                yield from _dataset_chunks(part.given, fields)
            else:
                assert not isinstance(part.given, DatasetSource)
                name = relative_name(part.file, part.given)
                read = _line_chunks if part.kind == "jsonl" else _parquet_chunks
                yield from read(part.file, name, before, fields)
        before += part.size
    if items:
        yield _parsed(items, before)


def parse(chunk: Chunk, fields: FieldSettings) -> Iterator[Item]:
    """The documents of a chunk, in order, with a `BadDocument` for each that cannot be used."""
    if chunk.kind == "lines":
        yield from _parse_lines(chunk, fields)
    elif chunk.kind == "arrow":
        yield from _parse_arrow(chunk, fields)
    else:
        for values in json.loads(chunk.payload.decode("utf-8", "surrogatepass")):
            yield Document(**values) if "text" in values else BadDocument(**values)


# ---------------------------------------------------------------------------------------------------- formats


def _line_chunks(path: Path, name: str, before: int, fields: FieldSettings) -> Iterator[Chunk]:
    for lines in read_chunks_of_lines(path):
        yield Chunk("lines", str(path), name, lines.first, lines.raw, before + lines.offset)


def _parse_lines(chunk: Chunk, fields: FieldSettings) -> Iterator[Item]:
    for number, line in enumerate(split_lines(chunk.payload), start=chunk.first):
        if not line or line.isspace():
            continue
        place = f"{chunk.path}:{number}"
        try:
            record = json.loads(decode(line))
        except json.JSONDecodeError as error:
            yield BadDocument(place, f"malformed JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:
            yield BadDocument(place, str(error))
        else:
            yield document(record, place, f"{chunk.name}:{number}", fields)


def _parquet_chunks(path: Path, name: str, before: int, fields: FieldSettings) -> Iterator[Chunk]:
    """Batch by batch through the row groups, only the columns that are asked for."""
    parquet = library("pyarrow.parquet", path)
    pyarrow = library("pyarrow", path)
    wanted = {value for key, value in vars(fields).items() if key.endswith("_field") and value}
    row, size = 0, path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            columns = [column for column in file.schema_arrow.names if column in wanted]
            rows = max(file.metadata.num_rows, 1)
            raw = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            batch_rows = min(max(CHUNK_BYTES * rows // max(raw, 1), 1), _MAX_ROWS)
            for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
                first, row = row + 1, row + batch.num_rows
                payload = sink.getvalue().to_pybytes()
                yield Chunk("arrow", str(path), name, first, payload, before + size * row // rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({_first_line(error)})") from None


def _parse_arrow(chunk: Chunk, fields: FieldSettings) -> Iterator[Item]:
    pyarrow = library("pyarrow", chunk.path)
    batch = pyarrow.ipc.open_stream(chunk.payload).read_next_batch()
    for row, record in enumerate(_rows(batch), start=chunk.first):
        place = f"{chunk.path}:row {row}"
        if isinstance(record, UnicodeDecodeError):
            yield BadDocument(place, not_utf8(record))
        else:
            yield document(record, place, f"{chunk.name}:{row}", fields)


def _rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Rows as dictionaries; one by one, so that one that is not UTF-8 does not take others with it."""
    for index in range(batch.num_rows):
        try:
            yield {name: batch.column(name)[index].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield error


def _read_text(path: Path, name: str, fields: FieldSettings) -> Item:
    for key in ("source", "language"):
        if not getattr(fields, key):
            raise ValueError(f"{path}: plain text has no fields; say its {key} with --{key} NAME")
    try:
        return checked(
            text=decode(path.read_bytes()),
            id=name,
            source=fields.source,
            language=fields.language,
            group="",
            licence=fields.licence,
            place=str(path),
        )
    except ValueError as error:
        return BadDocument(str(path), str(error))


def _dataset_chunks(origin: DatasetSource, fields: FieldSettings) -> Iterator[Chunk]:
    items: list[Item] = []
    size = 0
    for item in _read_dataset(origin, fields):
        items.append(item)
        size += len(item.text) if isinstance(item, Document) else 0
        if size >= CHUNK_BYTES:
            yield _parsed(items, 0)
            items, size = [], 0
    if items:
        yield _parsed(items, 0)


def _read_dataset(origin: DatasetSource, fields: FieldSettings) -> Iterator[Item]:
    datasets = library("datasets", origin.name)
    label = f"{origin.name}[{origin.split}]"
    folder = Path(origin.name)
    row = 0
    try:
        if (folder / "dataset_dict.json").is_file():  # written by save_to_disk, several splits
            records = datasets.load_from_disk(origin.name)[origin.split]
        elif (folder / "state.json").is_file():  # written by save_to_disk, one split
            records = datasets.load_from_disk(origin.name)
        else:
            records = datasets.load_dataset(origin.name, origin.config or None, split=origin.split, streaming=True)
        for record in records:
            row += 1
            yield document(record, f"{label}:row {row}", f"{folder.name}[{origin.split}]:{row}", fields)
    except Exception as error:  # the library raises many kinds: unknown names and splits, the network, the files
        raise ValueError(f"{label}: cannot read past row {row} ({_first_line(error)})") from None


def _parsed(items: list[Item], offset: int) -> Chunk:
    payload = json.dumps([asdict(item) for item in items], ensure_ascii=False)
    return Chunk("documents", "", "", 0, payload.encode("utf-8", "surrogatepass"), offset)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
