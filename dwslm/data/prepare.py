"""Text to a dataset: tokenizer, training and held-out shards, in one call that can be killed and repeated.

All work happens in `OUT.partial`, beside the folder asked for, which appears under its own name by one
rename when everything in it is whole. After a kill, the same call reads the text again (cheap), keeps the
tokenizer and every finished shard (dear), and ends with the same bytes as a call that was never killed.

Chunks of text are parsed and tokenized by worker processes. What depends on order (ids used before, duplicates,
which document goes where) is settled here, chunk after chunk, so the number of workers makes no difference.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dwslm.data.chunks import Chunk, list_parts, parse, read_chunks, read_documents
from dwslm.data.dedup import KeySet
from dwslm.data.durable import json_bytes, write_durably
from dwslm.data.encode import EncodeSettings, Reply, Task
from dwslm.data.out_folder import OutFolder
from dwslm.data.prepare_settings import SPLITS, PrepareSettings, describe, difference
from dwslm.data.readers import BadDocument, Document, reject
from dwslm.data.report import Report
from dwslm.data.sample import Done, Progress, trained_tokenizer
from dwslm.data.shard_writer import Documents, ShardWriter, is_finished
from dwslm.data.shards import check_dataset, id_hash, read_manifest
from dwslm.data.survey import survey
from dwslm.data.tokenizer import eod_id, load_tokenizer, tokenizer_hash
from dwslm.data.workers import in_order

_HELD_OUT = "held-out"  # working folder of the runs that training text is compared with


def prepare(settings: PrepareSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Make the dataset that the settings describe, or find that it is there already.

    Returns:
        `out`; `already_complete`; `tokenizer_hash`; `vocab_size`; for "train" and "valid" their `documents`,
        `tokens`, `bytes` and `slices` (the same by source and language); `bad`, a list of `place`, `reason`;
        `report`, what the options left out, empty if there are none.

    Raises:
        FileNotFoundError: an input that is not there.
        ValueError: a document that cannot be used (file, line, reason), too little text for the vocabulary,
            or a folder that holds something else.
        OSError: no room left on the disk, or a worker that died.
    """
    work = _Work(settings, progress or (lambda done: None))
    with work.out.full_disk_explained():
        return work.run()


