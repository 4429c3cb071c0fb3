"""Text to a dataset: tokenizer, training and held-out shards, in one call that can be killed and repeated.

All work happens in `OUT.partial`, beside the folder asked for, which appears under its own name by one
rename when everything in it is whole. After a kill, the same call reads the text again (cheap), keeps the
tokenizer and every finished shard (dear), and ends with the same bytes as a call that was never killed.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dwslm.data.encode import encode_documents, sample_texts, unit_hash
from dwslm.data.prepare_settings import SPLITS, PrepareSettings, describe, difference
from dwslm.data.readers import BadDocument, Document, accept, read_documents, reject
from dwslm.data.shard_writer import ShardWriter, is_finished, json_bytes, sync_folder, write_durably
from dwslm.data.shards import id_hash, open_dataset
from dwslm.data.tokenizer import eod_id, load_tokenizer, tokenizer_hash, train_tokenizer

Progress = Callable[[str, int, int], None]
"""Called now and then with the stage ("sample", "tokenize"), and the documents and UTF-8 bytes read."""

_PROGRESS_DOCUMENTS = 256
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prepare(settings: PrepareSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Make the dataset that the settings describe, or find that it is there already.

    Returns:
        `out`; `already_complete`; `tokenizer_hash`; `vocab_size`; for "train" and "valid" their `documents`,
        `tokens`, `bytes` and `slices` (the same by source and language); `bad`, a list of `place`, `reason`.

    Raises:
        FileNotFoundError: an input that is not there.
        ValueError: a document that cannot be used (file, line, reason), too little text for the vocabulary,
            or a folder that holds something else.
        OSError: no room left on the disk.
    """
    try:
        return _Work(settings, progress or (lambda stage, documents, size: None)).run()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise OSError(
            f"{settings.out}: {os.strerror(error.errno)}; make room and run the same command again, "
            "finished shards are kept"
        ) from None


