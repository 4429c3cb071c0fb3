"""Byte-level BPE that loses nothing: text -> tokens -> the same text, for every string of valid Unicode.

Nothing is normalised, all 256 bytes are in the vocabulary, and special tokens spelt out in a text are encoded
as the plain characters they are, so a document's token bytes always sum to its UTF-8 bytes.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EOD = "<|eod|>"

SMALLEST_VOCABULARY = 257  # the 256 bytes and the special token
LARGEST_VOCABULARY = 1 << 31  # a batch holds ids as int32

# Pieces that merges do not cross, first match wins: a word with at most one character before it (most often
# its space); up to three digits; punctuation with its space and line ends; white space, whose last blank is
# left to the next word. Marks (\p{M}) count as letters: Indic and Thai vowel signs belong to their word.
_PIECES = (
    r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Training takes time with the square of a piece's length, so there pieces end after so many characters. Ordinary text
# has none of that length.
_LONGEST_TRAINED = 4096
_TRAINED_PIECES = _PIECES.replace("+", f"{{1,{_LONGEST_TRAINED}}}").replace("*", f"{{0,{_LONGEST_TRAINED}}}")


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError for a size that no tokenizer trained here can have."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size} must be {SMALLEST_VOCABULARY} (256 bytes and {EOD}) or more")
    if vocab_size > LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size} must be {LARGEST_VOCABULARY} or less: token ids have 31 bits")


def _cutting_into(pieces: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int = 32768) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` entries, the special token `<|eod|>` included.

    The same texts give the same tokenizer, byte for byte when saved.

    Raises:
        ValueError: a `vocab_size` that `check_vocab_size` refuses, or too little text to reach it.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _cutting_into(_TRAINED_PIECES)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=sorted(_byte_alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = _cutting_into(_PIECES)
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the training text only gives {found} entries; "
            f"choose a smaller vocabulary with --vocab-size N (up to {found}) or give more text"
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer file and set it to encode text as it is: no padding, cutting or special tokens.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a tokenizer file, or one that cannot give back every text (it normalises, or is not
            byte-level).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception whatever is wrong with the file
        raise ValueError(f"{path} is not a tokenizer file of the `tokenizers` library ({error})") from None
    if tokenizer.normalizer is not None:
        raise ValueError(f"{path} normalises text, so bytes would be lost; give a tokenizer without a normaliser")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    try:
        token_bytes(tokenizer)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tokenizer


def tokenizer_hash(path: str | Path) -> str:
    """sha256 (hex) of a tokenizer file, the name by which datasets and checkpoints know it."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def eod_id(tokenizer: Tokenizer, token: str = EOD) -> int:
    """Id of the end-of-document token.

    Raises:
        ValueError: the tokenizer has no such special token.
    """
    index = tokenizer.token_to_id(token)
    added = tokenizer.get_added_tokens_decoder()
    if index is None or index not in added or not added[index].special:
        raise ValueError(f"the tokenizer has no special token {token!r} to end documents with")
    return index


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each token stands for; 0 for special tokens.

    Counted in the raw byte-level alphabet, one character a byte. A token's decoded string would not do: a
    lone byte of a longer character decodes to U+FFFD, which is three bytes.

    Returns:
        [vocab_size] int32.

    Raises:
        ValueError: ids with gaps, or an entry that is not spelt in the byte-level alphabet.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    alphabet = _byte_alphabet()
    if set(vocabulary.values()) != set(range(len(vocabulary))):
        raise ValueError(f"token ids are not 0 to {len(vocabulary) - 1}, each once")
    lengths = np.zeros(len(vocabulary), np.int32)
    for entry, index in vocabulary.items():
        if index in added:  # spelt in plain characters, not in the byte alphabet
            lengths[index] = 0 if added[index].special else len(entry.encode("utf-8"))
        elif all(character in alphabet for character in entry):
            lengths[index] = len(entry)
        else:
            raise ValueError(f"not a byte-level tokenizer: entry {entry!r} is not spelt in the byte alphabet")
    if missing := [character for character in alphabet if character not in vocabulary]:
        raise ValueError(f"not a byte-level tokenizer: {len(missing)} of the 256 bytes have no entry")
    return lengths
