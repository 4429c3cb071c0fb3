import random
from dataclasses import asdict

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

import dwslm.data.sample
from dwslm.data.chunks import Chunk, list_parts, read_chunks
from dwslm.data.encode import (
    ROW,
    ChunkWork,
    EncodeSettings,
    Reply,
    SampleTexts,
    Task,
    reply_from_frames,
    reply_to_frames,
    unit_hash,
)
from dwslm.data.prepare import prepare_tokenizer
from dwslm.data.readers import FieldSettings
from dwslm.data.shards import id_hash
from dwslm.data.tokenizer import train_tokenizer
from dwslm.data.workers import train_elsewhere
from tests.data.prepare_case import records, settings, write_jsonl

LEARN = ["some text to learn from, words and more words"] * 3


def test_unit_hash_is_uniform_and_purposes_are_independent():
    values = [unit_hash(f"id{number}", "split") for number in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert 0.22 < sum(value < 0.25 for value in values) / 4000 < 0.28
    held_out = [number for number, value in enumerate(values) if value < 0.25]
    also = sum(unit_hash(f"id{number}", "sample") < 0.25 for number in held_out)
    assert 0.18 < also / len(held_out) < 0.32


@pytest.mark.parametrize("max_bytes", [1, 99, 1000, 10**9])
def test_sample_is_a_prefix_by_hash_whatever_the_order(max_bytes):
    texts = {unit_hash(f"id{number}", "sample"): str(number % 10) * (5 + number * 37 % 50) for number in range(200)}
    expected, size = [], 0
    for key in sorted(texts):
        if expected and size + len(texts[key]) > max_bytes:
            break
        expected.append(texts[key])
        size += len(texts[key])
    for seed in range(5):
        sample = SampleTexts(max_bytes)
        for key in random.Random(seed).sample(list(texts), len(texts)):
            sample.add(key, texts[key])
        assert list(sample.take()) == expected
        assert list(sample.take()) == []


def chunk(rows):
    lines = b"".join(b'{"id": "%s", "text": "%s", "source": "s", "language": "l"}\n' % row for row in rows)
    return Chunk("lines", "f", "f", 1, lines, 0)


def test_one_enormous_document_is_not_the_whole_sample():
    work = ChunkWork(EncodeSettings(asdict(FieldSettings())))
    reply = work.do(Task(chunk([(b"a", b"1" * 3_000_000), (b"b", b"2" * 10)]), "train", sample_limit=1.0))
    assert sorted(len(text) for _, text in reply.head["sample"]) == [10, 1 << 20]
    assert (reply.head["documents"], reply.head["bytes"]) == (2, 3_000_010)


@pytest.fixture
def tokenizer(tmp_path):
    made = train_tokenizer(LEARN, 262)
    made.save(str(tmp_path / "tokenizer.json"))
    return made, str(tmp_path / "tokenizer.json")


def test_rows_and_tokens(tokenizer):
    made, path = tokenizer
    rows = [(f"d{number}".encode(), b"words " * (1 + number % 7)) for number in range(50)]
    work = ChunkWork(EncodeSettings(asdict(FieldSettings()), tokenizer=path))
    reply = work.do(Task(chunk(rows), "train"))
    assert reply.rows["id_hash"].tolist() == [id_hash(name.decode()) for name, _ in rows]
    assert reply.rows["bytes"].tolist() == [len(text) for _, text in rows]
    ends = np.cumsum(reply.rows["tokens"])
    texts = [made.decode(part.tolist()) for part in np.split(reply.tokens, ends[:-1])]
    assert texts == [text.decode() for _, text in rows]
    again = reply_from_frames(*reply_to_frames(reply))
    assert np.array_equal(again.rows, reply.rows) and np.array_equal(again.tokens, reply.tokens)
    assert again.head["names"] == reply.head["names"] == [["s"], ["l"], [""]]


def test_tokens_that_nobody_wants_are_not_made(tokenizer):
    rows = [(b"d%d" % number, b"words") for number in range(40)]
    work = ChunkWork(EncodeSettings(asdict(FieldSettings()), valid_fraction=0.5, tokenizer=tokenizer[1]))
    whole = work.do(Task(chunk(rows), "train"))
    some = work.do(Task(chunk(rows), "train", wanted=(False, True)))
    assert 5 < int((whole.rows["split"] == 1).sum()) < 35
    assert (some.rows["tokens"] > 0).tolist() == (whole.rows["split"] == 1).tolist()
    named = [name for name in ROW.names if name != "tokens"]
    assert np.array_equal(some.rows[named], whole.rows[named])


def test_a_tokenizer_that_adds_bytes_is_refused(tokenizer, tmp_path):
    adding = Tokenizer.from_str(tokenizer[0].to_str())
    adding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    adding.save(str(tmp_path / "adding.json"))
    work = ChunkWork(EncodeSettings(asdict(FieldSettings()), tokenizer=str(tmp_path / "adding.json")))
    with pytest.raises(ValueError, match=r"f:1: its tokens stand for 4 bytes but the text has 3"):
        work.do(Task(chunk([(b"a", b"000")]), "train"))


def test_an_empty_reply_survives_the_pipe():
    again = reply_from_frames(*reply_to_frames(Reply({"error": "é \udc80"})))
    assert again.head["error"] == "é \udc80" and len(again.rows) == len(again.tokens) == 0


def test_training_elsewhere_gives_the_same_tokenizer(tmp_path, monkeypatch):
    assert train_elsewhere(iter(LEARN), 262) == train_tokenizer(LEARN, 262).to_str(pretty=True).encode()
    with pytest.raises(ValueError, match="vocab_size=9000: the training text only gives"):
        train_elsewhere(LEARN, 9000)
    text = write_jsonl(tmp_path / "t.jsonl", records(200)), write_jsonl(tmp_path / "v.jsonl", records(20, "v"))
    here = prepare_tokenizer(settings(tmp_path / "here.json", text))
    monkeypatch.setattr(dwslm.data.sample, "ELSEWHERE_BYTES", 0)
    assert prepare_tokenizer(settings(tmp_path / "there.json", text))["tokenizer_hash"] == here["tokenizer_hash"]


def test_chunks_of_text_files(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"%d" % number * 400_000)
    chunks = list(read_chunks(list_parts([tmp_path]), FieldSettings(source="s", language="l")))
    assert [part.offset for part in chunks] == [1_200_000, 2_000_000]
