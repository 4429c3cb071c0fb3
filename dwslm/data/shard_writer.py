"""Writing a dataset's shards so that a kill at any instant loses at most the shard under way."""

import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import IO, Any

import numpy as np

from dwslm.data.shards import COUNTS, DOC_DTYPE, FORMAT_VERSION, file_sha256, token_dtype

_MAX_NAMES = 1 << 16  # source and language are uint16
_MAX_COUNT = (1 << 32) - 1  # tokens and bytes of one document are uint32
_OWN_FILE = re.compile(r"\d{5,}\.(bin|docs\.npy|table\.npy|shard\.json)(\.tmp)?|manifest\.json\.tmp")


def is_finished(path: Path) -> bool:
    """Whether a folder holds a finished dataset; if so, working files that a kill left in it are removed."""
    if not (path / "manifest.json").is_file():
        return False
    for pattern in ("*.table.npy", "*.shard.json"):
        for file in path.glob(pattern):
            file.unlink()
    sync_folder(path)
    return True


class ShardWriter:
    """Writes one dataset, document by document, so that it can be killed at any instant and taken up again.

    A shard under way is a `.tmp` file. A finished one is three files, and the last of them
    (`NNNNN.shard.json`, its counts and checksums) makes it count. A writer opened on a folder keeps the
    finished shards, deletes what is left of the others, and says in `documents` how many documents it has,
    for the caller to skip.
    Sources and languages are numbered as they are met until `finish` sorts them, so that their numbers depend
    on the names alone.

    Args:
        path: folder of the dataset, made if missing.
        vocab_size, eod, tokenizer_hash: go into the manifest; `vocab_size` decides the token type.
        shard_tokens: a shard is closed by the document that brings it to this many tokens.

    Raises:
        ValueError: the folder already holds a finished dataset, or a setting is out of range.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int, eod: int, tokenizer_hash: str, shard_tokens: int = 1 << 27
    ):
        if not 0 <= eod < vocab_size:
            raise ValueError(f"eod={eod}: not an id of a vocabulary of {vocab_size}")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens={shard_tokens}: must be at least 1")
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.eod = eod
        self.tokenizer_hash = tokenizer_hash
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.path.mkdir(parents=True, exist_ok=True)
        if is_finished(self.path):
            raise ValueError(f"{self.path} already holds a finished dataset; remove it or write elsewhere")
        self._shards = self._finished_shards()
        self._file: IO[bytes] | None = None
        self._open_shard()

    @property
    def documents(self) -> int:
        """Documents in finished shards: what a writer opened on this folder again would already have."""
        return sum(shard["documents"] for shard in self._shards)

    @property
    def empty(self) -> bool:
        """Whether no document was added yet, neither now nor before."""
        return not self._shards and not self._rows

    def add(
        self,
        tokens: np.ndarray,
        *,
        text_bytes: int,
        source: str,
        language: str,
        id_hash: int,
        licence: str = "",
    ) -> None:
        """Append one document.

        Args:
            tokens: [n] ids, n > 0, all below `vocab_size`; no end-of-document token.
            text_bytes: length of its text in UTF-8 bytes.
            source, language, licence: names; an empty licence is not counted.
            id_hash: `id_hash` of its id.
        """
        assert len(tokens) > 0 and int(tokens.max()) < self.vocab_size
        if len(tokens) > _MAX_COUNT or text_bytes > _MAX_COUNT:
            raise ValueError(f"a document of {text_bytes} bytes does not fit the table (4 GiB at most); split it")
        if self._file is None:
            self._file = (self.path / f"{self._name}.bin.tmp").open("wb")
        raw = tokens.astype(self.dtype).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        row = (
            self._tokens,
            len(tokens),
            text_bytes,
            self._index(source, 0),
            self._index(language, 1),
            id_hash,
        )
        self._rows.append(row)
        self._tokens += len(tokens)
        _add_counts(self._slices, (source, language), (1, len(tokens), text_bytes))
        if licence:
            _add_counts(self._licences, licence, (1, len(tokens), text_bytes))
        if self._tokens >= self.shard_tokens:
            self._close_shard()

    def finish(self, *, made_by: dict[str, Any], licence_texts: dict[str, str] | None = None) -> dict[str, Any]:
        """Close the last shard, number sources and languages by name, write and return the manifest.

        Raises:
            ValueError: not one document was added, or more sources or languages than a table can number.
        """
        if self._rows:
            self._close_shard()
        if not self._shards:
            raise ValueError(f"{self.path}: no document to write")
        sources = sorted({name for shard in self._shards for name in shard["sources"]})
        languages = sorted({name for shard in self._shards for name in shard["languages"]})
        for kind, names in (("sources", sources), ("languages", languages)):
            if len(names) > _MAX_NAMES:
                raise ValueError(f"{len(names)} different {kind}: a table can number {_MAX_NAMES}")
        slices: dict[Any, list[int]] = {}
        licences: dict[Any, list[int]] = {}
        for shard in self._shards:
            for source, language, *counts in shard["slices"]:
                _add_counts(slices, (source, language), counts)
            for licence, *counts in shard["licences"]:
                _add_counts(licences, licence, counts)
        manifest = {
            "format_version": FORMAT_VERSION,
            "tokenizer_hash": self.tokenizer_hash,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "dtype": {2: "uint16", 4: "uint32"}[self.dtype.itemsize],
            "sources": sources,
            "languages": languages,
            "totals": {count: sum(shard[count] for shard in self._shards) for count in COUNTS},
            "slices": [
                {"source": source, "language": language, **dict(zip(COUNTS, counts, strict=True))}
                for (source, language), counts in sorted(slices.items())
            ],
            "shards": [self._number_table(shard, sources, languages) for shard in self._shards],
            "licences": {
                licence: {
                    **dict(zip(COUNTS, counts, strict=True)),
                    "text": (licence_texts or {}).get(licence),
                }
                for licence, counts in sorted(licences.items())
            },
            "made_by": made_by,
        }
        write_durably(self.path / "manifest.json", json_bytes(manifest))
        is_finished(self.path)
        return manifest

    def close(self) -> None:
        """Let go of the shard under way, without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finished_shards(self) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = []
        keep: set[str] = set()
        while (record := self.path / f"{len(shards):05d}.shard.json").is_file():
            name = f"{len(shards):05d}"
            shards.append(json.loads(record.read_bytes()))
            keep |= {f"{name}.bin", f"{name}.table.npy", f"{name}.shard.json"}
        for file in self.path.iterdir():
            if _OWN_FILE.fullmatch(file.name) and file.name not in keep:
                file.unlink()
        return shards

    def _open_shard(self) -> None:
        self._name = f"{len(self._shards):05d}"
        self._digest = hashlib.sha256()
        self._tokens = 0
        self._rows: list[tuple[int, ...]] = []
        self._names: tuple[dict[str, int], dict[str, int]] = (
            {},
            {},
        )  # sources, languages of this shard, as met
        self._slices: dict[Any, list[int]] = {}
        self._licences: dict[Any, list[int]] = {}

    def _index(self, name: str, which: int) -> int:
        index = self._names[which].setdefault(name, len(self._names[which]))
        if index >= _MAX_NAMES:
            raise ValueError(f"more than {_MAX_NAMES} different {('sources', 'languages')[which]} in one shard")
        return index

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        bin_path = self.path / f"{self._name}.bin"
        os.replace(bin_path.with_name(bin_path.name + ".tmp"), bin_path)
        table = np.array(self._rows, dtype=DOC_DTYPE)
        _save_table(self.path / f"{self._name}.table.npy", table)
        shard = {
            "name": self._name,
            "documents": len(table),
            "tokens": self._tokens,
            "bytes": int(table["bytes"].sum(dtype=np.uint64)),
            "bin_bytes": bin_path.stat().st_size,
            "bin_sha256": self._digest.hexdigest(),
            "sources": list(self._names[0]),
            "languages": list(self._names[1]),
            "slices": [[*key, *counts] for key, counts in sorted(self._slices.items())],
            "licences": [[key, *counts] for key, counts in sorted(self._licences.items())],
        }
        write_durably(self.path / f"{self._name}.shard.json", json_bytes(shard))
        self._shards.append(shard)
        self._open_shard()

    def _number_table(self, shard: dict[str, Any], sources: list[str], languages: list[str]) -> dict[str, Any]:
        """Write a shard's final table, its names numbered as in the manifest; the shard's manifest entry."""
        table = np.load(self.path / f"{shard['name']}.table.npy", allow_pickle=False)
        table["source"] = np.array([sources.index(name) for name in shard["sources"]], "<u2")[table["source"]]
        table["language"] = np.array([languages.index(name) for name in shard["languages"]], "<u2")[table["language"]]
        docs_path = self.path / f"{shard['name']}.docs.npy"
        _save_table(docs_path, table)
        kept = ("name", *COUNTS, "bin_bytes", "bin_sha256")
        return {
            **{key: shard[key] for key in kept},
            "docs_bytes": docs_path.stat().st_size,
            "docs_sha256": file_sha256(docs_path),
        }


def _add_counts(totals: dict[Any, list[int]], key: Any, counts: tuple[int, ...] | list[int]) -> None:
    totals[key] = [a + b for a, b in zip(totals.get(key, [0, 0, 0]), counts, strict=True)]


def _save_table(path: Path, table: np.ndarray) -> None:
    # Through memory: numpy's own writing to a file reports a full disk as an error without a number.
    buffer = io.BytesIO()
    np.save(buffer, table, allow_pickle=False)
    write_durably(path, buffer.getvalue())


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
