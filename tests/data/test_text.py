"""Documents with their tokens split: lengths are known beforehand, pieces are cut out of the split document."""

from pathlib import Path

import numpy as np
import pytest

from dwslm.data.packing import PackingSettings, RowStream, Rung
from dwslm.data.shards import DOC_DTYPE, Dataset
from dwslm.data.stochastok import SplitTable
from dwslm.data.text import KEPT_TOKENS, Text
from tests.data.in_memory import stream

# A vocabulary of eod, the bytes "a" and "b", and all strings of two and four of them that are pairs of pairs.
EOD, A, B, AA, AB, BA, BB = range(7)
BYTES = np.array([0, 1, 1, 2, 2, 2, 2], dtype=np.int32)
TABLE = SplitTable(
    starts=np.array([0, 0, 0, 0, 1, 2, 3, 4], dtype=np.int32),
    first=np.array([A, A, B, B], dtype=np.int32),
    second=np.array([A, B, A, B], dtype=np.int32),
    bytes=BYTES,
)
SPELLED = {A: "a", B: "b", AA: "aa", AB: "ab", BA: "ba", BB: "bb"}


def spell(tokens: np.ndarray) -> str:
    return "".join(SPELLED[token] for token in tokens.tolist())


@pytest.fixture(scope="module")
def pairs() -> Dataset:
    """30 documents of 1 to 80 tokens, bytes and pairs of bytes."""
    rng = np.random.default_rng(7)
    texts = [rng.integers(A, BB + 1, n).astype(np.uint16) for n in rng.integers(1, 80, 30)]
    docs = np.zeros(30, dtype=DOC_DTYPE)
    docs["tokens"] = [len(text) for text in texts]
    docs["start"] = np.cumsum(docs["tokens"]) - docs["tokens"]
    docs["bytes"] = [BYTES[text].sum() for text in texts]
    docs["source"] = np.arange(30) % 2
    manifest = {"sources": ["x", "y"], "languages": ["en"], "vocab_size": 7, "eod": EOD, "tokenizer_hash": "0" * 64,
                "shards": [{"documents": 30}]}  # fmt: skip
    return Dataset(Path("memory"), manifest, "f" * 64, docs, [np.concatenate(texts)])


def split(pairs: Dataset, proportion: float = 0.25, seed: int = 3) -> Text:
    return Text(pairs, proportion=proportion, table=TABLE, seed=seed)


def test_lengths_are_those_of_the_split_documents_and_the_text_is_the_same(pairs: Dataset) -> None:
    text = split(pairs)
    for doc in range(len(pairs)):
        n, b = int(pairs.docs["tokens"][doc]), int(pairs.docs["bytes"][doc])
        assert text.lengths[doc] == min(n + n // 4, b)
        for epoch in (0, 1):
            tokens = text.tokens(doc, epoch, 0, int(text.lengths[doc]))
            assert len(tokens) == text.lengths[doc]
            assert spell(tokens) == spell(pairs.tokens(doc))
    whole = Text(pairs)
    assert whole.lengths.tolist() == pairs.docs["tokens"].tolist()
    assert whole.tokens(5, 9, 2, 4).tolist() == pairs.tokens(5, 2, 4).tolist()


def test_each_reading_is_split_anew_and_the_same_one_alike(pairs: Dataset) -> None:
    long = int(np.argmax(pairs.docs["tokens"]))
    length = int(split(pairs).lengths[long])
    one = [split(pairs).tokens(long, epoch, 0, length).tolist() for epoch in range(5)]
    assert len({tuple(tokens) for tokens in one}) == 5
    again = split(pairs)
    for epoch in (4, 0, 2):  # in pieces, which are cut from a kept copy
        pieces = [again.tokens(long, epoch, start, min(start + 7, length)) for start in range(0, length, 7)]
        assert np.concatenate(pieces).tolist() == one[epoch]
    assert split(pairs, seed=4).tokens(long, 0, 0, length).tolist() != one[0]


def test_what_is_kept_is_bounded(pairs: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dwslm.data.text.KEPT_TOKENS", 200)
    text = split(pairs)
    for epoch in range(40):
        for doc in range(len(pairs)):
            text.tokens(doc, epoch, 0, 1)
            assert sum(map(len, text._kept.values())) == text._kept_tokens <= 200
    assert KEPT_TOKENS >= 1 << 20


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
def test_rows_hold_every_split_document_whole_once_an_epoch(pairs: Dataset, fill: str) -> None:
    text = split(pairs)
    total = int(text.lengths.sum())
    packing = PackingSettings(16, 6, fill, window_tokens=total)
    rows = stream(pairs, packing, text=text)
    first = 0
    for epoch in range(3):
        rows.rows(first, 1)
        end = int(rows.legs[0].index.starts[epoch + 1])
        batch = rows.batch(first, end - first)
        found: dict[int, dict[int, int]] = {doc: {} for doc in range(len(pairs))}
        for begin, stop, doc, start in zip(
            batch.cu_seqlens, batch.cu_seqlens[1:], batch.docs, batch.starts, strict=False
        ):
            if doc >= 0:
                found[int(doc)].update(enumerate(batch.tokens[begin + 1 : stop].tolist(), int(start)))
                ends = int(start) + int(stop - begin) - 1 == text.lengths[doc]
                assert batch.targets[stop - 1] == (EOD if ends else -100)
        for doc, tokens in found.items():
            expected = text.tokens(doc, epoch, 0, int(text.lengths[doc])).tolist()
            assert [tokens[n] for n in range(len(tokens))] == expected
        assert rows.scored(rows.rows(first, end - first)) == batch.scored
        first = end


def test_another_proportion_is_another_order(pairs: Dataset) -> None:
    keys = {stream(pairs, text=text).key for text in (None, split(pairs), split(pairs, 0.5))}
    assert len(keys) == 3


def test_a_document_that_a_rung_cuts_goes_on_as_it_was_split(pairs: Dataset) -> None:
    def laddered() -> RowStream:
        packing = PackingSettings(8, 4, "best_fit", 128, [Rung(0.5, 32, 6)])
        return stream(pairs, packing, text=split(pairs), planned_tokens=64 * 64, step_tokens=64)

    rows, text = laddered(), split(pairs)
    for first, count in ((0, 256), (256, 64), (320, 64)):
        batch = laddered().batch(first, count)
        for row, pieces in enumerate(rows.rows(first, count)):
            tokens = batch.tokens[row * batch.context :]
            place = 1
            assert pieces.epochs is not None
            for doc, start, length, epoch in zip(
                pieces.docs, pieces.starts, pieces.lengths, pieces.epochs, strict=True
            ):
                expected = text.tokens(int(doc), int(epoch), int(start), int(start + length))
                assert tokens[place : place + length].tolist() == expected.tolist()
                place += length + 1


def test_a_token_past_the_vocabulary_is_told_before_it_is_split(pairs: Dataset) -> None:
    shard = np.concatenate([pairs.tokens(doc) for doc in range(len(pairs))])
    shard[int(pairs.docs["start"][4])] = 7
    altered = Dataset(pairs.path, pairs.manifest, pairs.fingerprint, pairs.docs, [shard])
    with pytest.raises(
        ValueError, match=r"memory: document 4, in shard 00000\.bin, holds a token id past the vocabulary of 7"
    ):
        split(altered).tokens(4, 0, 0, 1)
