"""Rungs of the context ladder, branches, slices: a run in several legs is still a function of the row."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwslm.data.describe import check_epochs, describe
from dwslm.data.mixture import Anneal, MixtureSettings, Past, Phase
from dwslm.data.packing import Batch, PackingSettings, RowStream, Rung
from dwslm.data.shards import Dataset
from tests.data.in_memory import EOD, dataset, same, stream

LADDER = PackingSettings(
    context=8, segments_per_row=4, window_tokens=128, ladder=[Rung(0.25, 32, 6), Rung(0.75, 128, 12)]
)
STEP = 256  # slots


def mixed() -> Dataset:
    """Two sources in two languages, documents of 1 to 300 tokens, so that rungs end in the middle of some."""
    lengths = np.random.default_rng(5).geometric(0.02, 120).clip(1, 300).tolist()
    return dataset([("aab"[n % 3], length, ("en", "fr")[n % 2]) for n, length in enumerate(lengths)], shards=3)


def laddered(text: Dataset, steps: int = 40, **changes: Any) -> RowStream:
    return stream(text, LADDER, **{"planned_tokens": steps * STEP, "step_tokens": STEP, **changes})


def served(rows: RowStream, until: int | None = None) -> list[Batch]:
    """Every step up to the end of the plan, or row `until`."""
    row, batches = 0, []
    while row < (until or rows.planned_rows):
        count = STEP // rows.legs[rows.leg_of(row)].context
        batches.append(rows.batch(row, count))
        row += count
    return batches


def words(batches: list[Batch]) -> list[int]:
    return [token for batch in batches for token in batch.tokens.tolist() if token != EOD]


def test_rungs_begin_with_a_step_and_rows_are_numbered_through() -> None:
    rows = laddered(mixed())
    assert [leg.context for leg in rows.legs] == [8, 32, 128]
    # Steps 0 to 9 of 32 rows, 10 to 29 of 8, 30 to 39 of 2.
    assert rows.first_rows == [0, 320, 480] and rows.planned_rows == 500
    batches = served(rows)
    assert len(batches) == 40 and {len(batch.tokens) for batch in batches} == {STEP}
    assert [batch.context for batch in batches] == [8] * 10 + [32] * 20 + [128] * 10
    assert [len(batch.docs) for batch in batches] == [32 * 4] * 10 + [8 * 6] * 20 + [2 * 12] * 10


@settings(max_examples=25)
@given(st.integers(0, 50), st.sampled_from(["best_fit", "concat"]), st.integers(130, 400))
def test_every_token_is_read_as_often_as_any_other_across_rungs(seed: int, fill: str, window: int) -> None:
    # Whatever the rung cuts a document at, the next one goes on from there: nothing is left out or read twice.
    text = mixed()
    packing = PackingSettings(8, 4, fill, window, [Rung(0.25, 32, 6), Rung(0.75, 128, 12)])
    rows = stream(text, packing, planned_tokens=60 * STEP, step_tokens=STEP, seed=seed)
    rows.count_rows(rows.planned_rows)
    last = rows.legs[-1]
    taken = words(served(rows))
    rest = last.get(last.rows, last.index.rows - last.rows)  # the last window, to its end
    extra = [t for row in rest for d, s, n in zip(row.docs, row.starts, row.lengths, strict=True)
             for t in text.tokens(int(d), int(s), int(s + n)).tolist()]  # fmt: skip
    seen = Counter(taken + extra)
    for source in range(2):
        docs = np.flatnonzero(text.docs["source"] == source)
        counts = [seen[token] for doc in docs for token in text.tokens(int(doc)).tolist()]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
def test_pieces_of_a_cut_document_meet_without_a_gap(fill: str) -> None:
    text = dataset([("a", 5000)])
    packing = PackingSettings(8, 4, fill, 128, [Rung(0.25, 32, 6), Rung(0.75, 128, 12)])
    rows = stream(text, packing, planned_tokens=8 * STEP, step_tokens=STEP)
    rows.count_rows(rows.planned_rows)
    assert min(leg.origin.begin[0] for leg in rows.legs[1:]) % 5000 != 0
    got = sorted(words(served(rows)))
    assert len(set(got)) == len(got)
    missing = set(range(1, max(got) + 1)) - set(got)
    assert len(missing) <= 128 + 128  # what the last window has packed beyond the plan's end


@pytest.mark.parametrize("mixture", [MixtureSettings(), MixtureSettings(phases=[Phase(0.5, {"a/fr": 3.0})])])
def test_any_step_can_be_asked_for_directly(mixture: MixtureSettings) -> None:
    text = mixed()
    expected = served(laddered(text, mixture=mixture))
    starts = [0]
    for batch in expected:
        starts.append(starts[-1] + STEP // batch.context)
    for step in (39, 0, 29, 30, 9, 10, 20, 38):  # a fresh stream each time, then back and forth in one
        count = starts[step + 1] - starts[step]
        assert same(laddered(text, mixture=mixture).batch(starts[step], count), expected[step])
    again = laddered(text, mixture=mixture)
    for step in (30, 5, 39, 10, 9, 0):
        assert same(again.batch(starts[step], starts[step + 1] - starts[step]), expected[step])


def test_a_rung_keeps_its_rows_when_later_ones_change() -> None:
    text = mixed()
    rows = laddered(text)
    other = PackingSettings(8, 4, "best_fit", 128, [Rung(0.25, 32, 6), Rung(0.75, 64, 12)])
    changed = stream(text, other, planned_tokens=40 * STEP, step_tokens=STEP)
    assert rows.key != changed.key
    assert rows.key_until(480) == changed.key_until(480) and rows.key_until(481) != changed.key_until(481)
    assert all(same(*pair) for pair in zip(served(rows, 480), served(changed, 480), strict=True))
    longer = laddered(text, steps=44)  # its first rung is a step longer
    assert rows.key_until(320) == longer.key_until(320) and rows.key_until(321) != longer.key_until(321)


def test_phases_and_rungs_that_have_begun() -> None:
    rows = laddered(mixed(), mixture=MixtureSettings(phases=[Phase(0.5, {"a": 2.0})]))
    rows.count_rows(480)
    starts = rows.legs[1].index.starts
    begins = 320 + int(starts[np.searchsorted(starts, 80)])  # a phase begins with a window, a rung with a step
    assert 400 < begins < 479
    asked = (0, 319, 320, 400, begins - 1, begins, 479, 480)
    assert [rows.phase_of(row) for row in asked] == [1, 1, 2, 2, 2, 3, 3, 4]
    assert rows.phase_starts == [[0.0], [0.25, 0.5], [0.75]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ladder": [Rung(0.5, 8, 4)]}, "contexts must rise: 8 is followed by 8"),
        ({"ladder": [Rung(0.5, 32, 4), Rung(0.5, 64, 4)]}, "starts must rise: 0.5 is followed by 0.5"),
        ({"ladder": [Rung(0.5, 256, 4)]}, "window_tokens 128.*256"),
    ],
)
def test_bad_ladders(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingSettings(**{"context": 8, "segments_per_row": 4, "window_tokens": 128, **changes})


def test_ladders_that_do_not_fit_the_plan() -> None:
    text = mixed()
    with pytest.raises(ValueError, match="needs the tokens of a step"):
        stream(text, LADDER)
    with pytest.raises(ValueError, match="step of 96 tokens is not a multiple of the ladder's context 128"):
        stream(text, LADDER, step_tokens=96)
    with pytest.raises(ValueError, match="rung of context 8 has no step: of 1 steps"):
        stream(
            text, PackingSettings(8, 4, "best_fit", 128, [Rung(1e-12, 32, 6)]), step_tokens=STEP, planned_tokens=STEP
        )
    for start in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match=f"ladder start {start}"):
            Rung(start)


# ---------------------------------------- slices


def test_slices_are_served_in_their_shares_and_each_document_once_an_epoch() -> None:
    lengths = np.random.default_rng(2).integers(3, 30, 600).tolist()
    kinds = [("web", "en"), ("code", "c"), ("code", "go"), ("code", "py")]
    text = dataset([(kinds[n % 4][0], length, kinds[n % 4][1]) for n, length in enumerate(lengths)])
    weights = {"code": 2.0, "code/py": 1.0, "web": 1.0}
    rows = stream(text, PackingSettings(32, 16, "best_fit", 2048), mixture=MixtureSettings(weights=weights))
    batch = rows.batch(0, 1000)
    used = batch.docs >= 0
    sizes, docs = np.diff(batch.cu_seqlens)[used] - 1, batch.docs[used]
    numbers = rows.stream_numbers(0)
    got = np.bincount(numbers[docs], sizes)
    names = [s.name for s in rows.partitions[0]]
    share = dict(zip(names, got / got.sum(), strict=True))
    assert share["code/py"] == pytest.approx(0.25, abs=0.005)
    assert share["code, rest"] == pytest.approx(0.5, abs=0.005)
    reads = Counter(docs[batch.starts[used] == 0].tolist())
    for number in range(len(names)):
        counts = [reads[doc] for doc in np.flatnonzero(numbers == number).tolist()]
        assert max(counts) - min(counts) <= 2  # the last window is not served whole


# ---------------------------------------- branches


def test_a_branch_keeps_its_past_and_only_then_differs() -> None:
    text = mixed()
    parent = laddered(text, mixture=MixtureSettings(anneal=Anneal(["a"])))
    at = parent.first_rows[2]  # 0.75 of the plan
    past = [Past(at, parent.mixture)]
    child = laddered(text, mixture=MixtureSettings(anneal=Anneal(["b"], 5.0)), past=past)
    assert child.key_until(at) == parent.key_until(at) and child.key != parent.key
    assert all(same(*pair) for pair in zip(served(child, at), served(parent, at), strict=True))
    assert not same(child.batch(at, 20), parent.batch(at, 20))
    assert [leg.phase_rows for leg in child.legs] == [[0], [0], [0]]
    unchanged = laddered(text, mixture=parent.mixture, past=past)
    assert unchanged.key == parent.key


def test_a_branch_in_the_middle_of_a_rung_changes_with_the_next_window() -> None:
    text = mixed()
    parent = stream(text, planned_tokens=8 * 1000)
    child = stream(text, planned_tokens=8 * 1000, mixture=MixtureSettings(phases=[Phase(0.1, {"b": 3.0})]),
                   past=[Past(700, MixtureSettings())])  # fmt: skip
    assert len(child.legs) == 1 and child.legs[0].phase_rows == [0, 700]
    child.count_rows(1000)
    starts = child.legs[0].index.starts
    change = int(starts[np.searchsorted(starts, 700)])
    assert same(child.batch(0, change), parent.batch(0, change))
    assert not same(child.batch(change, 50), parent.batch(change, 50))


def test_a_branch_may_name_slices_that_were_read_together() -> None:
    # From row 300 on French `a` is a stream of its own; it goes on where the source stood, in the same order.
    text = mixed()
    mixture = MixtureSettings(phases=[Phase(0.1, {"a/fr": 4.0})])
    rows = stream(text, planned_tokens=8 * 1000, mixture=mixture, past=[Past(300, MixtureSettings())])
    assert rows.first_rows == [0, 300]
    assert [s.name for s in rows.partitions[1]] == ["a/fr", "a, rest", "b"]
    assert same(rows.batch(0, 300), stream(text, planned_tokens=8 * 1000).batch(0, 300))
    total = {name: int(text.docs["tokens"][rows.stream_numbers(1) == n].sum())
             for n, name in enumerate(["a/fr", "a, rest", "b"])}  # fmt: skip
    seen = Counter(words([rows.batch(0, 1000)]))
    for n in range(3):
        docs = np.flatnonzero(rows.stream_numbers(1) == n)
        counts = [seen[token] for doc in docs for token in text.tokens(int(doc)).tolist()]
        assert max(counts) - min(counts) <= 2 and sum(counts) > 0.3 * total[["a/fr", "a, rest", "b"][n]]


def test_a_branch_beyond_the_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="below the plan's 100"):
        stream(mixed(), planned_tokens=800, past=[Past(100)])


# ---------------------------------------- what is told


def test_describe_counts_what_is_served_on_every_rung() -> None:
    text = mixed()
    rows = laddered(text, steps=200, mixture=MixtureSettings(anneal=Anneal(["b"])))
    told = describe(rows, sample_windows=1000)
    batches = served(rows)
    used = [batch.docs >= 0 for batch in batches]
    docs = np.concatenate([batch.docs[u] for batch, u in zip(batches, used, strict=True)])
    sizes = np.concatenate([np.diff(batch.cu_seqlens)[u] - 1 for batch, u in zip(batches, used, strict=True)])
    tokens = np.bincount(text.docs["source"][docs], sizes)
    for name, count in zip("ab", tokens, strict=True):
        assert told["sources"][name]["tokens"] == pytest.approx(count, abs=300)
        assert sum(phase["sources"][name]["tokens"] for phase in told["phases"]) == pytest.approx(count, abs=300)
    assert [rung["context"] for rung in told["rungs"]] == [8, 32, 128]
    assert [rung["start"] for rung in told["rungs"]] == [0, 0.25, 0.75]
    for rung, context in zip(told["rungs"], (8, 32, 128), strict=True):
        mine = [batch for batch in batches if batch.context == context]
        padding = sum(batch.padding for batch in mine) / sum(len(batch.tokens) for batch in mine)
        assert rung["padding_share"] == pytest.approx(padding, abs=0.02)
        assert rung["segments_per_row_max"] <= rung["segments_per_row_limit"]
        assert rung["segments_per_row_needed"] >= rung["segments_per_row_max"]


def test_a_cap_on_epochs_is_held_with_the_numbers() -> None:
    text = dataset([("small", 100), ("large", 9900)])
    plan: dict[str, Any] = {"planned_tokens": 3000}
    capped = MixtureSettings(weights={"small": 1.0, "large": 1.0}, max_epochs={"small": 5.0})
    told = describe(stream(text, mixture=capped, **plan))
    epochs = told["sources"]["small"]["epochs"]
    assert epochs == pytest.approx(3000 * 0.5 * 0.85 / 100, rel=0.15)
    with pytest.raises(ValueError, match=rf"'small' would be read {epochs:.2f} times.*of its 100\), its cap is 5\."):
        check_epochs(told)
    assert told["sources"]["small"]["cap"] == 5.0 and told["sources"]["large"]["cap"] is None
    assert told["warnings"] == []  # a cap was given, so no general advice
    check_epochs(describe(stream(text, mixture=MixtureSettings(max_epochs={"every": 5.0}), **plan)))
