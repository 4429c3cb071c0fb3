"""Writing a dataset's shards so that a kill at any instant loses at most the shard under way."""

import hashlib
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dwslm.data.durable import json_bytes, sync_folder, write_durably
from dwslm.data.shards import COUNTS, DOC_DTYPE, FORMAT_VERSION, file_sha256, token_dtype

_MAX_NAMES = 1 << 16  # source and language are uint16
_MAX_COUNT = (1 << 32) - 1  # tokens and bytes of one document are uint32
_OWN_FILE = re.compile(r"\d{5,}\.(bin|docs\.npy|table\.npy|merge\.npy|shard\.json)(\.tmp)?|manifest\.json\.tmp")

MERGE_DTYPE = np.dtype([("text_hash", "<u8"), ("licence", "<u4")])
"""What a piece keeps of each document beyond `DOC_DTYPE`; `licence` indexes the sorted names, "" before them."""

_PART = np.dtype([*DOC_DTYPE.descr, *MERGE_DTYPE.descr])


@dataclass(frozen=True)
class Documents:
    """Several documents, in the order in which they are to be written. Each array has one entry a document."""

    tokens: np.ndarray
    """[sum of lengths] ids of all, one after the other, all below the vocabulary's size."""
    lengths: np.ndarray
    """Tokens of each, all above 0."""
    text_bytes: np.ndarray
    id_hash: np.ndarray
    source: np.ndarray
    """Index into `sources`; likewise `language` and `licence`."""
    language: np.ndarray
    licence: np.ndarray
    sources: list[str]
    languages: list[str]
    licences: list[str]
    """The empty name stands for no licence."""
    text_hash: np.ndarray
    """For pieces that are to be merged without duplicates; else zeros."""


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
        for_merge: keep what `merge` needs of each document, in `NNNNN.merge.npy` beside the shards.

    Raises:
        ValueError: the folder already holds a finished dataset, or a setting is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        eod: int,
        tokenizer_hash: str,
        shard_tokens: int = 1 << 27,
        for_merge: bool = False,
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
        self.for_merge = for_merge
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
    def position(self) -> int | None:
        """The `position` given with the last document in finished shards, or None where there are none."""
        return self._shards[-1]["position"] if self._shards else None

    @property
    def empty(self) -> bool:
        """Whether no document was added yet, neither now nor before."""
        return not self._shards and not self._tables

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
        one = np.zeros(1, np.int64)
        self.add_many(
            Documents(
                tokens=tokens,
                lengths=one + len(tokens),
                text_bytes=one + text_bytes,
                id_hash=np.array([id_hash], np.uint64),
                source=one,
                language=one,
                licence=one,
                sources=[source],
                languages=[language],
                licences=[licence],
                text_hash=one,
            )
        )

    def add_many(self, documents: Documents, position: int = 0) -> None:
        """Append documents.

        Args:
            position: where they come from, for the caller to find the place again.

        Raises:
            ValueError: a document that is too large for the table, or too many names in one shard.
        """
        lengths = documents.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        assert not len(lengths) or int(lengths.min()) > 0 and int(ends[-1]) == len(documents.tokens)
        assert not len(lengths) or int(documents.tokens.max()) < self.vocab_size
        largest = max(int(documents.text_bytes.max(initial=0)), int(lengths.max(initial=0)))
        if largest > _MAX_COUNT:
            raise ValueError(f"a document of {largest} bytes does not fit the table (4 GiB at most); split it")
        tokens = documents.tokens.astype(self.dtype, copy=False)
        done = written = 0  # documents, and their tokens
        while done < len(lengths):
            # The document that brings the shard to its size is the last one in it.
            room = self.shard_tokens - self._tokens
            stop = min(int(np.searchsorted(ends, written + room)) + 1, len(lengths))
            self._add_part(documents, slice(done, stop), tokens[written : int(ends[stop - 1])], lengths[done:stop])
            self._position = position
            done, written = stop, int(ends[stop - 1])
            if self._tokens >= self.shard_tokens:
                self._close_shard()

    def finish(self, *, made_by: dict[str, Any], licence_texts: dict[str, str] | None = None) -> dict[str, Any]:
        """Close the last shard, number sources and languages by name, write and return the manifest.

        Raises:
            ValueError: not one document was added, or more sources or languages than a table can number.
        """
        if self._tables:
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
            "shards": [
                self._number_table(shard, sources, languages, sorted({"", *licences})) for shard in self._shards
            ],
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
            shard = json.loads(record.read_bytes())
            if "position" not in shard:  # written by a version that cannot be taken up
                break
            shards.append(shard)
            keep |= {f"{name}.{kind}" for kind in ("bin", "table.npy", "shard.json")}
        for file in self.path.iterdir():
            if _OWN_FILE.fullmatch(file.name) and file.name not in keep:
                file.unlink()
        return shards

    def _open_shard(self) -> None:
        self._name = f"{len(self._shards):05d}"
        self._digest = hashlib.sha256()
        self._tokens = 0
        self._position = 0
        self._tables: list[np.ndarray] = []
        self._names: tuple[dict[str, int], ...] = ({}, {}, {})  # sources, languages, licences of this shard, as met

    def _add_part(self, documents: Documents, part: slice, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents that belong to the shard under way."""
        if self._file is None:
            self._file = (self.path / f"{self._name}.bin.tmp").open("wb")
        raw = np.ascontiguousarray(tokens).data.cast("B")
        self._file.write(raw)
        self._digest.update(raw)
        table = np.zeros(len(lengths), _PART)
        table["start"] = self._tokens + np.cumsum(lengths) - lengths
        table["tokens"] = lengths
        table["bytes"] = documents.text_bytes[part]
        table["id_hash"] = documents.id_hash[part]
        table["text_hash"] = documents.text_hash[part]
        for which, (column, names) in enumerate(
            (("source", documents.sources), ("language", documents.languages), ("licence", documents.licences))
        ):
            table[column] = self._numbers(getattr(documents, column)[part], names, which)
        self._tables.append(table)
        self._tokens += len(tokens)

    def _numbers(self, indices: np.ndarray, names: list[str], which: int) -> np.ndarray:
        """A column that indexes `names` as one that indexes the shard's own names."""
        known = self._names[which]
        numbers = np.zeros(len(names), np.int64)
        for index in np.unique(indices).tolist():
            numbers[index] = known.setdefault(names[index], len(known))
        if which < 2 and len(known) > _MAX_NAMES:
            raise ValueError(f"more than {_MAX_NAMES} different {('sources', 'languages')[which]} in one shard")
        return numbers[indices]

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        bin_path = self.path / f"{self._name}.bin"
        os.replace(bin_path.with_name(bin_path.name + ".tmp"), bin_path)
        table = np.concatenate(self._tables)
        _save_table(self.path / f"{self._name}.table.npy", table)
        sources, languages, licences = (list(names) for names in self._names)
        pair = table["source"].astype(np.int64) * len(languages) + table["language"]
        slices = {
            (sources[number // len(languages)], languages[number % len(languages)]): counts
            for number, counts in _counts(pair, table)
        }
        by_licence = {licences[number]: counts for number, counts in _counts(table["licence"], table)}
        shard = {
            "name": self._name,
            "documents": len(table),
            "tokens": self._tokens,
            "bytes": int(table["bytes"].sum(dtype=np.uint64)),
            "bin_bytes": bin_path.stat().st_size,
            "bin_sha256": self._digest.hexdigest(),
            "sources": sources,
            "languages": languages,
            "licence_names": licences,
            "slices": [[*key, *counts] for key, counts in sorted(slices.items())],
            "licences": [[key, *counts] for key, counts in sorted(by_licence.items()) if key],
            "position": self._position,
        }
        write_durably(self.path / f"{self._name}.shard.json", json_bytes(shard))
        self._shards.append(shard)
        self._open_shard()

    def _number_table(
        self, shard: dict[str, Any], sources: list[str], languages: list[str], licences: list[str]
    ) -> dict[str, Any]:
        """Write a shard's final table, its names numbered as in the manifest; the shard's manifest entry."""
        table = np.load(self.path / f"{shard['name']}.table.npy", allow_pickle=False)
        for column, old, new in (
            ("source", shard["sources"], sources),
            ("language", shard["languages"], languages),
            ("licence", shard["licence_names"], licences),
        ):
            numbers = {name: index for index, name in enumerate(new)}
            table[column] = np.array([numbers[name] for name in old], np.int64)[table[column]]
        docs_path = self.path / f"{shard['name']}.docs.npy"
        _save_table(docs_path, _columns(table, DOC_DTYPE))
        if self.for_merge:
            _save_table(self.path / f"{shard['name']}.merge.npy", _columns(table, MERGE_DTYPE))
        kept = ("name", *COUNTS, "bin_bytes", "bin_sha256")
        return {
            **{key: shard[key] for key in kept},
            "docs_bytes": docs_path.stat().st_size,
            "docs_sha256": file_sha256(docs_path),
        }


def _columns(table: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = np.zeros(len(table), dtype)
    for name in dtype.names or ():
        out[name] = table[name]
    return out


def _counts(groups: np.ndarray, table: np.ndarray) -> list[tuple[int, list[int]]]:
    """Documents, tokens and bytes of each group of documents."""
    numbers, index = np.unique(groups, return_inverse=True)
    sums = [np.bincount(index)]
    for column in ("tokens", "bytes"):
        total = np.zeros(len(numbers), np.int64)
        np.add.at(total, index, table[column].astype(np.int64))
        sums.append(total)
    return [(int(number), [int(total[i]) for total in sums]) for i, number in enumerate(numbers)]


def _add_counts(totals: dict[Any, list[int]], key: Any, counts: tuple[int, ...] | list[int]) -> None:
    totals[key] = [a + b for a, b in zip(totals.get(key, [0, 0, 0]), counts, strict=True)]


def _save_table(path: Path, table: np.ndarray) -> None:
    # Through memory: numpy's own writing to a file reports a full disk as an error without a number.
    buffer = io.BytesIO()
    np.save(buffer, table, allow_pickle=False)
    write_durably(path, buffer.getvalue())
