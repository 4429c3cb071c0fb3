"""What a score is held against: a byte histogram, a general compressor, and a model that knows nothing."""

import lzma
import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dwslm.data.shards import Dataset
from dwslm.data.tokenizer import _byte_alphabet


def byte_entropy(texts: Iterable[bytes]) -> float:
    """Entropy of the texts' own byte histogram, bits per byte: the least that an order-0 byte model can need.

    Raises ValueError where there is no text at all.
    """
    counts = np.zeros(256, dtype=np.int64)
    for text in texts:
        counts += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
    total = int(counts.sum())
    if total == 0:
        raise ValueError("byte entropy: there is no text")
    share = counts[counts > 0] / total
    return float(-(share * np.log2(share)).sum()) + 0.0  # + 0.0: one repeated byte gives 0, not -0


def xz_bits_per_byte(texts: Iterable[bytes]) -> float:
    """Bits per byte of `xz -9` over the texts one after another, container included.

    The compressor sees all documents as one stream (window 64 MiB), which a model that reads each on its own
    does not. It needs about 700 MB of memory. Raises ValueError where there is no text at all.
    """
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, preset=9)
    read = written = 0
    for text in texts:
        read += len(text)
        written += len(compressor.compress(text))
    if read == 0:
        raise ValueError("xz: there is no text")
    return 8 * (written + len(compressor.flush())) / read


def uniform_bits_per_byte(vocab_size: int, tokens: int, byte_count: int) -> float:
    """Bits per byte of a model that gives each of `vocab_size` tokens the same probability."""
    return math.log2(vocab_size) * tokens / byte_count


def token_spellings(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of text that each token of a byte-level tokenizer stands for; none for special tokens.

    Decoding token by token would not do: part of a character decodes to U+FFFD.
    """
    alphabet = _byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    spellings = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for entry, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index not in added:
            spellings[index] = bytes(alphabet[character] for character in entry)
        elif not added[index].special:  # spelt in plain characters, not in the byte alphabet
            spellings[index] = entry.encode("utf-8")
    return spellings


def document_texts(dataset: Dataset, documents: NDArray[np.int64], spellings: list[bytes]) -> Iterator[bytes]:
    """The text of each of the documents, from its tokens.

    Raises ValueError if a text is not as long as the document table says: it is another tokenizer's.
    """
    for doc in documents.tolist():
        text = b"".join([spellings[token] for token in dataset.tokens(doc).tolist()])
        if len(text) != dataset.docs["bytes"][doc]:
            raise ValueError(
                f"{dataset.path}: document {doc} has {dataset.docs['bytes'][doc]} bytes and its tokens spell "
                f"{len(text)}: the tokenizer is not the one that the dataset was made with"
            )
        yield text
