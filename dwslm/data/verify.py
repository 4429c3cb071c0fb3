"""Whether a dataset is what its manifest says, down to the bytes that its tokens stand for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dwslm.data.dedup import repeated
from dwslm.data.inspect import find_tokenizer
from dwslm.data.shards import COUNTS, DOC_DTYPE, check_table, file_sha256, read_manifest
from dwslm.data.tokenizer import load_tokenizer, token_bytes

_BLOCK_TOKENS = 1 << 22
_SHOWN = 3  # documents named of those that have one fault


def verify(paths: dict[str, Path], progress: Callable[[str, int, float], None] | None = None) -> list[str]:
    """Check datasets that belong together: each by itself, and that no document is in two of them or in one twice.

    Of each: sizes and sha256 of all files; that document tables give back to back the tokens of their shards; that
    every token is in the vocabulary and none is special; that the bytes of each document's tokens sum to its own;
    that totals by slice are those of the documents; that the tokenizer beside it is the one that made it.

    Args:
        paths: dataset folders by name.
        progress: called with a dataset's name, and tokens and share of all tokens that were checked.

    Returns:
        what is wrong, one line each; empty if nothing is.

    Raises:
        FileNotFoundError, ValueError: a manifest or tokenizer that cannot be read at all.
    """
    wrong: list[str] = []
    manifests = {name: read_manifest(path) for name, path in paths.items()}
    everything = sum(manifest["totals"]["tokens"] for manifest in manifests.values())
    tables: list[Path] = []
    done = 0
    for name, path in paths.items():
        tokenizer = load_tokenizer(find_tokenizer(path))
        lengths = token_bytes(tokenizer)
        if len(lengths) != manifests[name]["vocab_size"]:
            wrong.append(
                f"{path}: vocab_size {manifests[name]['vocab_size']}, but the tokenizer has {len(lengths)} entries"
            )
            continue
        counted: dict[tuple[int, int], np.ndarray] = {}
        for shard in manifests[name]["shards"]:
            table, problems = _files(path, shard, manifests[name])
            wrong += problems
            if table is not None:
                tables.append(path / f"{shard['name']}.docs.npy")
                _count(table, counted)
                wrong += _tokens(path, shard, manifests[name], table, lengths)
            done += shard["tokens"]
            if progress is not None:
                progress(name, done, done / max(everything, 1))
        if not wrong:
            wrong += _totals(path, manifests[name], counted)
    return wrong + ([] if wrong else _ids(tables))


def _files(path: Path, shard: dict[str, Any], manifest: dict[str, Any]) -> tuple[np.ndarray | None, list[str]]:
    """A shard's document table, unless it cannot be used; what is wrong with the two files."""
    wrong = []
    for kind, name in (("bin", f"{shard['name']}.bin"), ("docs", f"{shard['name']}.docs.npy")):
        file = path / name
        if not file.is_file():
            wrong.append(f"{file} is missing")
        elif (size := file.stat().st_size) != shard[f"{kind}_bytes"]:
            wrong.append(f"{file} has {size} bytes, the manifest says {shard[f'{kind}_bytes']}")
        elif file_sha256(file) != shard[f"{kind}_sha256"]:
            wrong.append(f"{file} is altered: its sha256 is not the manifest's")
    if any("missing" in line or "manifest says" in line for line in wrong):
        return None, wrong
    docs_path = path / f"{shard['name']}.docs.npy"
    try:
        table = np.load(docs_path, allow_pickle=False)
        check_table(docs_path, table, shard, manifest)
    except (ValueError, EOFError) as error:
        return None, [*wrong, str(error)]
    return table, wrong


def _tokens(
    path: Path, shard: dict[str, Any], manifest: dict[str, Any], table: np.ndarray, lengths: np.ndarray
) -> list[str]:
    """What is wrong with the tokens of a shard, given a table that fits it."""
    tokens = np.memmap(path / f"{shard['name']}.bin", dtype=manifest["dtype"], mode="r")
    outside: list[int] = []
    unequal: list[int] = []
    for first, stop in _blocks(table["tokens"]):
        rows = table[first:stop]
        start = int(rows["start"][0])
        part = tokens[start : int(rows["start"][-1]) + int(rows["tokens"][-1])]
        offsets = (rows["start"] - rows["start"][0]).astype(np.int64)
        if int(part.max()) >= len(lengths):
            bad = np.add.reduceat(part >= len(lengths), offsets, dtype=np.int64) > 0
            outside += (np.flatnonzero(bad) + first).tolist()
            continue
        size = lengths[part]
        special = np.add.reduceat(size == 0, offsets, dtype=np.int64) > 0
        outside += (np.flatnonzero(special) + first).tolist()
        unequal += (np.flatnonzero(np.add.reduceat(size, offsets, dtype=np.int64) != rows["bytes"]) + first).tolist()
    name = path / shard["name"]
    wrong = []
    if outside:
        wrong.append(f"{name}: {_documents(outside)} with special tokens or ids outside the vocabulary")
    if unequal:
        wrong.append(f"{name}: {_documents(unequal)} whose tokens stand for other than the table's bytes")
    return wrong


def _blocks(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of whole documents of about `_BLOCK_TOKENS`."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    edges = np.flatnonzero(np.diff(before // _BLOCK_TOKENS, prepend=-1))
    yield from zip(edges.tolist(), [*edges[1:].tolist(), len(counts)], strict=True)


def _documents(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    return f"{len(numbers)} documents ({shown}{', ...' if len(numbers) > _SHOWN else ''})"


def _count(table: np.ndarray, counted: dict[tuple[int, int], np.ndarray]) -> None:
    pairs, index = np.unique(np.stack([table["source"], table["language"]]), axis=1, return_inverse=True)
    sums = np.zeros((pairs.shape[1], len(COUNTS)), np.int64)
    np.add.at(sums, index.reshape(-1), np.stack([np.ones(len(table), np.int64), table["tokens"], table["bytes"]], 1))
    for pair, counts in zip(pairs.T.tolist(), sums, strict=True):
        key = (pair[0], pair[1])
        counted[key] = counted.get(key, 0) + counts


def _totals(path: Path, manifest: dict[str, Any], counted: dict[tuple[int, int], np.ndarray]) -> list[str]:
    found = {
        (manifest["sources"][source], manifest["languages"][language]): counts.tolist()
        for (source, language), counts in counted.items()
    }
    said = {(row["source"], row["language"]): [row[count] for count in COUNTS] for row in manifest["slices"]}
    wrong = [
        f"{path}: slice {' / '.join(key)} has {found.get(key)} (documents, tokens, bytes), the manifest says {said.get(key)}"
        for key in sorted(found.keys() | said.keys())
        if found.get(key) != said.get(key)
    ]
    total = [sum(counts[i] for counts in found.values()) for i in range(len(COUNTS))]
    if total != [manifest["totals"][count] for count in COUNTS]:
        wrong.append(f"{path}: has {total} (documents, tokens, bytes), the manifest says {manifest['totals']}")
    return wrong


def _ids(tables: list[Path]) -> list[str]:
    """Documents of one id, within a dataset or across those that belong together."""
    rows = [(path.stat().st_size // DOC_DTYPE.itemsize) for path in tables]

    def batches() -> Iterator[np.ndarray]:
        for path in tables:
            yield np.load(path, allow_pickle=False)["id_hash"]

    count = sum(len(places) for places in repeated(batches, sum(rows)))
    return [f"{count} documents have the id of another (in one dataset, or held out and trained on)"] if count else []
