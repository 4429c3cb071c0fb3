"""A chunk of raw documents to tokens and a table of what was found: all that is dear, with no state from chunk to chunk."""

import hashlib
import heapq
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dwslm.data.chunks import Chunk, parse
from dwslm.data.decontaminate import HeldOutRuns
from dwslm.data.dedup import text_hash
from dwslm.data.readers import BadDocument, Document, FieldSettings
from dwslm.data.shards import id_hash, token_dtype
from dwslm.data.tokenizer import load_tokenizer, token_bytes

_SAMPLE_CHARACTERS = 1 << 20  # of one document: an enormous one must not be the whole sample

# C0 and C1 controls that are not white space of a text, and the byte order mark.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]")

SHORT, OVERLAP = 1, 2
"""Why a document is left out (`why` of a row): too short, or too much of it is held out. 0: it is not."""

ROW = np.dtype(
    [
        ("split", "u1"),  # 0 train, 1 valid
        ("why", "u1"),
        ("tokens", "<u4"),  # 0 where its tokens were not asked for
        ("bytes", "<u8"),  # UTF-8 bytes of its text
        ("source", "<u2"),  # these three index the names of the chunk
        ("language", "<u2"),
        ("licence", "<u2"),
        ("controls", "<u4"),  # control characters taken out
        ("held_out", "<u4"),  # runs of 13 words that are held out, and all that it has
        ("runs", "<u4"),
        ("id_hash", "<u8"),
        ("text_hash", "<u8"),  # 0 where duplicates do not matter
    ]
)


@dataclass(frozen=True)
class EncodeSettings:
    """How documents are made into tokens: the part of `PrepareSettings` that a worker needs."""

    fields: dict[str, str]
    valid_fraction: float = 0.0
    tokenizer: str = ""
    """Path of the tokenizer file. Empty: none is needed yet."""
    min_characters: int = 0
    strip_control: bool = False
    dedup: bool = False
    held_out: str = ""
    """Folder with the runs of the held-out text. Empty: nobody asked."""
    overlap_share: float | None = None
    """Leave out training documents with at least this share of held-out runs. None: none."""


@dataclass(frozen=True)
class Task:
    """One chunk, and what to do with it."""

    chunk: Chunk
    given: str
    """The split that the chunk's input was given for."""
    wanted: tuple[bool, bool] = (True, True)
    """Whether tokens of train and of valid documents are needed; the rest of a row always is."""
    sample_limit: float | None = None
    """Return texts whose sample hash is below this, rather than tokens."""


@dataclass
class Reply:
    """What came of a task, in a form that goes through a pipe: JSON and bytes."""

    head: dict[str, Any]
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))


def unit_hash(text: str, purpose: str) -> float:
    """Hash of a text, uniform in [0, 1); hashes for different purposes have nothing to do with each other."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose.encode("ascii")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_held_out(document: Document, valid_fraction: float) -> bool:
    """Whether the hash of a document's group falls into the held-out fraction."""
    return unit_hash(document.group, "split") < valid_fraction


def clean(text: str, strip_control: bool) -> tuple[str, int]:
    """A text without control characters, if so asked, and how many it had."""
    return _CONTROL.subn("", text) if strip_control else (text, 0)


