from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dwslm.data.mixture import MixtureSettings
from dwslm.data.packing import IGNORE, Batch, PackingSettings
from dwslm.data.shard_writer import ShardWriter
from dwslm.data.shards import Dataset, open_dataset
from tests.data.in_memory import ANNEAL, EOD, SMALL, dataset, mixed_dataset, same, stream

FILLS = st.sampled_from(["best_fit", "concat"])


@pytest.fixture
def mixed() -> Dataset:
    return mixed_dataset()


def text_tokens(batch: Batch) -> list[int]:
    return [token for token in batch.tokens.tolist() if token != EOD]


@st.composite
def documents(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Two or three sources of short and long documents, a window's worth of text at the least."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=6, max_size=24))
    sources = draw(st.integers(2, 3))
    return [("abc"[n % sources], length) for n, length in enumerate([40, *lengths])]


# ---------------------------------------- what is in the rows


@given(documents(), FILLS, st.integers(2, 6), st.integers(2, 40), st.integers(0, 3))
def test_every_token_once_an_epoch(
    docs: list[tuple[str, int]], fill: str, segments: int, context: int, seed: int
) -> None:
    # With a window as large as the text and natural weights, each window holds one epoch of every source.
    text = dataset(docs)
    total = int(text.docs["tokens"].sum())
    rows = stream(text, PackingSettings(context, segments, fill, window_tokens=total), seed=seed)
    first = 0
    for window in range(3):
        rows.rows(first, 1)
        end = int(rows.legs[0].index.starts[window + 1])
        assert sorted(text_tokens(rows.batch(first, end - first))) == list(range(1, total + 1))
        first = end


@given(documents(), FILLS, st.integers(40, 90))
def test_epochs_follow_each_other_whatever_the_window(docs: list[tuple[str, int]], fill: str, window: int) -> None:
    # Stop at any window: a source is then somewhere in one epoch, so its tokens were seen n or n + 1 times.
    text = dataset(docs)
    rows = stream(text, replace(SMALL, fill=fill, window_tokens=window))
    rows.count_rows(60)
    seen = Counter(text_tokens(rows.batch(0, rows.legs[0].index.rows)))
    ends = list(accumulate(text.docs["tokens"].tolist()))
    for source in range(len(text.sources)):
        counts = {
            seen[token]
            for doc, end in enumerate(ends)
            if text.docs["source"][doc] == source
            for token in range(end - int(text.docs["tokens"][doc]) + 1, end + 1)
        }
        assert max(counts) - min(counts) <= 1


@given(documents(), FILLS, st.integers(2, 6), st.integers(2, 40))
def test_segments_and_targets(docs: list[tuple[str, int]], fill: str, segments: int, context: int) -> None:
    text = dataset(docs, shards=2)
    count = 11
    batch = stream(text, PackingSettings(context, segments, fill, window_tokens=50)).batch(5, count)
    sizes = np.diff(batch.cu_seqlens)
    slots = count * segments
    assert batch.tokens.shape == batch.targets.shape == (count * context,)
    assert batch.cu_seqlens.shape == (slots + 1,) and batch.docs.shape == batch.starts.shape == (slots,)
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == count * context
    assert (sizes >= 0).all() and (sizes <= context).all()
    used = int((sizes > 0).sum())
    assert (sizes[:used] > 0).all()  # empty segments only at the end
    assert set(range(0, count * context + 1, context)) <= set(batch.cu_seqlens.tolist())  # none crosses a row
    assert max(Counter(((batch.cu_seqlens[1 : used + 1] - 1) // context).tolist()).values()) <= segments
    scored = 0
    for begin, size, doc, start in zip(batch.cu_seqlens, sizes, batch.docs, batch.starts, strict=False):
        tokens = batch.tokens[begin : begin + size].tolist()
        targets = batch.targets[begin : begin + size].tolist()
        if doc < 0:
            assert tokens == [EOD] * size and targets == [IGNORE] * size
            continue
        words = text.tokens(int(doc)).tolist()
        piece = words[start : start + size - 1]
        end = EOD if start + size - 1 == len(words) else IGNORE
        assert tokens == [EOD, *piece]
        assert targets == [*piece, end]
        scored += len(piece) + (end == EOD)
    assert batch.scored == scored
    assert batch.padding == int(sizes[batch.docs < 0].sum())
    assert batch.padding + batch.segments + len(text_tokens(batch)) == count * context


def test_long_documents_are_spread_and_short_ones_whole(mixed: Dataset) -> None:
    batch = stream(mixed, PackingSettings(context=16, segments_per_row=4, window_tokens=200)).batch(0, 300)
    for doc, start, size in zip(batch.docs, batch.starts, np.diff(batch.cu_seqlens), strict=True):
        if doc >= 0:
            assert start % 15 == 0
            assert size - 1 == min(15, mixed.docs["tokens"][doc] - start)


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
def test_sources_meet_in_a_row(fill: str) -> None:
    # Two segments of 3 + 1 slots a row. Half of the pairs drawn from two equal sources are of both.
    text = dataset([("a", 3)] * 200 + [("b", 3)] * 200)
    rows = stream(text, PackingSettings(8, 2, fill, window_tokens=1200)).rows(0, 200)
    mixed = sum(len(set((row.docs < 200).tolist())) == 2 for row in rows)
    assert 70 < mixed < 130


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
def test_rows_are_shuffled_in_their_window(fill: str) -> None:
    # 200 whole rows of one document, and as many of short ones: unshuffled, the whole ones would be together.
    text = dataset([("a", 7 * 200), *(("a", 3) for _ in range(400))])
    rows = stream(text, PackingSettings(8, 3, fill, window_tokens=7 * 200 + 3 * 400)).rows(0, 400)
    whole = np.array([row.docs.tolist() == [0] for row in rows])
    assert whole.sum() == pytest.approx(200, abs=1)
    assert 75 < whole[:200].sum() < 125  # five standard deviations about half
    starts = [int(row.starts[0]) for row in rows if row.docs.tolist() == [0]]
    rising = sum(a < b for a, b in pairwise(starts))
    assert 70 < rising < 130


def test_concatenation_pads_only_where_it_must() -> None:
    text = dataset([("a", n) for n in np.random.default_rng(0).integers(1, 90, 60).tolist()])
    rows = stream(text, PackingSettings(32, 32, "concat", window_tokens=1000))
    rows.rows(0, 1)
    in_window = int(rows.legs[0].index.starts[1])
    # One row of a window may be short, any other may want a single slot.
    assert rows.batch(0, in_window).padding < 32 + in_window


# ---------------------------------------- order and position


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
@pytest.mark.parametrize("mixture", [MixtureSettings(), ANNEAL])
def test_any_place_can_be_asked_for(mixed: Dataset, fill: str, mixture: MixtureSettings) -> None:
    packing = replace(SMALL, fill=fill)
    arguments: dict[str, Any] = {"mixture": mixture, "planned_tokens": 8 * 600}
    whole = stream(mixed, packing, **arguments).batch(0, 600).tokens.reshape(600, 8)
    for size in (1, 7, 64):
        again = stream(mixed, packing, **arguments)
        for first in (0, 599 - size, 311, 3, 290):  # back and forth
            found = again.batch(first, size).tokens.reshape(size, 8)
            np.testing.assert_array_equal(found, whole[first : first + size])


def test_resume_twice_across_an_epoch_and_a_phase(mixed: Dataset) -> None:
    total = int(mixed.docs["tokens"].sum())
    arguments: dict[str, Any] = {"mixture": ANNEAL, "planned_tokens": 3 * total}
    straight = stream(mixed, **arguments)
    count = 3 * total // 8
    expected = [straight.batch(row, 10) for row in range(0, count - 10, 10)]
    found: list[Batch] = []
    for stop in (len(expected) // 5, len(expected) // 3, len(expected)):  # three processes
        rows = stream(mixed, **arguments)
        while len(found) < stop:
            found.append(rows.batch(len(found) * 10, 10))
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert straight.legs[0].cursor(straight.legs[0].index.windows - 1).min() > 0
    assert straight.legs[0].index.starts[-2] > straight.legs[0].phase_rows[1]


def test_seed_decides_the_order_and_the_prefix_does_not_depend_on_later_phases(mixed: Dataset) -> None:
    plain, other, phased = stream(mixed), stream(mixed, seed=2), stream(mixed, mixture=ANNEAL)
    assert plain.key != other.key
    assert not same(plain.batch(0, 20), other.batch(0, 20))
    boundary = phased.legs[0].phase_rows[1]
    assert boundary == 625
    assert plain.key != phased.key
    phased.count_rows(boundary + 10)
    starts = phased.legs[0].index.starts
    begins = int(starts[np.searchsorted(starts, boundary)])  # a phase begins with a window
    assert boundary < begins
    assert plain.key_until(boundary) == phased.key_until(boundary) == plain.key
    assert phased.key_until(boundary + 1) == phased.key
    assert phased.key_served(begins) == plain.key and phased.key_served(begins + 1) == phased.key
    assert [phased.phase_of(row) for row in (-1, 0, boundary, begins - 1, begins)] == [0, 1, 1, 1, 2]
    assert same(plain.batch(begins - 30, 30), phased.batch(begins - 30, 30))
    assert not same(plain.batch(boundary + 30, 30), phased.batch(boundary + 30, 30))


def test_a_phase_that_no_window_begins_in_has_not_begun(mixed: Dataset) -> None:
    packing = replace(SMALL, window_tokens=4000)  # 500 rows and more
    late = {tokens: stream(mixed, packing, mixture=ANNEAL, planned_tokens=tokens) for tokens in (2400, 3200)}
    assert [rows.legs[0].phase_rows for rows in late.values()] == [[0, 150], [0, 200]]
    assert [rows.phase_of(rows.planned_rows) for rows in late.values()] == [1, 1]
    assert late[2400].key_served(300) == late[3200].key_served(300) == stream(mixed, packing).key
    assert same(late[2400].batch(0, 300), late[3200].batch(0, 300))
    assert late[2400].with_plan(3200).key == late[3200].key != late[2400].key
    second = int(late[2400].legs[0].index.starts[1])  # beyond the plan: here it would begin
    assert late[2400].key_served(second + 1) == late[2400].key != late[3200].key_served(second + 1)


def test_key_holds_all_that_decides_the_rows_and_nothing_else(mixed: Dataset) -> None:
    text = [("a", 50), ("b", 50)]
    key = stream(dataset(text)).key
    assert stream(dataset(text), planned_tokens=20_000).key == key
    assert stream(dataset(text), mixture=MixtureSettings(weights={"a": 5.0, "b": 5.0})).key == key
    others = [
        stream(dataset(text), seed=2),
        stream(dataset(text, fingerprint="e" * 64)),
        stream(dataset(text), replace(SMALL, context=9)),
        stream(dataset(text), replace(SMALL, segments_per_row=5)),
        stream(dataset(text), replace(SMALL, fill="concat")),
        stream(dataset(text), replace(SMALL, window_tokens=41)),
        stream(dataset(text), mixture=MixtureSettings(weights={"a": 1.0, "b": 2.0})),
        stream(dataset(text), mixture=ANNEAL),
        stream(dataset(text), mixture=ANNEAL, planned_tokens=20_000),
    ]
    assert len({key, *(other.key for other in others)}) == len(others) + 1


# ---------------------------------------- bad input, real shards


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 1}, "context 1"),
        ({"segments_per_row": 1}, "segments_per_row 1"),
        ({"fill": "bestfit"}, "'bestfit'.*best_fit or concat"),
        ({"window_tokens": 2047, "context": 2048}, "window_tokens 2047.*2048"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingSettings(**changes)


def test_bad_plan(mixed: Dataset) -> None:
    with pytest.raises(ValueError, match="planned tokens 0"):
        stream(mixed, planned_tokens=0)
    with pytest.raises(ValueError, match=r"'x'.*a, b, c"):
        stream(mixed, mixture=MixtureSettings(weights={"x": 1.0}))


def test_shards_on_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 99, n) for n in rng.integers(1, 40, 50)]
    writer = ShardWriter(tmp_path, vocab_size=100, eod=99, tokenizer_hash="0" * 64, shard_tokens=300)
    for doc, tokens in enumerate(texts):
        writer.add(tokens, text_bytes=len(tokens), source="ab"[doc % 2], language="en", id_hash=doc)
    writer.finish(made_by={})
    total = sum(len(tokens) for tokens in texts)
    rows = stream(open_dataset(tmp_path), replace(SMALL, window_tokens=total), cache_dir=tmp_path)
    rows.count_rows(1)
    batch = rows.batch(0, int(rows.legs[0].index.starts[1]))
    found: dict[int, dict[int, int]] = {doc: {} for doc in range(50)}
    for begin, end, doc, start in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.docs, batch.starts, strict=False):
        if doc >= 0:
            assert batch.tokens[begin] == 99
            found[doc].update(enumerate(batch.tokens[begin + 1 : end].tolist(), int(start)))
    assert [[words[i] for i in range(len(words))] for words in found.values()] == [t.tolist() for t in texts]