def prepare_tokenizer(settings: PrepareSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Train the tokenizer that `prepare` would train, and write it alone: `out` is the file.

    Returns:
        `out`, `tokenizer_hash`, `vocab_size`.

    Raises:
        ValueError: as for `prepare`, or a file of other content that is there already.
    """
    if settings.tokenizer:
        raise ValueError(f"tokenizer={settings.tokenizer}: there is nothing to train; leave it out")
    inputs = settings.inputs()
    vocab_size = describe(settings, inputs)["settings"]["vocab_size"]
    parts = list_parts(inputs["train"], settings.format)
    content = trained_tokenizer(settings, parts, vocab_size, progress or (lambda done: None))
    path = Path(settings.out)
    if path.exists() and not settings.overwrite and (path.is_dir() or path.read_bytes() != content):
        raise ValueError(f"{path} is there already; name another file, or give --overwrite")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, content)
    return {"out": str(path), "tokenizer_hash": tokenizer_hash(path), "vocab_size": vocab_size}


class _Work:
    """One call of `prepare`."""

    def __init__(self, settings: PrepareSettings, progress: Progress):
        self.settings = settings
        self.progress = progress
        self.inputs = settings.inputs()
        self.made_by = describe(settings, self.inputs)
        self.parts = settings.parts(self.inputs)
        self.out = OutFolder(settings.out)
        self.partial = self.out.partial
        self.bad: list[BadDocument] = []
        self.ids = KeySet("documents")
        self.texts = [KeySet("different texts") for _ in SPLITS]
        self.held_out_texts = np.zeros(0, np.uint64)
        self.writers: dict[str, ShardWriter] = {}
        self.to_skip: dict[str, int] = {}  # documents of each split that are in finished shards, and still to come
        self.read = [0, 0]  # documents and bytes, for the progress

    def run(self) -> dict[str, Any]:
        self.out.recover()
        if is_complete(self.out, self.made_by, self.settings.overwrite):
            return summary(self.out.path, already_complete=True)
        with self.out.locked():
            self._take_up()
            report = self._write_splits(self._tokenizer())
            shutil.rmtree(self.partial / _HELD_OUT, ignore_errors=True)
            self._write_record(report)
            self.out.commit()
        return summary(self.out.path, already_complete=False)

    def _take_up(self) -> None:
        """Go on with work begun by the same settings, or begin."""
        record = self.partial / "prepare.json"
        if record.is_file():
            other = difference(json.loads(record.read_bytes())["made_by"], self.made_by)
            if not other:
                return
            begun = (self.partial / "tokenizer.json").is_file()
            if begun and not self.settings.overwrite:
                raise ValueError(
                    f"{self.partial} holds unfinished work with other settings ({other}); repeat those, or "
                    "give --overwrite to begin anew"
                )
            for name in (*SPLITS, _HELD_OUT):
                shutil.rmtree(self.partial / name, ignore_errors=True)
            (self.partial / "tokenizer.json").unlink(missing_ok=True)
        elif any(file.name != "prepare.json.tmp" for file in self.partial.iterdir()):
            raise ValueError(f"{self.partial} is there and was not made by prepare; remove it")
        self._write_record({})

    def _write_record(self, report: dict[str, Any]) -> None:
        record: dict[str, Any] = {"made_by": self.made_by, "bad": [asdict(item) for item in self.bad]}
        if report:
            record["report"] = report
        if self.settings.piece:  # a piece may lack one split
            record["splits"] = [split for split in SPLITS if (self.partial / split / "manifest.json").is_file()]
        write_durably(self.partial / "prepare.json", json_bytes(record))

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of this work: left by an earlier call, or given, or trained on a sample."""
        path = self.partial / "tokenizer.json"
        if not path.is_file():
            if self.settings.tokenizer:
                content = Path(self.settings.tokenizer).read_bytes()
            else:
                vocab_size = self.made_by["settings"]["vocab_size"]
                content = trained_tokenizer(self.settings, self.parts["train"], vocab_size, self.progress)
            write_durably(path, content)
        return load_tokenizer(path)

    def _write_splits(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write what is missing of both splits, reading all documents to get there; the report."""
        starts = {split: self._open_writer(split, tokenizer) for split in SPLITS}
        encode, report = self._compare_with_held_out()
        tasks = self._tasks(starts)
        try:
            with closing(in_order(tasks, encode, self.settings.worker_count())) as replies:
                for number, (task, reply) in enumerate(replies):
                    self._take(number, task.chunk, reply, report)
                    total = sum(part.size for parts in self.parts.values() for part in parts)
                    share = self._offset(task) / total if total else None
                    self.progress(Done("tokenize", self.read[0], self.read[1], share))
            for split, writer in self.writers.items():
                if writer.empty and not self.settings.piece:
                    raise self.settings.no_document(split)
            texts = {name: Path(file).read_text("utf-8") for name, file in self.settings.licence_files.items()}
            for split, writer in self.writers.items():
                if writer.empty:
                    shutil.rmtree(self.partial / split)
                else:
                    writer.finish(made_by=self.made_by, licence_texts=texts)
        finally:
            for writer in self.writers.values():
                writer.close()
        return report.done()

    def _open_writer(self, split: str, tokenizer: Tokenizer) -> int | None:
        """Take up one split; the first chunk whose tokens it still needs, or None if it is finished."""
        folder = self.partial / split
        if is_finished(folder):
            self.to_skip[split] = read_manifest(folder)["totals"]["documents"]
            return None
        writer = self.writers[split] = ShardWriter(
            folder,
            vocab_size=tokenizer.get_vocab_size(),
            eod=eod_id(tokenizer, self.settings.eod_token),
            tokenizer_hash=tokenizer_hash(self.partial / "tokenizer.json"),
            shard_tokens=self.settings.shard_tokens,
            for_merge=bool(self.settings.piece),
        )
        self.to_skip[split] = writer.documents
        return writer.position or 0

    def _compare_with_held_out(self) -> tuple[EncodeSettings, Report]:
        """Look at the held-out text, if an option needs it; what workers are to do, and an empty report."""
        settings = self.settings
        folder = self.partial / _HELD_OUT
        compare = settings.decontaminate != "off"
        runs = 0
        if compare or settings.dedup:
            folder.mkdir(exist_ok=True)
            whole = {split: list_parts(self.inputs[split], settings.format) for split in SPLITS}
            self.held_out_texts, runs = survey(
                settings, whole, folder, lambda *done: self.progress(Done("held-out", *done))
            )
        left_out = ["short"] if settings.min_characters or settings.strip_control else []
        left_out += ["duplicate", "duplicate_of_held_out"] if settings.dedup else []
        left_out += ["overlap"] if settings.decontaminate == "remove" else []
        report = Report(left_out=left_out, control=settings.strip_control, held_out_runs=runs if compare else None)
        return EncodeSettings(
            asdict(settings.fields),
            valid_fraction=settings.valid_fraction,
            tokenizer=str(self.partial / "tokenizer.json"),
            min_characters=settings.min_characters,
            strip_control=settings.strip_control,
            dedup=settings.dedup,
            held_out=str(folder) if compare else "",
            overlap_share=settings.overlap_share if settings.decontaminate == "remove" else None,
        ), report

    def _tasks(self, starts: dict[str, int | None]) -> Iterator[Task]:
        """Every chunk, with the splits whose tokens are still needed of it."""
        number = 0
        for given in SPLITS:
            for chunk in read_chunks(self.parts[given], self.settings.fields):
                train, valid = ((start := starts[split]) is not None and number >= start for split in SPLITS)
                yield Task(chunk, given, (train, valid))
                number += 1

    def _offset(self, task: Task) -> int:
        before = sum(part.size for part in self.parts["train"]) if task.given == "valid" else 0
        return before + task.chunk.offset

    def _take(self, number: int, chunk: Chunk, reply: Reply, report: Report) -> None:
        """Settle what depends on the documents before, and write the rest."""
        rows = reply.rows
        report.add(reply)
        self.read[0] += len(rows)
        self.read[1] += int(rows["bytes"].sum(dtype=np.int64))
        keep = rows["why"] == 0
        if self.settings.dedup:
            keep &= ~self._duplicates(rows, keep, report)
        taken = np.zeros(len(rows), bool)
        taken[keep] = ~self.ids.add(rows["id_hash"][keep])
        self._reject(chunk, reply, np.flatnonzero(taken))
        keep &= ~taken
        for index, split in enumerate(SPLITS):
            mine = np.flatnonzero(keep & (rows["split"] == index))
            done = min(self.to_skip[split], len(mine))
            self.to_skip[split] -= done
            if len(mine) > done:
                self.writers[split].add_many(chosen(reply, mine[done:]), position=number)

    def _duplicates(self, rows: np.ndarray, keep: np.ndarray, report: Report) -> np.ndarray:
        """Which of the kept rows have a text that was met before, or (in training) that is held out."""
        again = np.zeros(len(rows), bool)
        held_out = keep & (rows["split"] == 0) & np.isin(rows["text_hash"], self.held_out_texts)
        for index in range(len(SPLITS)):
            mine = np.flatnonzero(keep & ~held_out & (rows["split"] == index))
            again[mine] = ~self.texts[index].add(rows["text_hash"][mine])
        report.leave_out("duplicate_of_held_out", rows[held_out])
        report.leave_out("duplicate", rows[again])
        return held_out | again

    def _reject(self, chunk: Chunk, reply: Reply, taken: np.ndarray) -> None:
        """List the documents of a chunk that cannot be used, in their order, or stop at one too many."""
        # By the document that each stood before, or was.
        wrong = [((before, 0), BadDocument(place, reason)) for before, place, reason in reply.head["bad"]]
        if len(taken):
            documents = [item for item in parse(chunk, self.settings.fields) if isinstance(item, Document)]
            for row in taken.tolist():
                reason = f"id {documents[row].id!r} is already taken by {self._first_place(reply.rows['id_hash'][row])}"
                wrong.append(((row, 1), BadDocument(documents[row].place, reason)))
        for _, item in sorted(wrong, key=lambda pair: pair[0]):
            reject(item, self.settings.skip_bad, self.bad)

    def _first_place(self, key: int) -> str:
        everything = chain.from_iterable(self.inputs.values())
        items = read_documents(everything, self.settings.fields, self.settings.format)
        return next(item.place for item in items if isinstance(item, Document) and id_hash(item.id) == key)


def is_complete(folder: OutFolder, made_by: dict[str, Any], overwrite: bool) -> bool:
    """Whether the dataset wanted is there.

    Raises:
        ValueError: something else is there, and not to be replaced.
    """
    out = folder.path
    if folder.empty:
        return False
    if not (out / "prepare.json").is_file():
        raise ValueError(f"{out} is there and was not made by prepare; name another folder")
    record = json.loads((out / "prepare.json").read_bytes())
    if other := difference(record["made_by"], made_by):
        if overwrite:
            return False
        raise ValueError(
            f"{out} holds a dataset made otherwise ({other}); give --overwrite to replace it, or name another folder"
        )
    try:
        for split in record.get("splits", SPLITS):
            check_dataset(out / split, verify="sha256" if overwrite else "size")
    except (ValueError, FileNotFoundError) as error:
        if overwrite:
            return False
        raise ValueError(f"{error}; give --overwrite to do so in this folder") from None
    return True


def chosen(reply: Reply, which: np.ndarray) -> Documents:
    """Some documents of a chunk, by their row numbers in order, for a writer."""
    rows = reply.rows[which]
    mask = np.zeros(len(reply.rows), bool)
    mask[which] = True
    whole = int(rows["tokens"].sum(dtype=np.int64)) == len(reply.tokens)
    sources, languages, licences = reply.head["names"]
    return Documents(
        tokens=reply.tokens if whole else reply.tokens[np.repeat(mask, reply.rows["tokens"])],
        lengths=rows["tokens"],
        text_bytes=rows["bytes"],
        id_hash=rows["id_hash"],
        source=rows["source"],
        language=rows["language"],
        licence=rows["licence"],
        sources=sources,
        languages=languages,
        licences=licences,
        text_hash=rows["text_hash"],
    )


def summary(out: Path, already_complete: bool) -> dict[str, Any]:
    """What `prepare` returns, of a finished folder."""
    record = json.loads((out / "prepare.json").read_bytes())
    opened = {split: read_manifest(out / split) for split in record.get("splits", SPLITS)}
    nothing = {"documents": 0, "tokens": 0, "bytes": 0, "slices": []}
    any_split = next(iter(opened.values()), {"tokenizer_hash": tokenizer_hash(out / "tokenizer.json"), "vocab_size": 0})
    return {
        "out": str(out),
        "already_complete": already_complete,
        "tokenizer_hash": any_split["tokenizer_hash"],
        "vocab_size": any_split["vocab_size"],
        **{
            split: {**opened[split]["totals"], "slices": opened[split]["slices"]} if split in opened else nothing
            for split in SPLITS
        },
        "bad": record["bad"],
        "report": record.get("report", {}),
    }