class SampleTexts:
    """The texts with the lowest hashes of their ids, as many as `max_bytes` of UTF-8 hold (one at least).

    They wait in a temporary file, so that the trainer has the memory to itself. The order of the documents makes no difference.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.limit = 1.0
        """Lowest hash that did not fit; nothing from there on can belong to the sample."""
        self._heap: list[tuple[float, int, int]] = []  # (-hash, place in the file, bytes): the highest hash on top
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open until `take` has read it
        self.size = 0
        """Bytes of the texts so far."""

    def add(self, key: float, text: str) -> None:
        """Add a text of this hash, which may push out others, or itself."""
        if key >= self.limit:
            return
        encoded = text.encode("utf-8")
        heapq.heappush(self._heap, (-key, self._file.seek(0, os.SEEK_END), len(encoded)))
        self._file.write(encoded)
        self.size += len(encoded)
        while self.size > self.max_bytes and len(self._heap) > 1:
            negative, _, length = heapq.heappop(self._heap)
            self.size -= length
            self.limit = -negative

    def take(self) -> Iterator[str]:
        """The texts by hash. Nothing is left here."""
        for _, place, size in sorted(self._heap, reverse=True):
            self._file.seek(place)
            yield self._file.read(size).decode("utf-8")
        self._heap.clear()
        self._file.close()


class ChunkWork:
    """Does tasks one by one; holds the tokenizer and nothing that changes.

    Raises:
        ValueError, FileNotFoundError: the tokenizer cannot be used.
    """

    def __init__(self, settings: EncodeSettings):
        self.settings = settings
        self.fields = FieldSettings(**settings.fields)
        self.tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else None
        if self.tokenizer is not None:
            self.lengths = token_bytes(self.tokenizer)
            self.dtype = token_dtype(len(self.lengths))
        self.runs = HeldOutRuns(Path(settings.held_out)) if settings.held_out else None

    def do(self, task: Task) -> Reply:
        """The documents of a chunk as a sample, or as rows and tokens.

        `head` holds `bad`, a list of [how many documents stood before it, place, reason], and the names that
        rows index; or for a sample, `documents`, `bytes`, `sample`.

        Raises:
            ValueError: the bytes of a document's tokens are not as many as those of its text. Bits per byte
                would be wrong, so a tokenizer that adds or loses anything cannot be used.
        """
        return self._encode(task) if task.sample_limit is None else self._sample(task, task.sample_limit)

    def _sample(self, task: Task, limit: float) -> Reply:
        bad: list[list[Any]] = []
        chosen: list[list[Any]] = []
        documents = size = 0
        for item in parse(task.chunk, self.fields):
            if isinstance(item, BadDocument):
                bad.append([documents, item.place, item.reason])
                continue
            documents += 1
            text, _ = clean(item.text, self.settings.strip_control)
            size += len(text.encode("utf-8"))
            if not text.strip() or len(text) < self.settings.min_characters:
                continue
            key = unit_hash(item.id, "sample")
            if key < limit and not is_held_out(item, self.settings.valid_fraction):
                chosen.append([key, text[:_SAMPLE_CHARACTERS]])
        return Reply({"bad": bad, "documents": documents, "bytes": size, "sample": chosen})

    def _encode(self, task: Task) -> Reply:
        names: list[dict[str, int]] = [{}, {}, {"": 0}]  # sources, languages, licences
        bad: list[list[Any]] = []
        rows: list[tuple[int | float, ...]] = []
        examples: list[list[Any]] = []
        parts: list[np.ndarray] = []
        for item in parse(task.chunk, self.fields):
            if isinstance(item, BadDocument):
                bad.append([len(rows), item.place, item.reason])
                continue
            text, controls = clean(item.text, self.settings.strip_control)
            split = int(task.given == "valid" or is_held_out(item, self.settings.valid_fraction))
            text_bytes = len(text.encode("utf-8"))
            why = SHORT if len(text) < self.settings.min_characters or not text.strip() else 0
            held_out = runs = 0
            if self.runs is not None and not split and not why:
                held_out, runs = self.runs.count(text)
                if held_out:
                    examples.append([len(rows), item.id])
                least = self.settings.overlap_share
                if held_out and least is not None and held_out >= least * runs:
                    why = OVERLAP
            count = 0
            if task.wanted[split] and not why:
                parts.append(self._tokens(item, text, text_bytes))
                count = len(parts[-1])
            labels = (item.source, item.language, item.licence)
            indices = [known.setdefault(name, len(known)) for known, name in zip(names, labels, strict=True)]
            text_key = text_hash(text) if self.settings.dedup else 0
            rows.append((split, why, count, text_bytes, *indices, controls, held_out, runs, id_hash(item.id), text_key))
        head = {"bad": bad, "names": [list(known) for known in names], "overlapping": examples}
        return Reply(head, np.array(rows, ROW), np.concatenate([np.zeros(0, self.dtype), *parts]))

    def _tokens(self, document: Document, text: str, text_bytes: int) -> np.ndarray:
        assert self.tokenizer is not None
        # One by one: the batch call starts as many threads as there are cores, in each of as many workers.
        tokens = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, self.dtype)
        if (found := int(self.lengths[tokens].sum(dtype=np.int64))) != text_bytes:
            raise ValueError(
                f"{document.place}: its tokens stand for {found} bytes but the text has {text_bytes}; "
                "the tokenizer adds or loses text and cannot be used"
            )
        return tokens


def reply_to_frames(reply: Reply) -> tuple[bytes, bytes]:
    """A reply as JSON and raw bytes."""
    head = {**reply.head, "row_count": len(reply.rows), "dtype": reply.tokens.dtype.str}
    return json.dumps(head).encode("ascii"), reply.rows.tobytes() + reply.tokens.tobytes()


def reply_from_frames(head: bytes, payload: bytes) -> Reply:
    """The inverse of `reply_to_frames`."""
    values = json.loads(head)
    size = values["row_count"] * ROW.itemsize
    rows = np.frombuffer(payload[:size], ROW)
    return Reply(values, rows, np.frombuffer(payload, values["dtype"], offset=size))
