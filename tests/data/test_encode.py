import random

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from dwslm.data.encode import encode_documents, sample_texts, unit_hash
from dwslm.data.readers import Document
from dwslm.data.tokenizer import train_tokenizer


def document(number, size=10):
    return Document(f"id{number}", str(number % 10) * size, "s", "l", f"id{number}", "", f"f:{number}")


def test_unit_hash_is_uniform_and_purposes_are_independent():
    values = [unit_hash(f"id{number}", "split") for number in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert 0.22 < sum(value < 0.25 for value in values) / 4000 < 0.28
    held_out = [number for number, value in enumerate(values) if value < 0.25]
    also = sum(unit_hash(f"id{number}", "sample") < 0.25 for number in held_out)
    assert 0.18 < also / len(held_out) < 0.32


@pytest.mark.parametrize("max_bytes", [1, 99, 1000, 10**9])
def test_sample_is_a_prefix_by_hash_whatever_the_order(max_bytes):
    documents = [document(number, 5 + number * 37 % 50) for number in range(200)]
    by_hash = sorted(documents, key=lambda d: unit_hash(d.id, "sample"))
    expected, size = [], 0
    for d in by_hash:
        if expected and size + len(d.text) > max_bytes:
            break
        expected.append(d.text)
        size += len(d.text)
    for seed in range(5):
        shuffled = random.Random(seed).sample(documents, len(documents))
        assert sample_texts(shuffled, max_bytes) == expected


def test_one_enormous_document_is_not_the_whole_sample():
    texts = sample_texts([document(1, 3_000_000), document(2)], 10**9)
    assert sorted(len(text) for text in texts) == [10, 1 << 20]


def test_encoding_counts_bytes_and_refuses_a_tokenizer_that_adds_some():
    tokenizer = train_tokenizer(["some text to learn from, words and more words"] * 3, 262)
    documents = [("train", document(number, 3 + number)) for number in range(700)]
    encoded = list(encode_documents(tokenizer, documents))
    assert [d for _, d, _, _ in encoded] == [d for _, d in documents]
    assert all(text_bytes == len(d.text) for _, d, _, text_bytes in encoded)
    assert tokenizer.decode(encoded[5][2].tolist()) == documents[5][1].text
    adding = Tokenizer.from_str(tokenizer.to_str())
    adding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ValueError, match=r"f:0: its tokens stand for 4 bytes but the text has 3"):
        list(encode_documents(adding, documents))