class _Work:
    """One call of `prepare`."""

    def __init__(self, settings: PrepareSettings, progress: Progress):
        self.settings = settings
        self.progress = progress
        self.inputs = settings.inputs()
        self.made_by = describe(settings, self.inputs)
        self.out = Path(os.path.abspath(settings.out))
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.replaced = self.out.with_name(f".{self.out.name}.replaced")
        self.bad: list[BadDocument] = []
        self.seen = {"sample": [0, 0], "tokenize": [0, 0]}  # documents and bytes read, for the progress

    def run(self) -> dict[str, Any]:
        if self.replaced.exists():  # killed while putting a new dataset in an old one's place
            if self.out.exists():
                shutil.rmtree(self.replaced)
            else:
                os.rename(self.replaced, self.out)
        if self._is_complete():
            return _summary(self.out, already_complete=True)
        self.partial.mkdir(parents=True, exist_ok=True)
        with _locked(self.partial):
            self._take_up()
            self._write_splits(self._tokenizer())
            self._write_record()
            self._commit()
        return _summary(self.out, already_complete=False)

    def _is_complete(self) -> bool:
        """Whether the dataset wanted is there; anything else in its place is an error, or to be replaced."""
        if self.out.is_mount():
            raise ValueError(f"{self.out} is a mount point and cannot be renamed; name a folder inside it")
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return False
        record = self.out / "prepare.json"
        if not record.is_file():
            raise ValueError(f"{self.out} is there and was not made by prepare; name another folder")
        if other := difference(json.loads(record.read_bytes())["made_by"], self.made_by):
            if self.settings.overwrite:
                return False
            raise ValueError(
                f"{self.out} holds a dataset made otherwise ({other}); give --overwrite to replace it, or name "
                "another folder"
            )
        try:
            for split in SPLITS:
                open_dataset(self.out / split, verify="sha256" if self.settings.overwrite else "size")
        except (ValueError, FileNotFoundError) as error:
            if self.settings.overwrite:
                return False
            raise ValueError(f"{error}; give --overwrite to do so in this folder") from None
        return True

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
            for split in SPLITS:
                shutil.rmtree(self.partial / split, ignore_errors=True)
            (self.partial / "tokenizer.json").unlink(missing_ok=True)
        elif any(name != "prepare.json.tmp" for name in os.listdir(self.partial)):
            raise ValueError(f"{self.partial} is there and was not made by prepare; remove it")
        self._write_record()

    def _write_record(self) -> None:
        record = {"made_by": self.made_by, "bad": [asdict(item) for item in self.bad]}
        write_durably(self.partial / "prepare.json", json_bytes(record))

    def _commit(self) -> None:
        if self.out.exists() and any(self.out.iterdir()):
            os.rename(self.out, self.replaced)
        os.rename(self.partial, self.out)
        sync_folder(self.out.parent)
        shutil.rmtree(self.replaced, ignore_errors=True)

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of this work: left by an earlier call, or given, or trained on a sample."""
        path = self.partial / "tokenizer.json"
        if not path.is_file():
            if self.settings.tokenizer:
                content = Path(self.settings.tokenizer).read_bytes()
            else:
                read = (document for split, document in self._read("train", "sample", []) if split == "train")
                texts = sample_texts(read, self.settings.tokenizer_bytes)
                trained = train_tokenizer(texts, self.made_by["settings"]["vocab_size"])
                content = trained.to_str(pretty=True).encode("utf-8")
            write_durably(path, content)
        return load_tokenizer(path)

    def _write_splits(self, tokenizer: Tokenizer) -> None:
        """Write what is missing of both splits, reading all documents to get there."""
        finished: dict[str, int] = {}  # documents of each split that are in finished shards
        writers: dict[str, ShardWriter] = {}
        for split in SPLITS:
            folder = self.partial / split
            if is_finished(folder):
                finished[split] = len(open_dataset(folder))
                continue
            writers[split] = ShardWriter(
                folder,
                vocab_size=tokenizer.get_vocab_size(),
                eod=eod_id(tokenizer, self.settings.eod_token),
                tokenizer_hash=tokenizer_hash(self.partial / "tokenizer.json"),
                shard_tokens=self.settings.shard_tokens,
            )
            finished[split] = writers[split].documents
        stream = self._once(chain.from_iterable(self._read(split, "tokenize", self.bad) for split in SPLITS))
        try:
            for split, document, tokens, text_bytes in encode_documents(tokenizer, _after(stream, finished)):
                writers[split].add(
                    tokens,
                    text_bytes=text_bytes,
                    source=document.source,
                    language=document.language,
                    id_hash=id_hash(document.id),
                    licence=document.licence,
                )
            for split, writer in writers.items():
                if writer.empty:
                    way_out = "change valid_fraction" if self.settings.valid_fraction else "give some"
                    raise ValueError(f"{self.out}: no document for the {split} split; {way_out}")
            texts = {name: Path(file).read_text("utf-8") for name, file in self.settings.licence_files.items()}
            for writer in writers.values():
                writer.finish(made_by=self.made_by, licence_texts=texts)
        finally:
            for writer in writers.values():
                writer.close()

    def _read(self, given: str, stage: str, bad: list[BadDocument]) -> Iterator[tuple[str, Document]]:
        """Documents of the inputs given for one split, each with the split it goes to."""
        seen = self.seen[stage]
        items = read_documents(self.inputs[given], self.settings.fields, self.settings.format)
        for document in accept(items, self.settings.skip_bad, bad):
            seen[0] += 1
            seen[1] += len(document.text.encode("utf-8"))
            if seen[0] % _PROGRESS_DOCUMENTS == 0:
                self.progress(stage, *seen)
            held_out = unit_hash(document.group, "split") < self.settings.valid_fraction
            yield ("valid" if held_out else given), document
        self.progress(stage, *seen)

    def _once(self, stream: Iterable[tuple[str, Document]]) -> Iterator[tuple[str, Document]]:
        """Refuse documents with an id seen before, in this split or the other; 64 bits an id are kept."""
        seen: set[int] = set()
        for split, document in stream:
            key = id_hash(document.id)
            if key in seen:
                reason = f"id {document.id!r} is already taken by {self._first_place(key)}"
                reject(BadDocument(document.place, reason), self.settings.skip_bad, self.bad)
                continue
            seen.add(key)
            yield split, document

    def _first_place(self, key: int) -> str:
        everything = chain.from_iterable(self.inputs.values())
        items = read_documents(everything, self.settings.fields, self.settings.format)
        return next(item.place for item in items if isinstance(item, Document) and id_hash(item.id) == key)


def _after(stream: Iterable[tuple[str, Document]], done: dict[str, int]) -> Iterator[tuple[str, Document]]:
    """Leave out the first `done[split]` documents of each split."""
    left = dict(done)
    for split, document in stream:
        if left[split]:
            left[split] -= 1
        else:
            yield split, document


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two calls do not write into each other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"{folder} is being written by another process; wait for it or stop it") from None
    finally:
        os.close(descriptor)


def _summary(out: Path, already_complete: bool) -> dict[str, Any]:
    opened = {split: open_dataset(out / split) for split in SPLITS}
    return {
        "out": str(out),
        "already_complete": already_complete,
        "tokenizer_hash": opened["train"].tokenizer_hash,
        "vocab_size": opened["train"].vocab_size,
        **{split: {**data.manifest["totals"], "slices": data.manifest["slices"]} for split, data in opened.items()},
        "bad": json.loads((out / "prepare.json").read_bytes())["bad"],
    }
