"""Tokens on disk: flat token files, one table of documents beside each, and a manifest written last.

A dataset is a folder:

    00000.bin         text tokens back to back, little-endian uint16 (uint32 when the vocabulary needs it)
    00000.docs.npy    one `DOC_DTYPE` record per document of 00000.bin
    manifest.json     everything else; a folder without it is not a dataset

Nothing separates documents in the token files: the table says where each starts, and whoever packs rows adds
the end-of-document token. docs/data-format.md describes every field; shard_writer.py writes it.
"""

import hashlib
import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
DOC_DTYPE = np.dtype(
    [
        ("start", "<u8"),  # first token, counted from the start of the document's own shard
        ("tokens", "<u4"),
        ("bytes", "<u4"),  # UTF-8 bytes of the text
        ("source", "<u2"),  # index into the manifest's `sources`
        ("language", "<u2"),  # index into the manifest's `languages`
        ("id_hash", "<u8"),
    ]
)
COUNTS = ("documents", "tokens", "bytes")


def token_dtype(vocab_size: int) -> np.dtype:
    """The on-disk type of a token: little-endian uint16 while ids fit in it, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def id_hash(document_id: str) -> int:
    """64-bit hash of a document id: the first 8 bytes of BLAKE2b of its UTF-8, read little-endian."""
    return int.from_bytes(hashlib.blake2b(document_id.encode("utf-8"), digest_size=8).digest(), "little")


class Dataset:
    """An open dataset: read-only, token files memory-mapped, document table in memory.

    Attributes:
        path: the dataset's folder.
        manifest: the parsed manifest.
        sources, languages: names that `docs["source"]` and `docs["language"]` index.
        vocab_size, eod: size of the vocabulary and id of the end-of-document token.
        tokenizer_hash: sha256 (hex) of the tokenizer file that made the tokens.
        fingerprint: sha256 (hex) of the manifest's bytes; two datasets with one fingerprint are the same.
        docs: [documents] of `DOC_DTYPE`, all shards in order; `start` counts from the document's own shard.
    """

    def __init__(self, path: Path, manifest: dict, fingerprint: str, docs: np.ndarray, shards: list[np.ndarray]):
        self.path = path
        self.manifest = manifest
        self.sources: list[str] = manifest["sources"]
        self.languages: list[str] = manifest["languages"]
        self.vocab_size: int = manifest["vocab_size"]
        self.eod: int = manifest["eod"]
        self.tokenizer_hash: str = manifest["tokenizer_hash"]
        self.fingerprint = fingerprint
        self.docs = docs
        self._starts, self._lengths = docs["start"], docs["tokens"]  # a field looked up is a view made
        self._shards = [np.asarray(shard) for shard in shards]  # slices of a plain array are quicker than a memmap's
        self._maps: list[mmap.mmap | None] = [getattr(shard, "_mmap", None) for shard in shards]
        self._read: set[int] = set()  # shards that were read since `release`
        # First document of each shard: a document's shard is a binary search away.
        counts = [shard["documents"] for shard in manifest["shards"]]
        self._first_doc = [sum(counts[:i]) for i in range(len(counts))]

    def __len__(self) -> int:
        return len(self.docs)

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document, counted from its first; a view of the memory-mapped file.

        Returns:
            [stop - start] uint16 or uint32, read-only.

        Raises:
            IndexError: no such document, or a range that leaves it.
        """
        if not 0 <= doc < len(self._lengths):
            raise IndexError(f"{self.path}: document {doc} of {len(self.docs)}")
        first, length = int(self._starts[doc]), int(self._lengths[doc])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{self.path}: tokens {start}:{stop} of document {doc}, which has {length}")
        number = bisect_right(self._first_doc, doc) - 1
        self._read.add(number)
        return self._shards[number][first + start : first + stop]

    def tokens_at(self, docs: np.ndarray, places: np.ndarray) -> np.ndarray:
        """One token of each of some documents, the one at `places`, counted from the document's first.

        Args:
            docs, places: [n] int64.

        Returns:
            [n] uint64.
        """
        found = np.zeros(len(docs), np.uint64)
        numbers = np.searchsorted(self._first_doc, docs, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            self._read.add(number)
            found[mine] = self._shards[number][self._starts[docs[mine]].astype(np.int64) + places[mine]]
        return found

    def foreign_token(self, doc: int) -> ValueError:
        """The error where a document holds a token that is not in the vocabulary."""
        number = bisect_right(self._first_doc, doc) - 1
        return ValueError(
            f"{self.path}: document {doc:,}, in shard {number:05d}.bin, holds a token id past the vocabulary of "
            f"{self.vocab_size:,}, so the file was altered: data.verify=sha256 or `dwslm data verify {self.path}` looks at all "
            "of it; prepare the dataset again"
        )

    def shard_documents(self) -> Iterator[tuple[int, int]]:
        """First document of each shard, and the one after its last."""
        yield from zip(self._first_doc, [*self._first_doc[1:], len(self)], strict=True)

    def release(self) -> None:
        """Let go of the pages of the token files that were read since the last call. The kernel keeps them cached, but
        they don't count as this process's memory any more."""
        for number in self._read:
            mapped = self._maps[number]
            if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)
        self._read.clear()


