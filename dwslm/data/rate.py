"""How fast text becomes tokens here, beside the tokenizer's own batch call and a preprocessing script of the usual form.

All three take the same documents with the same tokenizer and all cores, turn by turn in one run.
"""

import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dwslm.data.chunks import read_documents
from dwslm.data.prepare import prepare
from dwslm.data.prepare_settings import PrepareSettings
from dwslm.data.readers import BadDocument, FieldSettings
from dwslm.data.shards import token_dtype
from dwslm.data.tokenizer import load_tokenizer

_BATCH = 1000  # documents in a call of `encode_batch`
_LINES = 32  # lines a worker is handed at a time, as in Megatron-LM's tools/preprocess_data.py


class Rate(NamedTuple):
    """What one way of tokenizing took for all rounds together."""

    name: str
    megabytes: float
    """10^6 UTF-8 bytes of text."""
    seconds: float
    cpu_seconds: float
    """Of this process and those that it started."""


def rates(
    text: list[str],
    tokenizer: str,
    fields: FieldSettings,
    megabytes: float,
    rounds: int,
    progress: Callable[[str], None] | None = None,
) -> list[Rate]:
    """Tokenize the first `megabytes` of a text three ways, `rounds` times.

    - "tokenizers encode_batch": tokens in memory, nothing read or written.
    - "dwslm prepare": from a JSON lines file to shards, checked; with the start of its workers.
    - "pool of encode": Megatron-LM's way, a `multiprocessing` pool that encodes one line of a JSON lines file at a
      time, written as one flat file; without the start of the pool.

    Raises:
        FileNotFoundError, ValueError: text or tokenizer that cannot be used.
    """
    loaded = load_tokenizer(tokenizer)
    documents: list[str] = []
    size = 0
    for item in read_documents([Path(path) for path in text], fields):
        if isinstance(item, BadDocument):
            raise ValueError(f"{item}; measure with text that can be read")
        documents.append(item.text)
        size += len(item.text.encode("utf-8"))
        if size >= megabytes * 1e6:
            break
    if len(documents) < 2:
        raise ValueError("one document is too little to measure with; give more text")
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "text.jsonl")
        with lines.open("w", encoding="utf-8") as file:
            for number, document in enumerate(documents):
                row = {"id": str(number), "text": document, "source": "text", "language": "any"}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        held_out = Path(folder, "valid.jsonl")
        held_out.write_text('{"id": "v", "text": "held out", "source": "text", "language": "any"}\n')
        ways: dict[str, Callable[[], float]] = {
            "tokenizers encode_batch": lambda: _encode_batch(loaded, documents),
            "dwslm prepare": lambda: _prepare(lines, held_out, tokenizer, Path(folder)),
            "pool of encode": lambda: _pool(lines, tokenizer, Path(folder, "flat.bin")),
        }
        loaded.encode_batch(documents[:_BATCH], add_special_tokens=False)  # starts its threads
        taken = {name: [0.0, 0.0] for name in ways}
        for turn in range(rounds):
            # Backwards every other time, so that a machine that slows down favours nobody.
            for name, way in list(ways.items())[:: 1 if turn % 2 == 0 else -1]:
                if progress is not None:
                    progress(f"round {turn + 1} of {rounds}: {name}")
                before = _cpu()
                taken[name][0] += way()
                taken[name][1] += _cpu() - before
    return [Rate(name, size * rounds / 1e6, *times) for name, times in taken.items()]


def _cpu() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _encode_batch(tokenizer: Tokenizer, documents: list[str]) -> float:
    start = time.perf_counter()
    for first in range(0, len(documents), _BATCH):
        tokenizer.encode_batch(documents[first : first + _BATCH], add_special_tokens=False)
    return time.perf_counter() - start


def _prepare(lines: Path, held_out: Path, tokenizer: str, folder: Path) -> float:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as out:
        prepare(PrepareSettings(out=f"{out}/data", train=[str(lines)], valid=[str(held_out)], tokenizer=tokenizer))
    return time.perf_counter() - start


class _Line:
    """What a worker of the pool holds."""

    tokenizer: Tokenizer


def _load(path: str) -> None:
    _Line.tokenizer = load_tokenizer(path)


def _wait(_: int) -> None:
    time.sleep(0.05)


def _encode_line(line: str) -> list[int]:
    ids: list[int] = _Line.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return ids


def _pool(lines: Path, tokenizer: str, out: Path) -> float:
    workers = PrepareSettings(out="x", train=["x"], valid=["x"]).worker_count()
    dtype = token_dtype(load_tokenizer(tokenizer).get_vocab_size())
    with multiprocessing.get_context("spawn").Pool(workers, _load, (tokenizer,)) as pool:
        pool.map(_wait, range(4 * workers), chunksize=1)
        start = time.perf_counter()
        with lines.open(encoding="utf-8") as text, out.open("wb") as flat:
            for ids in pool.imap(_encode_line, text, _LINES):
                flat.write(np.array(ids, dtype).tobytes())
        taken = time.perf_counter() - start
        pool.close()
        pool.join()
    return taken
