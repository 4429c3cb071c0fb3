"""Pieces of a dataset, prepared apart (`--piece i/n`), joined to what one straight run would have made.

Documents are copied in the order of the pieces into new shards, since a shard of the whole ends elsewhere than those
of the pieces. Duplicates from piece to piece are left out, if the pieces were made without duplicates of their own.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dwslm.data.dedup import repeated
from dwslm.data.durable import json_bytes, write_durably
from dwslm.data.out_folder import OutFolder
from dwslm.data.prepare import is_complete, summary
from dwslm.data.prepare_settings import SPLITS, difference
from dwslm.data.report import joined
from dwslm.data.sample import Done, Progress
from dwslm.data.shard_writer import MERGE_DTYPE, Documents, ShardWriter, is_finished
from dwslm.data.shards import DOC_DTYPE, check_dataset, read_manifest
from dwslm.data.tokenizer import tokenizer_hash

_COPY_TOKENS = 1 << 22  # copied at a time


class Piece(NamedTuple):
    """A finished piece."""

    path: Path
    number: int
    of: int
    record: dict[str, Any]
    """Its prepare.json."""
    manifests: dict[str, dict[str, Any]]
    """By split; a piece may have documents of one split alone."""


def merge(out: str, paths: list[str], overwrite: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Join all pieces of a dataset. Can be killed and repeated, as `prepare` can.

    Args:
        out: folder to make.
        paths: the pieces, in any order.
        overwrite: replace what is there under that name, if it was made by prepare; begin anew where unfinished work
            is of another dataset.

    Returns:
        as `prepare` does.

    Raises:
        FileNotFoundError, ValueError: pieces that are missing, damaged, of different origin, or that have
            documents of one id; or a folder that holds something else.
        OSError: no room left on the disk.
    """
    work = _Merge(OutFolder(out), find_pieces(paths), overwrite, progress or (lambda done: None))
    with work.out.full_disk_explained():
        return work.run()


def find_pieces(paths: list[str]) -> list[Piece]:
    """The pieces of one dataset, in order.

    Raises:
        FileNotFoundError, ValueError: as for `merge`. Checksums are not looked at yet.
    """
    pieces = [_open_piece(Path(path)) for path in paths]
    if not pieces:
        raise ValueError("merge needs the folders of all pieces")
    pieces.sort(key=lambda piece: piece.number)
    first = pieces[0]
    for piece in pieces[1:]:
        if other := difference(_origin(first), _origin(piece)):
            raise ValueError(f"{piece.path} and {first.path} are not pieces of one dataset ({other})")
        if piece.of != first.of:
            raise ValueError(f"{piece.path} is one of {piece.of} pieces and {first.path} one of {first.of}")
    numbers = [piece.number for piece in pieces]
    if missing := sorted(set(range(1, first.of + 1)) - set(numbers)):
        raise ValueError(f"piece {missing[0]}/{first.of} is missing ({len(missing)} of {first.of} are)")
    if len(numbers) > first.of:
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"piece {twice}/{first.of} is given twice")
    return pieces


def _open_piece(path: Path) -> Piece:
    if not (path / "prepare.json").is_file():
        raise FileNotFoundError(f"{path} is no finished piece: it has no prepare.json")
    record = json.loads((path / "prepare.json").read_bytes())
    if "piece" not in record["made_by"]:
        raise ValueError(f"{path} is a whole dataset, not a piece: it was prepared without --piece")
    number, _, count = record["made_by"]["piece"].partition("/")
    manifests = {split: read_manifest(path / split) for split in record["splits"]}
    return Piece(path, int(number), int(count), record, manifests)


def _origin(piece: Piece) -> dict[str, Any]:
    """How a straight run would have made the whole."""
    return {key: value for key, value in piece.record["made_by"].items() if key != "piece"}


