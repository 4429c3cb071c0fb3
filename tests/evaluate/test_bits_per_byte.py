"""Scoring: known models on small datasets, against sums done by hand or one document at a time."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwslm.data.shard_writer import ShardWriter
from dwslm.data.shards import open_dataset
from dwslm.data.tokenizer import eod_id, train_tokenizer
from dwslm.evaluate.bits_per_byte import EvalSettings, score, score_text
from dwslm.evaluate.report import ONE_NAT, make_report

EOD = 15  # of datasets with 16 tokens


def first_token_model(batch):
    """1.5 nats for a token predicted from eod, 0.25 for any other, 9 for eod, NaN without a target."""
    nats = np.where(batch.tokens == EOD, 1.5, 0.25)
    nats = np.where(batch.targets == EOD, 9.0, nats)
    return np.where(batch.targets == -100, np.nan, nats).astype(np.float32)


def test_golden_case(make_dataset, make_doc):
    # Context 3 leaves 2 text tokens a piece:
    #   document 0 (5 bytes) = [1 2] [3]:  1.5 + 0.25, then 1.5 as the next piece starts = 3.25 nats
    #   document 1 (1 byte)  = [2]:        1.5 nats
    # The closing eods, at 9 nats each, count nowhere. In all 4.75 nats over 6 bytes:
    #   4.75 / (6 x 0.69314718) = 1.1421336
    #   3.25 / (5 x 0.69314718) = 0.9377518 and 1.5 / 0.69314718 = 2.1640426 by source
    # The mean of the two documents would be 1.551.
    dataset = make_dataset([make_doc("web", "en", [1, 2, 3], 5), make_doc("code", "en", [2], 1)])
    scores = score(first_token_model, dataset, EvalSettings(), training_context=3)
    report = make_report(scores, samples=10, seed=0)
    assert report.overall.nats_fixed == int(4.75 * 2**32)
    assert report.overall.bits_per_byte == pytest.approx(1.1421336, abs=1e-7)
    assert (report.overall.bytes, report.overall.tokens, report.overall.documents) == (6, 4, 2)
    by_source = {row.source: row.bits_per_byte for row in report.by_source}
    assert by_source["web"] == pytest.approx(0.9377518, abs=1e-7)
    assert by_source["code"] == pytest.approx(2.1640426, abs=1e-7)


def test_uniform_model(make_dataset, make_doc, make_table_model):
    rng = np.random.default_rng(0)
    documents = [
        make_doc("a", "en", rng.integers(0, 32_767, size=length).tolist(), 4 * length)
        for length in (1, 2, 63, 64, 65, 500)
    ]
    dataset = make_dataset(documents, vocab_size=32_768)
    model = make_table_model(np.full(32_768, np.log(32_768)))
    report = make_report(score(model, dataset, EvalSettings(), training_context=64), samples=10, seed=0)
    assert report.overall.bits_per_byte == pytest.approx(15 * 695 / (4 * 695), abs=1e-6)


DOCUMENTS = st.lists(
    st.tuples(
        st.sampled_from(["books", "code", "web"]),
        st.sampled_from(["de", "en", "ja"]),
        st.lists(st.integers(0, 14), min_size=1, max_size=40),
        st.integers(1, 200),
    ),
    min_size=1,
    max_size=12,
)
NATS = st.lists(st.floats(0, 40, width=32), min_size=15, max_size=15)


@settings(max_examples=60)
@given(
    documents=DOCUMENTS,
    nats=NATS,
    context=st.integers(2, 50),
    micro_batch_tokens=st.integers(1, 200),
    segments_per_row=st.integers(2, 6),
)
def test_totals_do_not_depend_on_rows_and_slices_add_up(
    make_dataset, make_doc, make_table_model, documents, nats, context, micro_batch_tokens, segments_per_row
):
    documents = [make_doc(*doc) for doc in documents]
    # What each document costs, token by token, in exact integers.
    expected = [sum(round(float(np.float32(nats[t])) * 2**32) for t in doc.tokens) for doc in documents]
    options = EvalSettings(micro_batch_tokens=micro_batch_tokens, segments_per_row=segments_per_row)
    model = make_table_model([*nats, 999.0])
    scores = score(model, make_dataset(documents), options, training_context=context)
    assert scores.documents["nats_fixed"].tolist() == expected
    backwards = score(model, make_dataset(documents[::-1]), options, training_context=context)
    assert backwards.documents["nats_fixed"].tolist() == expected[::-1]

    report = make_report(scores, samples=2, seed=0)
    for rows in (report.by_source, report.by_language, report.crossed):
        for field in ("nats_fixed", "bytes", "tokens", "documents"):
            assert sum(getattr(row, field) for row in rows) == getattr(report.overall, field)
    assert report.overall.nats_fixed == sum(expected)
    for row in report.crossed:
        members = [i for i, doc in enumerate(documents) if doc[:2] == (row.source, row.language)]
        assert row.nats_fixed == sum(expected[i] for i in members)
        assert row.bytes == sum(documents[i].bytes for i in members)


def test_settings_context_wins_over_training_context(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1, 2, 3, 4], 4)])
    long = score(first_token_model, dataset, EvalSettings(), training_context=8)
    short = score(first_token_model, dataset, EvalSettings(context=2), training_context=8)
    assert long.documents["nats_fixed"].tolist() == [int(2.25 * ONE_NAT)]  # 1.5 + 3 x 0.25
    assert short.documents["nats_fixed"].tolist() == [int(6 * ONE_NAT)]  # every token from eod: 4 x 1.5
    assert (long.context, short.context) == (8, 2)


def test_all_batches_have_one_shape_and_progress_ends(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * 7, 7)] * 5)  # 5 rows of 8, 2 at once
    shapes, seen = [], []

    def model(batch):
        shapes.append((batch.tokens.shape, batch.cu_seqlens.shape))
        return first_token_model(batch)

    options = EvalSettings(micro_batch_tokens=16, segments_per_row=3)
    score(model, dataset, options, training_context=8, progress=lambda done, of: seen.append((done, of)))
    assert shapes == [((16,), (7,))] * 3
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_max_documents_takes_the_lowest_hashes(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * (n + 1), n + 1) for n in range(6)])
    scores = score(first_token_model, dataset, EvalSettings(max_documents=2), training_context=8)
    assert scores.documents["index"].tolist() == [4, 5]  # the fixture's hashes fall with the number
    assert scores.documents["tokens"].tolist() == [5, 6]
    assert scores.available == 6


def test_from_shards_on_disk(tmp_path, make_table_model):
    writer = ShardWriter(tmp_path / "d", vocab_size=16, eod=15, tokenizer_hash="0" * 64, shard_tokens=4)
    lengths = [3, 4, 1, 9]
    for number, length in enumerate(lengths):
        tokens = np.full(length, number, dtype=np.int64)
        writer.add(tokens, text_bytes=2 * length, source=f"s{number % 2}", language="en", id_hash=number)
    writer.finish(made_by={})
    dataset = open_dataset(tmp_path / "d")
    scores = score(make_table_model(np.arange(16) / 4), dataset, EvalSettings(), training_context=4)
    assert (scores.documents["nats_fixed"] / ONE_NAT).tolist() == [0, 1, 0.5, 6.75]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e9])
def test_a_cost_that_is_none_names_the_document(make_dataset, make_doc, make_table_model, bad):
    dataset = make_dataset([make_doc("web", "en", [1, 2, 3], 3), make_doc("code", "de", [1, 1, 1, 1, 7], 5)])
    nats = np.ones(16)
    nats[7] = bad
    with pytest.raises(ValueError, match=r"document 1 of held-out \(source 'code'\).* token 4 ") as error:
        score(make_table_model(nats), dataset, EvalSettings(), training_context=4)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_the_manifests_is_refused(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1, 2, 3], 3), make_doc("code", "de", [1, 1], 5)])
    dataset.docs["source"][1] = dataset.docs["source"][0]
    with pytest.raises(ValueError, match="held-out: source 'code', language 'de'.*prepare"):
        score(first_token_model, dataset, EvalSettings(), training_context=4)


@pytest.mark.parametrize(
    "options",
    [
        {"context": 1},
        {"segments_per_row": 1},
        {"micro_batch_tokens": 0},
        {"max_documents": 0},
        {"bootstrap_samples": 0},
        {"bands": [4096]},
        {"bands": [1, 8]},
        {"bands": [16, 16, 32]},
        {"bands": [32, 16]},
    ],
)
def test_settings_that_can_not_be(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=re.escape(f"evaluate {name} {value}: must be")):
        EvalSettings(**options)


# ---- a file of one's own --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two one two one two three"], vocab_size=262)


def uniform(batch):
    return np.full(len(batch.tokens), math.log(262), dtype=np.float32)


def test_text_file(tmp_path, tokenizer):
    text = "one two — 三 <|eod|> 🙂\r\n" * 9  # a special token spelt out is text as any other
    path = tmp_path / "mine.txt"
    path.write_bytes(text.encode())
    row = score_text(uniform, path, tokenizer, EvalSettings(), eod=eod_id(tokenizer), training_context=16)
    tokens = len(tokenizer.encode(text).ids)
    assert (row.source, row.bytes, row.tokens, row.documents) == (str(path), len(text.encode()), tokens, 1)
    assert row.interval is None
    assert row.bits_per_byte == pytest.approx(math.log2(262) * tokens / len(text.encode()), abs=1e-6)


def test_text_file_that_can_not_be_scored(tmp_path, tokenizer):
    def attempt(path):
        return score_text(uniform, path, tokenizer, EvalSettings(), eod=eod_id(tokenizer), training_context=16)

    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        attempt(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 2\)"):
        attempt(tmp_path / "latin.txt")
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        attempt(tmp_path / "none.txt")


def test_text_through_a_tokenizer_that_changes_it(tmp_path, tokenizer):
    from tokenizers import Tokenizer, normalizers

    lossy = Tokenizer.from_str(tokenizer.to_str())
    lossy.normalizer = normalizers.StripAccents()
    (tmp_path / "accents.txt").write_text("o\u0301ne", encoding="utf-8")
    with pytest.raises(ValueError, match=r"accents\.txt: its 5 bytes became tokens of 3 bytes"):
        score_text(uniform, tmp_path / "accents.txt", lossy, EvalSettings(), eod=eod_id(lossy), training_context=16)
