"""Documents to tokens: a bounded sample to train a tokenizer on, and encoding in batches."""

import hashlib
import heapq
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer

from dwslm.data.readers import Document
from dwslm.data.tokenizer import token_bytes

_BATCH_DOCUMENTS = 512
_BATCH_CHARACTERS = 1 << 22
_SAMPLE_CHARACTERS = 1 << 20  # of one document: an enormous one must not be the whole sample


def unit_hash(text: str, purpose: str) -> float:
    """Hash of a text, uniform in [0, 1); hashes for different purposes have nothing to do with each other."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose.encode("ascii")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample_texts(documents: Iterable[Document], max_bytes: int) -> list[str]:
    """The texts with the lowest hashes of their ids, as many as `max_bytes` of UTF-8 hold (one at least).

    One pass, memory for the sample alone; the order of the documents makes no difference.
    """
    heap: list[tuple[float, str, int]] = []  # (-hash, text, bytes): the highest hash on top
    size = 0
    limit = 1.0  # lowest hash that did not fit; nothing from there on can belong to the sample
    for document in documents:
        key = unit_hash(document.id, "sample")
        if key >= limit:
            continue
        text = document.text[:_SAMPLE_CHARACTERS]
        heapq.heappush(heap, (-key, text, len(text.encode("utf-8"))))
        size += len(text.encode("utf-8"))
        while size > max_bytes and len(heap) > 1:
            negative, _, length = heapq.heappop(heap)
            size -= length
            limit = -negative
    return [text for _, text, _ in sorted(heap, reverse=True)]


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[tuple[str, Document]]
) -> Iterator[tuple[str, Document, np.ndarray, int]]:
    """Each document, and the split it goes to, with its tokens and the UTF-8 bytes of its text.

    Yields:
        split, document, [n] uint32 tokens without special ones, bytes.

    Raises:
        ValueError: the bytes of a document's tokens are not as many as those of its text. Bits per byte would
            be wrong, so a tokenizer that adds or loses anything cannot be used.
    """
    lengths = token_bytes(tokenizer)
    for batch in _batches(documents):
        texts = [document.text for _, document in batch]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for (split, document), encoding in zip(batch, encodings, strict=True):
            tokens = np.array(encoding.ids, np.uint32)
            text_bytes = len(document.text.encode("utf-8"))
            if (found := int(lengths[tokens].sum(dtype=np.int64))) != text_bytes:
                raise ValueError(
                    f"{document.place}: its tokens stand for {found} bytes but the text has {text_bytes}; "
                    "the tokenizer adds or loses text and cannot be used"
                )
            yield split, document, tokens, text_bytes


def _batches(documents: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch: list[tuple[str, Document]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += len(item[1].text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
