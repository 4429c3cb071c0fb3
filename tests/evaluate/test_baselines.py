"""Baselines against values worked out by hand, and texts against what they were made from."""

import lzma

import numpy as np
import pytest

from dwslm.data.shard_writer import ShardWriter
from dwslm.data.shards import open_dataset
from dwslm.data.tokenizer import eod_id, train_tokenizer
from dwslm.evaluate.baselines import (
    byte_entropy,
    document_texts,
    token_spellings,
    uniform_bits_per_byte,
    xz_bits_per_byte,
)


def test_byte_entropy():
    # Shares 2/3 and 1/3: (2/3) log2(3/2) + (1/3) log2(3) = 0.389975 + 0.528321
    assert byte_entropy([b"aa", b"b"]) == pytest.approx(0.918296, abs=1e-6)
    assert byte_entropy([bytes(range(256))]) == pytest.approx(8)
    assert str(byte_entropy([b"aaaa"])) == "0.0"


def test_xz():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, size=50_000, dtype=np.uint8).tobytes()
    # Noise does not compress; the same noise again costs next to nothing, as the two are one stream.
    once, twice = xz_bits_per_byte([noise]), xz_bits_per_byte([noise, noise])
    assert 8 < once < 8.05
    assert 4 < twice < 4.1
    assert once == 8 * len(lzma.compress(noise, preset=9)) / 50_000


def test_uniform():
    assert uniform_bits_per_byte(32_768, tokens=1000, byte_count=4000) == 3.75


@pytest.mark.parametrize("baseline", [byte_entropy, xz_bits_per_byte])
def test_no_text(baseline):
    with pytest.raises(ValueError, match="there is no text"):
        baseline([b"", b""])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["grün grün grün blau 三 三 三"], vocab_size=266)


TEXTS = ["grün", "🙂 blau\r\n\x00", "三<|eod|>三 ", "\u00a0\ufffd"]


@pytest.fixture
def dataset(tmp_path, tokenizer):
    writer = ShardWriter(tmp_path / "d", vocab_size=266, eod=eod_id(tokenizer), tokenizer_hash="0" * 64)
    for number, text in enumerate(TEXTS):
        tokens = np.array(tokenizer.encode(text).ids)
        writer.add(tokens, text_bytes=len(text.encode()), source="a", language="x", id_hash=number)
    writer.finish(made_by={})
    return open_dataset(tmp_path / "d")


def test_texts_come_back_exactly(dataset, tokenizer):
    texts = document_texts(dataset, np.array([3, 0, 1, 2]), token_spellings(tokenizer))
    assert list(texts) == [TEXTS[i].encode() for i in (3, 0, 1, 2)]


def test_spellings_hold_every_byte_once(tokenizer):
    spellings = token_spellings(tokenizer)
    assert spellings[eod_id(tokenizer)] == b""
    assert sorted(spelling for spelling in spellings if len(spelling) == 1) == [bytes([b]) for b in range(256)]


def test_texts_of_another_tokenizer(dataset, tokenizer):
    spellings = [spelling + b"x" for spelling in token_spellings(tokenizer)]
    with pytest.raises(ValueError, match="document 0 has 5 bytes.*not the one"):
        list(document_texts(dataset, np.array([0]), spellings))
