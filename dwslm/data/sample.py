"""The tokenizer of a corpus: its sample of text, gathered in one pass, and the training."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import NamedTuple

from dwslm.data.chunks import Part, read_chunks
from dwslm.data.encode import EncodeSettings, SampleTexts, Task
from dwslm.data.prepare_settings import PrepareSettings
from dwslm.data.readers import BadDocument, reject
from dwslm.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from dwslm.data.workers import in_order, train_elsewhere

ELSEWHERE_BYTES = 1 << 20
"""A sample of this size or more is trained on in a process of its own; starting that takes longer for less."""


class Done(NamedTuple):
    """How far a stage is."""

    stage: str
    """ "sample" and "train tokenizer" (where there is none yet), "held-out" (where it is compared with), "tokenize"; or
    "check" and "merge"."""
    documents: int
    bytes: int
    """UTF-8 bytes of their texts."""
    share: float | None
    """Of the stage's input; None where nobody can say."""


Progress = Callable[[Done], None]
"""Called after every chunk."""


def trained_tokenizer(settings: PrepareSettings, parts: list[Part], vocab_size: int, progress: Progress) -> bytes:
    """Train a tokenizer on a sample of the training text; the content of its file.

    Args:
        parts: all training text, held-out groups included: those are passed over.

    Raises:
        ValueError: no text or too little for the vocabulary, or a document that cannot be used.
    """
    sample = SampleTexts(settings.tokenizer_bytes)
    encode = EncodeSettings(
        asdict(settings.fields),
        valid_fraction=settings.valid_fraction,
        min_characters=settings.min_characters,
        strip_control=settings.strip_control,
    )
    total = sum(part.size for part in parts)
    tasks = (Task(chunk, "train", sample_limit=sample.limit) for chunk in read_chunks(parts, settings.fields))
    bad: list[BadDocument] = []
    documents = size = 0
    with closing(in_order(tasks, encode, settings.worker_count())) as replies:
        for task, reply in replies:
            for _, place, reason in reply.head["bad"]:
                reject(BadDocument(place, reason), settings.skip_bad, bad)
            for key, text in reply.head["sample"]:
                sample.add(key, text)
            documents += reply.head["documents"]
            size += reply.head["bytes"]
            progress(Done("sample", documents, size, task.chunk.offset / total if total else None))
    if not sample.size:
        raise settings.no_document("train")
    # Every entry more takes a byte more; the trainer would make room for all of them at once.
    if vocab_size > SMALLEST_VOCABULARY + sample.size:
        raise ValueError(
            f"vocab_size={vocab_size}: the {sample.size:,} bytes of training text can't give so many entries; choose a "
            "smaller vocabulary with --vocab-size N or give more text"
        )
    progress(Done("train tokenizer", documents, size, None))
    if sample.size < ELSEWHERE_BYTES:
        return train_tokenizer(sample.take(), vocab_size).to_str(pretty=True).encode("utf-8")
    return train_elsewhere(sample.take(), vocab_size)
