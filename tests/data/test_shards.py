import hashlib
import json

import numpy as np
import pytest

from dwslm.data.shard_writer import ShardWriter
from dwslm.data.shards import DOC_DTYPE, check_tokenizer, id_hash, open_dataset, token_dtype

DOCUMENTS = [  # source, language, tokens, bytes
    ("web", "en", [5, 6, 7], 9),
    ("books", "fr", [1], 2),
    ("web", "fr", [65535 - 1, 2], 5),
    ("books", "en", [3, 3, 3, 3], 4),
]


def write(path, documents=DOCUMENTS, shard_tokens=4, vocab_size=65536):
    writer = ShardWriter(path, vocab_size=vocab_size, eod=0, tokenizer_hash="ab" * 32, shard_tokens=shard_tokens)
    for number, (source, language, tokens, text_bytes) in enumerate(documents):
        writer.add(
            np.array(tokens, np.uint32),
            text_bytes=text_bytes,
            source=source,
            language=language,
            id_hash=id_hash(str(number)),
        )
    return writer.finish(made_by={})


@pytest.fixture
def dataset(tmp_path):
    write(tmp_path / "data")
    return tmp_path / "data"


def test_files_are_what_the_format_says(dataset):
    # Shards of 4 tokens: documents 0 and 1 fill the first, 2 and 3 make up the second.
    assert np.fromfile(dataset / "00000.bin", "<u2").tolist() == [5, 6, 7, 1]
    assert np.fromfile(dataset / "00001.bin", "<u2").tolist() == [65534, 2, 3, 3, 3, 3]
    table = np.load(dataset / "00001.docs.npy", allow_pickle=False)
    assert table.dtype == DOC_DTYPE and table.dtype.itemsize == 28
    assert table["start"].tolist() == [0, 2]
    assert table["tokens"].tolist() == [2, 4]
    assert table["bytes"].tolist() == [5, 4]
    assert sorted(file.name for file in dataset.iterdir()) == [
        "00000.bin",
        "00000.docs.npy",
        "00001.bin",
        "00001.docs.npy",
        "manifest.json",
    ]


def test_manifest_counts_and_checksums(dataset):
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    assert manifest["sources"] == ["books", "web"] and manifest["languages"] == ["en", "fr"]
    assert manifest["totals"] == {"documents": 4, "tokens": 10, "bytes": 20}
    assert {(s["source"], s["language"]): s["tokens"] for s in manifest["slices"]} == {
        ("books", "en"): 4,
        ("books", "fr"): 1,
        ("web", "en"): 3,
        ("web", "fr"): 2,
    }
    for shard in manifest["shards"]:
        raw = (dataset / f"{shard['name']}.bin").read_bytes()
        assert (shard["bin_bytes"], shard["bin_sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())


def test_reading_back(dataset):
    data = open_dataset(dataset, verify="sha256")
    assert len(data) == 4 and data.vocab_size == 65536 and data.eod == 0
    for index, (source, language, tokens, text_bytes) in enumerate(DOCUMENTS):
        assert data.tokens(index).tolist() == tokens
        row = data.docs[index]
        assert (data.sources[row["source"]], data.languages[row["language"]]) == (source, language)
        assert row["bytes"] == text_bytes and row["id_hash"] == id_hash(str(index))
    assert data.tokens(3, 1, 3).tolist() == [3, 3]
    assert data.tokens(2).base is not None and not data.tokens(2).flags.writeable
    assert data.fingerprint == hashlib.sha256((dataset / "manifest.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("request_", [(4,), (-1,), (0, 2, 5), (0, 2, 1), (1, -1, 1)])
def test_reading_outside_is_an_error(dataset, request_):
    with pytest.raises(IndexError, match="document"):
        open_dataset(dataset).tokens(*request_)


def test_type_follows_the_vocabulary(tmp_path):
    assert token_dtype(65536) == np.dtype("<u2") and token_dtype(65537) == np.dtype("<u4")
    write(tmp_path / "large", [("a", "en", [65536, 1], 4)], vocab_size=65537)
    data = open_dataset(tmp_path / "large")
    assert data.manifest["dtype"] == "uint32" and data.tokens(0).tolist() == [65536, 1]


def test_id_hash_is_blake2b():
    assert id_hash("é") == int.from_bytes(hashlib.blake2b("é".encode(), digest_size=8).digest(), "little")


# ------------------------------------------------------------------------------------------- damage


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such dataset folder"):
        open_dataset(tmp_path / "nowhere")


def test_no_manifest_no_dataset(dataset):
    (dataset / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"data has no manifest\.json"):
        open_dataset(dataset)


def test_shard_cut_short(dataset):
    with (dataset / "00001.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(ValueError, match=r"00001\.bin is cut short: 10 bytes, the manifest says 12"):
        open_dataset(dataset)


def test_shard_missing(dataset):
    (dataset / "00000.docs.npy").unlink()
    with pytest.raises(ValueError, match=r"00000\.docs\.npy is missing"):
        open_dataset(dataset)


def test_altered_tokens_show_in_the_checksum_alone(dataset):
    raw = bytearray((dataset / "00000.bin").read_bytes())
    raw[0] ^= 1
    (dataset / "00000.bin").write_bytes(raw)
    open_dataset(dataset)
    with pytest.raises(ValueError, match=r"00000\.bin is altered: its sha256"):
        open_dataset(dataset, verify="sha256")


@pytest.mark.parametrize(
    ("field", "value"), [("start", 1), ("tokens", 3), ("bytes", 4), ("source", 9), ("language", 2)]
)
def test_altered_table_of_the_same_size(dataset, field, value):
    table = np.load(dataset / "00001.docs.npy")
    table[field][0] = value
    np.save(dataset / "00001.docs.npy", table)
    with pytest.raises(ValueError, match=r"00001\.docs\.npy is altered: it does not agree"):
        open_dataset(dataset)


def test_a_pickle_is_not_read(dataset):
    size = (dataset / "00000.docs.npy").stat().st_size
    np.save(dataset / "00000.docs.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with (dataset / "00000.docs.npy").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=r"00000\.docs\.npy is damaged"):
        open_dataset(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format version 2 is not one this code reads"),
        ({"dtype": "uint32"}, "uint32 is not the type of tokens"),
        ({"shards": []}, "lacks shards"),
    ],
)
def test_manifest_from_elsewhere(dataset, change, message):
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    (dataset / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(ValueError, match=message):
        open_dataset(dataset)


def test_manifest_cut_short(dataset):
    raw = (dataset / "manifest.json").read_bytes()
    (dataset / "manifest.json").write_bytes(raw[:100])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        open_dataset(dataset)


def test_another_tokenizer(dataset, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data was not made with .*tokenizer\.json: it needs .* abababababab"):
        check_tokenizer(open_dataset(dataset), tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"gone\.json: no such tokenizer"):
        check_tokenizer(open_dataset(dataset), tmp_path / "gone.json")
