import numpy as np
import pytest

from dwslm.data.inspect import find_datasets, lengths, samples, totals
from dwslm.data.prepare import prepare
from dwslm.data.shard_writer import ShardWriter
from dwslm.data.shards import open_dataset
from tests.data.prepare_case import records, settings, write_jsonl


def write(path, counts, shard_tokens=10):
    writer = ShardWriter(path, vocab_size=300, eod=0, tokenizer_hash="t", shard_tokens=shard_tokens)
    for number, count in enumerate(counts):
        source, language = "ab"[number % 2], "xyz"[number % 3]
        writer.add(np.ones(count), text_bytes=2 * count, source=source, language=language, id_hash=number)
    writer.finish(made_by={})
    return path


def test_totals_by_hand(tmp_path):
    path = write(tmp_path, [1, 2, 3, 4, 50])  # ax, by, az, bx, ay
    assert totals(path, "source") == [
        {"source": "a", "documents": 3, "tokens": 54, "bytes": 108},
        {"source": "b", "documents": 2, "tokens": 6, "bytes": 12},
    ]
    assert [(row["language"], row["tokens"]) for row in totals(path, "language")] == [("y", 52), ("x", 5), ("z", 3)]
    assert [(row["source"], row["language"]) for row in totals(path, "both")][0] == ("a", "y")


def test_lengths_by_hand(tmp_path):
    found = lengths(write(tmp_path, [1, 1, 2, 3, 7, 8, 4095, 4096, 5000, 8]))
    # Sorted: 1 1 2 3 7 8 8 4095 4096 5000; of 13,221 tokens the first half ends in the document of 4,096.
    assert (found.median, found.token_median, found.longest) == (7.5, 4096, 5000)
    assert (found.long_documents, found.long_tokens) == (2, 9096)
    assert [tuple(row.values()) for row in found.classes] == [
        (1, 1, 2, 2), (2, 3, 2, 5), (4, 7, 1, 7), (8, 15, 2, 16), (2048, 4095, 1, 4095), (4096, 8191, 2, 9096),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_medians_are_those_of_numpy(tmp_path, count):
    drawn = np.random.default_rng(count).integers(1, 300, count).tolist()
    found = lengths(write(tmp_path, drawn, shard_tokens=2000))
    assert found.median == np.median(drawn)
    assert found.token_median == np.sort(np.repeat(drawn, drawn))[(sum(drawn) - 1) // 2]
    assert sum(row["documents"] for row in found.classes) == count
    assert sum(row["tokens"] for row in found.classes) == sum(drawn)


@pytest.fixture
def prepared(tmp_path):
    text = write_jsonl(tmp_path / "t.jsonl", records(60)), write_jsonl(tmp_path / "v.jsonl", records(40, "v"))
    prepare(settings(tmp_path / "out", text))
    return tmp_path / "out"


def test_samples_are_the_text(prepared):
    assert find_datasets(prepared) == {"train": prepared / "train", "valid": prepared / "valid"}
    found = samples(prepared / "train", 5, 10_000)
    assert len({sample["document"] for sample in found}) == 5
    for sample in found:
        record = records(60)[sample["document"]]
        assert [record[key] for key in ("text", "source", "language")] == [
            sample[key] for key in ("text", "source", "language")
        ]
        assert sample["bytes"] == len(record["text"].encode())
    assert samples(prepared / "train", 5, 7)[0]["text"] == found[0]["text"][:7]
    assert samples(prepared / "train", 5, 7, seed=1) != samples(prepared / "train", 5, 7)


def test_samples_of_one_slice(prepared):
    found = samples(prepared / "train", 100, 10, source="books", language="de")
    data = open_dataset(prepared / "train")
    assert {(s["source"], s["language"]) for s in found} == {("books", "de")}
    assert len(found) == sum(r["source"] == "books" and r["language"] == "de" for r in records(60)) < len(data)
    with pytest.raises(ValueError, match="has no source 'nowhere'; it has books, web"):
        samples(prepared / "train", 1, 10, source="nowhere")


def test_what_is_not_there(tmp_path, prepared):
    with pytest.raises(FileNotFoundError, match="holds no dataset"):
        find_datasets(tmp_path)
    (prepared / "tokenizer.json").write_bytes((prepared / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer that made"):
        samples(prepared / "train", 1, 10)
    (prepared / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json beside it"):
        samples(prepared / "train", 1, 10)
