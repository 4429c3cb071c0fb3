"""Documents: what is known of each, which files they come from, and when one cannot be used.

Reading yields `Document`s, and a `BadDocument` (where, why) for each one that cannot be read, and goes on.
`accept` turns these into an error or a list, as the user chose. A file that ends early or whose compression
is damaged always stops the reading: nobody can say how many documents are lost with it.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIX = ".parquet"
FORMATS = ("auto", "jsonl", "parquet", "text")


@dataclass(frozen=True)
class Document:
    """One text and what is known of it. `place` (file and line, row or nothing) is for messages."""

    id: str
    text: str
    source: str
    language: str
    group: str
    licence: str
    place: str


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used, and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass
class FieldSettings:
    """Where a document's text, id, source, language, group and licence come from."""

    text_field: str = "text"
    """Field that holds the text."""
    id_field: str = "id"
    """Field that holds the id, unique over all inputs. Given empty: the file's name and the line make the id."""
    source_field: str = "source"
    """Field that names the source, the first key of every slice."""
    language_field: str = "language"
    """Field that names the language, the second key of every slice."""
    group_field: str = ""
    """Field shared by documents that the split must not part. Unless given, each document is its own group."""
    licence_field: str = ""
    """Field that names the licence, counted in the manifest. Unless given, none is."""
    source: str = ""
    """The source of every document, whatever its fields say."""
    language: str = ""
    """The language of every document, whatever its fields say."""
    licence: str = ""
    """The licence of every document, whatever its fields say."""

    def __post_init__(self) -> None:
        if not self.text_field:
            raise ValueError("--text-field is empty: name the field that holds the text")
        for name in ("source", "language"):
            if not getattr(self, name) and not getattr(self, f"{name}_field"):
                raise ValueError(
                    f"neither --{name} nor --{name}-field is given: give all documents one {name} or name its field"
                )


@dataclass(frozen=True)
class DatasetSource:
    """One split of something that the `datasets` library loads."""

    name: str
    """Name on the hub, or path of a local folder (also one written by `save_to_disk`)."""
    config: str = ""
    split: str = "train"


Input = Path | DatasetSource
Item = Document | BadDocument


def accept(items: Iterable[Item], skip_bad: int, bad: list[BadDocument]) -> Iterator[Document]:
    """Pass the documents on and collect the bad ones in `bad`, up to `skip_bad` of them.

    Raises:
        ValueError: one more bad document than that; place and reason are in the message.
    """
    for item in items:
        if isinstance(item, Document):
            yield item
        else:
            reject(item, skip_bad, bad)


def reject(item: BadDocument, skip_bad: int, bad: list[BadDocument]) -> None:
    """Add one to the list of bad documents, or stop if that is one too many."""
    if len(bad) >= skip_bad:
        beyond = f" (and {skip_bad} bad documents before it)" if skip_bad else ""
        raise ValueError(f"{item}{beyond}; mend it, or leave out up to N such documents with --skip-bad N")
    bad.append(item)


def list_files(path: Path, form: str = "auto") -> list[tuple[Path, str]]:
    """The files that an input path stands for, each with its kind: "jsonl", "parquet" or "text".

    Args:
        form: "auto" goes by a file's name, and takes a folder without .jsonl* or .parquet files for one of
            plain text; "jsonl", "parquet" and "text" say it outright.

    Raises:
        FileNotFoundError: an input that is not there, or a folder with nothing to read.
        ValueError: an input of unknown kind.
    """
    if form not in FORMATS:
        raise ValueError(f"format={form!r}: must be one of {', '.join(FORMATS)}")
    if path.is_file():
        kind = _kind(path) if form == "auto" else form
        if kind is None:
            raise ValueError(
                f"{path}: cannot tell from its name what it holds; give --format, or name it "
                f"{', '.join(JSONL_SUFFIXES)}, {PARQUET_SUFFIX} or .txt"
            )
        return [(path, kind)]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = sorted(_walk(path))
    records = [(file, kind) for file in files if (kind := _kind(file)) in ("jsonl", "parquet")]
    if form == "auto" and records and len(records) < len(files):
        other = next(file for file in files if _kind(file) not in ("jsonl", "parquet"))
        raise ValueError(
            f"{path} holds both {records[0][0].name} and {other.name}: give --format to say which kind to read"
        )
    if form == "text" or (form == "auto" and not records):
        found = [(file, "text") for file in files]
    else:
        found = [(file, kind) for file, kind in records if form in ("auto", kind)]
    if not found:
        raise FileNotFoundError(f"{path} holds no files to read" + ("" if form == "auto" else f" of format {form}"))
    return found


def relative_name(file: Path, given: Path) -> str:
    """A file's name wherever the input lies: its path in the folder that was given, or its own name."""
    return file.relative_to(given).as_posix() if given.is_dir() else file.name


def _kind(path: Path) -> str | None:
    if path.name.endswith(JSONL_SUFFIXES):
        return "jsonl"
    return {PARQUET_SUFFIX: "parquet", ".txt": "text"}.get(path.suffix)


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder, hidden ones aside."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


# ---------------------------------------------------------------------------------------------- one document


def document(record: Any, place: str, own_id: str, fields: FieldSettings) -> Item:
    """The document of a record with named fields, or why there is none; `own_id` is for one without an id."""
    if not isinstance(record, dict):
        return BadDocument(place, f"not an object with fields but a {type(record).__name__}")
    try:
        return checked(
            text=_field(record, "text", fields),
            id=_field(record, "id", fields, numbers=True) if fields.id_field else own_id,
            source=fields.source or _field(record, "source", fields),
            language=fields.language or _field(record, "language", fields),
            group=_field(record, "group", fields, numbers=True) if fields.group_field else "",
            licence=fields.licence or (_field(record, "licence", fields) if fields.licence_field else ""),
            place=place,
        )
    except ValueError as error:
        return BadDocument(place, str(error))


def _field(record: dict, key: str, fields: FieldSettings, *, numbers: bool = False) -> str:
    name = getattr(fields, f"{key}_field")
    if name not in record or record[name] is None:
        way_out = f"name another with --{key}-field NAME"
        if key == "id":
            way_out += ', or take file name and line as ids with --id-field ""'
        elif hasattr(fields, key):
            way_out += f", or give all documents one with --{key} NAME"
        raise ValueError(f"no field {name!r} ({way_out})")
    value = record[name]
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is not text but a {type(value).__name__}")
    return value


def checked(*, text: str, id: str, source: str, language: str, group: str, licence: str, place: str) -> Document:
    """A document of these properties.

    Raises:
        ValueError: an empty one, or one that is not valid Unicode.
    """
    if not text.strip():
        raise ValueError("empty document")
    named = {"text": text, "id": id, "source": source, "language": language, "group": group or id}
    for name, value in named.items():
        if not value:
            raise ValueError(f"empty {name}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            surrogate = f"U+{ord(value[error.start]):04X} at character {error.start}"
            raise ValueError(f"{name} is not valid Unicode: lone surrogate {surrogate}") from None
    return Document(**named, licence=licence, place=place)


def decode(raw: bytes) -> str:
    """UTF-8 to text; ValueError names the first byte that is not."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that do not decode."""
    return f"not valid UTF-8: byte 0x{error.object[error.start]:02X} at offset {error.start}"