class _Merge:
    """One call of `merge`."""

    def __init__(self, out: OutFolder, pieces: list[Piece], overwrite: bool, progress: Progress):
        self.out = out
        self.pieces = pieces
        self.overwrite = overwrite
        self.progress = progress
        self.made_by = _origin(pieces[0])
        self.report: dict[str, Any] = joined([piece.record.get("report", {}) for piece in pieces])
        totals = [manifest["totals"] for piece in pieces for manifest in piece.manifests.values()]
        self.all_bytes = sum(total["bytes"] for total in totals)
        self.done = {"check": [0, 0], "merge": [0, 0]}  # documents and bytes of text, for the progress

    def run(self) -> dict[str, Any]:
        self.out.recover()
        if is_complete(self.out, self.made_by, self.overwrite):
            return summary(self.out.path, already_complete=True)
        with self.out.locked():
            self._take_up()
            self._check_pieces()
            drop = {split: self._duplicates(split) for split in SPLITS}
            self._check_ids(drop)
            shutil.copyfile(self.pieces[0].path / "tokenizer.json", self.out.partial / "tokenizer.json")
            for split in SPLITS:
                self._copy(split, drop[split])
            bad = [bad for piece in self.pieces for bad in piece.record["bad"]]
            record = {"made_by": self.made_by, "bad": bad, **({"report": self.report} if self.report else {})}
            write_durably(self.out.partial / "prepare.json", json_bytes(record))
            self.out.commit()
        return summary(self.out.path, already_complete=False)

    def _take_up(self) -> None:
        """Go on with work of the same origin, or begin: the whole is the same bytes whatever a shard was copied from."""
        partial = self.out.partial
        record = partial / "prepare.json"
        if record.is_file():
            other = difference(json.loads(record.read_bytes())["made_by"], self.made_by)
            if not other:
                return
            if not self.overwrite:
                raise ValueError(
                    f"{partial} holds unfinished work of another dataset ({other}); give --overwrite to begin anew"
                )
            for split in SPLITS:
                shutil.rmtree(partial / split, ignore_errors=True)
        elif any(file.name != "prepare.json.tmp" for file in partial.iterdir()):
            raise ValueError(f"{partial} is there and was not made by prepare; remove it")
        write_durably(record, json_bytes({"made_by": self.made_by, "bad": []}))

    def _check_pieces(self) -> None:
        for piece in self.pieces:
            if tokenizer_hash(piece.path / "tokenizer.json") != self.made_by["settings"]["tokenizer"]:
                raise ValueError(f"{piece.path / 'tokenizer.json'} is not the tokenizer that the piece was made with")
            for split, manifest in piece.manifests.items():
                check_dataset(piece.path / split, verify="sha256")
                for table, extra, _ in self._shards(split, [piece]):
                    if len(table) != len(extra):
                        raise ValueError(
                            f"{piece.path / split} is damaged: its merge tables do not fit; prepare it again"
                        )
                self._progress("check", manifest["totals"]["documents"], manifest["totals"]["bytes"])

    def _progress(self, stage: str, documents: int, size: int) -> None:
        done = self.done[stage]
        done[0] += documents
        done[1] += size
        self.progress(Done(stage, done[0], done[1], done[1] / self.all_bytes if self.all_bytes else None))

    def _shards(
        self, split: str, pieces: list[Piece]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[Piece, dict[str, Any]]]]:
        """The tables of all shards of a split, in order, each with its piece and manifest entry."""
        for piece in pieces:
            for shard in piece.manifests[split]["shards"] if split in piece.manifests else []:
                base = piece.path / split / shard["name"]
                tables = []
                for kind, dtype in (("docs", DOC_DTYPE), ("merge", MERGE_DTYPE)):
                    path = base.with_name(f"{base.name}.{kind}.npy")
                    if not path.is_file():
                        raise ValueError(f"{path} is missing; prepare the piece again")
                    try:
                        tables.append(np.load(path, allow_pickle=False))
                    except (ValueError, EOFError) as error:
                        raise ValueError(f"{path} is damaged ({error}); prepare the piece again") from None
                    if tables[-1].dtype != dtype:
                        raise ValueError(f"{path} is no table of this format; prepare the piece again")
                yield tables[0], tables[1], (piece, shard)

    def _documents(self, split: str) -> int:
        return sum(p.manifests[split]["totals"]["documents"] for p in self.pieces if split in p.manifests)

    def _duplicates(self, split: str) -> np.ndarray:
        """Which documents of a split have a text that an earlier one has, [documents] bool; none unless asked."""
        drop = np.zeros(self._documents(split), bool)
        if not self.made_by["settings"].get("dedup"):
            return drop
        for places in repeated(
            lambda: (extra["text_hash"] for _, extra, _ in self._shards(split, self.pieces)), len(drop)
        ):
            drop[places] = True
        counts = self.report["left_out"]["duplicate"][split]
        before = 0
        for table, _, _ in self._shards(split, self.pieces):
            mine = drop[before : before + len(table)]
            counts["documents"] += int(mine.sum())
            counts["bytes"] += int(table["bytes"][mine].sum(dtype=np.uint64))
            before += len(table)
        return drop

    def _check_ids(self, drop: dict[str, np.ndarray]) -> None:
        def batches() -> Iterator[np.ndarray]:
            for split in SPLITS:
                before = 0
                for table, _, _ in self._shards(split, self.pieces):
                    yield table["id_hash"][~drop[split][before : before + len(table)]]
                    before += len(table)

        for places in repeated(batches, sum(len(array) for array in drop.values())):
            if len(places):
                everything = np.concatenate(list(batches()))
                self._refuse_id(int(everything[places[0]]), len(places))

    def _refuse_id(self, key: int, count: int) -> None:
        where = []
        for split in SPLITS:
            for table, _, (piece, shard) in self._shards(split, self.pieces):
                where += [
                    f"document {row} of {piece.path / split / shard['name']}"
                    for row in np.flatnonzero(table["id_hash"] == key)
                ]
        raise ValueError(
            f"{count} documents have an id that another piece has too: {where[0]} and {where[1]}; ids must be unique over "
            "all inputs"
        )

    def _copy(self, split: str, drop: np.ndarray) -> None:
        """Write the documents of a split that are not there yet."""
        folder = self.out.partial / split
        if is_finished(folder):
            return
        some = next((p.manifests[split] for p in self.pieces if split in p.manifests), None)
        if some is None:
            raise ValueError(f"{self.out.path}: no document for the {split} split in any piece")
        writer = ShardWriter(
            folder,
            vocab_size=some["vocab_size"],
            eod=some["eod"],
            tokenizer_hash=some["tokenizer_hash"],
            shard_tokens=self.made_by["settings"]["shard_tokens"],
        )
        skip, before = writer.documents, 0
        texts: dict[str, str] = {}
        try:
            for table, extra, (piece, shard) in self._shards(split, self.pieces):
                keep = np.flatnonzero(~drop[before : before + len(table)])
                before += len(table)
                wanted = keep[skip:]
                skip = max(skip - len(keep), 0)
                manifest = piece.manifests[split]
                texts |= {name: entry["text"] for name, entry in manifest["licences"].items() if entry["text"]}
                self._progress("merge", len(table) - len(wanted), 0)
                self._copy_shard(writer, table, extra, wanted, piece.path / split / f"{shard['name']}.bin", manifest)
            writer.finish(made_by=self.made_by, licence_texts=texts)
        finally:
            writer.close()

    def _copy_shard(
        self,
        writer: ShardWriter,
        table: np.ndarray,
        extra: np.ndarray,
        wanted: np.ndarray,
        path: Path,
        manifest: dict[str, Any],
    ) -> None:
        tokens = np.memmap(path, dtype=manifest["dtype"], mode="r")
        keep = np.zeros(len(table), bool)
        keep[wanted] = True
        # Runs of documents that end with the one that brings them to the size of a copy.
        group = (
            np.r_[0, np.cumsum(table["tokens"], dtype=np.int64)[:-1] // _COPY_TOKENS] if len(table) > 1 else np.zeros(1)
        )
        edges = np.flatnonzero(np.diff(group, prepend=-1))
        for first, stop in zip(edges, [*edges[1:], len(table)], strict=True):
            rows, mask = table[first:stop], keep[first:stop]
            if not mask.any():
                continue
            start, end = int(rows["start"][0]), int(rows["start"][-1]) + int(rows["tokens"][-1])
            part, chosen = tokens[start:end], rows[mask]
            writer.add_many(
                Documents(
                    tokens=part if mask.all() else part[np.repeat(mask, rows["tokens"])],
                    lengths=chosen["tokens"],
                    text_bytes=chosen["bytes"],
                    id_hash=chosen["id_hash"],
                    source=chosen["source"],
                    language=chosen["language"],
                    licence=extra["licence"][first:stop][mask],
                    sources=manifest["sources"],
                    languages=manifest["languages"],
                    licences=sorted({"", *manifest["licences"]}),
                    text_hash=extra["text_hash"][first:stop][mask],
                )
            )
            self._progress("merge", len(chosen), int(chosen["bytes"].sum(dtype=np.uint64)))