def open_dataset(path: str | Path, verify: str = "size") -> Dataset:
    """Open a finished dataset.

    Args:
        path: its folder.
        verify: "size" checks file sizes and that the tables agree with the manifest; "sha256" also reads
            every file and compares checksums.

    Raises:
        FileNotFoundError: no such folder, or no manifest in it (never finished, or not a dataset).
        ValueError: unknown format version, or a shard that is missing, cut short or altered.
    """
    path = Path(path)
    manifest, fingerprint = _read_manifest(path)
    dtype = np.dtype(manifest["dtype"])
    tables = list(_checked_tables(path, manifest, verify))
    shards: list[np.ndarray] = [
        np.memmap(path / f"{shard['name']}.bin", dtype=dtype, mode="r") for shard in manifest["shards"]
    ]
    return Dataset(path, manifest, fingerprint, np.concatenate(tables), shards)


def check_dataset(path: str | Path, verify: str = "size") -> dict[str, Any]:
    """Check a dataset as `open_dataset` does, one document table in memory at a time; its manifest.

    Raises:
        FileNotFoundError, ValueError: as for `open_dataset`.
    """
    manifest, _ = _read_manifest(Path(path))
    for _ in _checked_tables(Path(path), manifest, verify):
        pass
    return manifest


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a dataset, whose files are not looked at.

    Raises:
        FileNotFoundError, ValueError: no such folder or manifest, or one that this code cannot read.
    """
    return _read_manifest(Path(path))[0]


def _checked_tables(path: Path, manifest: dict[str, Any], verify: str) -> Iterator[np.ndarray]:
    """The document tables, in order, after their shards were checked."""
    if verify not in ("size", "sha256"):
        raise ValueError(f"verify={verify!r}: must be 'size' or 'sha256'")
    for shard in manifest["shards"]:
        bin_path, docs_path = path / f"{shard['name']}.bin", path / f"{shard['name']}.docs.npy"
        _check_file(bin_path, shard["bin_bytes"], shard["bin_sha256"] if verify == "sha256" else None)
        _check_file(docs_path, shard["docs_bytes"], shard["docs_sha256"] if verify == "sha256" else None)
        try:
            table = np.load(docs_path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{docs_path} is damaged ({error}); prepare the dataset again") from None
        check_table(docs_path, table, shard, manifest)
        yield table


def check_tokenizer(dataset: Dataset, tokenizer_path: str | Path) -> None:
    """Refuse a tokenizer other than the one that made the dataset.

    Raises:
        FileNotFoundError: no such tokenizer file.
        ValueError: its sha256 is not the one in the manifest.
    """
    tokenizer_path = Path(tokenizer_path)
    if not tokenizer_path.is_file():
        raise FileNotFoundError(f"{tokenizer_path}: no such tokenizer file")
    found = hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    if found != dataset.tokenizer_hash:
        raise ValueError(
            f"{dataset.path} was not made with {tokenizer_path}: it needs the tokenizer with sha256 "
            f"{dataset.tokenizer_hash[:12]}..., this one has {found[:12]}...; give the dataset's own "
            "tokenizer or prepare the text again with this one"
        )


def _read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    manifest_path = path / "manifest.json"
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such dataset folder; `dwslm prepare` makes one")
    if not manifest_path.is_file():
        raise FileNotFoundError(f"{path} has no manifest.json: it is not a dataset, or was never finished")
    raw = manifest_path.read_bytes()
    try:
        manifest = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{manifest_path} is damaged ({error}); prepare the dataset again") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{manifest_path}: format version {version!r} is not one this code reads ({FORMAT_VERSION}); "
            "prepare the dataset again or use the version that made it"
        )
    needed = (
        "tokenizer_hash",
        "dtype",
        "vocab_size",
        "eod",
        "sources",
        "languages",
        "shards",
        "totals",
        "slices",
    )
    missing = [key for key in needed if key not in manifest]
    if missing or not manifest["shards"]:
        raise ValueError(f"{manifest_path} lacks {', '.join(missing) or 'shards'}; prepare the dataset again")
    if np.dtype(manifest["dtype"]) != token_dtype(manifest["vocab_size"]):
        raise ValueError(
            f"{manifest_path} is altered: {manifest['dtype']} is not the type of tokens of a vocabulary of "
            f"{manifest['vocab_size']}; prepare the dataset again"
        )
    return manifest, hashlib.sha256(raw).hexdigest()


def _check_file(path: Path, size: int, sha256: str | None) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing though the manifest names it; prepare the dataset again")
    found = path.stat().st_size
    if found != size:
        what = "cut short" if found < size else "altered"
        raise ValueError(f"{path} is {what}: {found} bytes, the manifest says {size}; prepare the dataset again")
    if sha256 is not None and file_sha256(path) != sha256:
        raise ValueError(f"{path} is altered: its sha256 is not the manifest's; prepare the dataset again")


def check_table(path: Path, table: np.ndarray, shard: dict[str, Any], manifest: dict[str, Any]) -> None:
    """A table must describe exactly the tokens of its shard; a wrong one would give text from elsewhere.

    Raises:
        ValueError: it does not.
    """
    ends = np.cumsum(table["tokens"], dtype=np.uint64) if table.dtype == DOC_DTYPE else np.zeros(0, np.uint64)
    fits = (
        table.dtype == DOC_DTYPE
        and len(table) == shard["documents"] > 0
        and int(ends[-1]) == shard["tokens"]
        and int(table["bytes"].sum(dtype=np.uint64)) == shard["bytes"]
        and np.array_equal(table["start"], ends - table["tokens"])
        and int(table["source"].max()) < len(manifest["sources"])
        and int(table["language"].max()) < len(manifest["languages"])
        and shard["bin_bytes"] == shard["tokens"] * np.dtype(manifest["dtype"]).itemsize
    )
    if not fits:
        raise ValueError(f"{path} is altered: it does not agree with the manifest; prepare the dataset again")


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
