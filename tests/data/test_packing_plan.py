"""Rows over a whole plan: shares and phases, the running count, the description."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dwslm.data.windows as windows_module
from dwslm.data.describe import describe
from dwslm.data.mixture import MixtureSettings, Phase
from dwslm.data.order import join_pieces
from dwslm.data.packing import Batch, PackingSettings
from dwslm.data.shards import Dataset
from tests.data.in_memory import ANNEAL, dataset, mixed_dataset, same, stream


@pytest.fixture
def mixed() -> Dataset:
    return mixed_dataset()


# ---------------------------------------- shares


def shares(text: Dataset, batch: Batch) -> dict[str, float]:
    sizes = np.diff(batch.cu_seqlens)[batch.docs >= 0] - 1
    sources = text.docs["source"][batch.docs[batch.docs >= 0]]
    tokens = np.bincount(sources, weights=sizes, minlength=len(text.sources))
    return dict(zip(text.sources, tokens / tokens.sum(), strict=True))


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
def test_served_shares_match_the_weights_in_every_phase(fill: str) -> None:
    # One source of few long documents, one of many short ones; weights that are not the natural ones.
    lengths = np.random.default_rng(1).integers(5, 30, 400).tolist()
    text = dataset([*(("long", 4000) for _ in range(4)), *(("short", n) for n in lengths), ("rare", 500)])
    mixture = MixtureSettings(
        weights={"long": 0.3, "short": 0.6, "rare": 0.1}, phases=[Phase(0.5, {"long": 2.0, "rare": 0.5})]
    )
    planned_rows = 8000
    rows = stream(
        text,
        PackingSettings(64, 16, fill, window_tokens=4096),
        mixture=mixture,
        planned_tokens=planned_rows * 64,
    )
    # 0.6 : 0.6 : 0.05 after the boundary
    expected = [{"long": 0.3, "short": 0.6, "rare": 0.1}, {"long": 0.48, "short": 0.48, "rare": 0.04}]
    rows.count_rows(planned_rows)
    boundary = int(rows.legs[0].index.starts[np.searchsorted(rows.legs[0].index.starts, rows.legs[0].phase_rows[1])])
    assert 4000 <= boundary < 4100
    for want, (first, end) in zip(expected, [(0, boundary), (boundary, planned_rows)], strict=True):
        served = shares(text, rows.batch(first, end - first))
        for source, share in want.items():
            assert served[source] == pytest.approx(share, abs=0.005)


def test_a_cursor_survives_a_phase_without_its_source() -> None:
    text = dataset([("a", 3)] * 40 + [("b", 3)] * 40)
    phases = [Phase(0.25, {"a": 0.0}), Phase(0.5)]
    rows = stream(text, mixture=MixtureSettings(phases=phases), planned_tokens=8 * 80)
    batch = rows.batch(0, 70)
    seen = Counter(batch.docs[(batch.docs >= 0) & (batch.docs < 40)].tolist())
    assert len(seen) == 40  # in spite of the break every document comes before any comes twice
    assert max(seen.values()) - min(seen.values()) <= 1


def test_quotas_do_not_drift() -> None:
    text = dataset([("a", 7)] * 30 + [("b", 3)] * 31 + [("c", 1)] * 3)
    rows = stream(text, mixture=MixtureSettings(weights={"a": 1.0, "b": 1.0, "c": 1.0}))
    rows.legs[0].index._starts = np.arange(1_000_001, dtype=np.int64) * 7
    rows.legs[0].index.windows = 1_000_000
    cursor = rows.legs[0].cursor(1_000_000)
    assert np.abs(cursor - 40 * 1_000_000 / 3).max() < 1_000_000 / 2**16 + 1


# ---------------------------------------- the running count


def test_with_the_count_kept_a_late_row_is_immediate(
    mixed: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = windows_module.best_fit
    monkeypatch.setattr(windows_module, "best_fit", lambda *a: calls.append(1) or real(*a))
    progress: list[tuple[int, int]] = []
    before = stream(mixed, cache_dir=tmp_path)
    before.count_rows(5000, lambda done, total: progress.append((done, total)))
    assert progress[-1] == (5000, 5000) and progress == sorted(progress) and len(progress) == len(calls) > 500
    expected = stream(mixed).batch(4990, 8)
    calls.clear()
    after = stream(mixed, cache_dir=tmp_path)
    assert same(after.batch(4990, 8), expected)
    assert len(calls) <= 3  # no window but those that hold the rows


def test_a_damaged_or_unwritable_count_changes_nothing_but_is_told(mixed: Dataset, tmp_path: Path) -> None:
    expected = stream(mixed).batch(400, 50)
    first = stream(mixed, cache_dir=tmp_path)
    first.count_rows(500)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    again = stream(mixed, cache_dir=tmp_path)
    assert same(again.batch(400, 50), expected)
    assert any(str(file) in warning for warning in again.warnings)
    unwritable = stream(mixed, cache_dir=file)
    unwritable.count_rows(500)
    assert same(unwritable.batch(400, 50), expected)
    assert any("can't be kept" in warning for warning in describe(unwritable)["warnings"])


# ---------------------------------------- description


@pytest.mark.parametrize("fill", ["best_fit", "concat"])
def test_describe_agrees_with_what_is_served(mixed: Dataset, fill: str) -> None:
    packing = PackingSettings(32, 4, fill, window_tokens=2000)
    rows = stream(mixed, packing, mixture=ANNEAL, planned_tokens=32 * 1000)
    told = describe(rows)
    assert told["rows"] == 1000 and told["planned_tokens"] == 32_000 and told["key"] == rows.key
    assert [phase["first_row"] for phase in told["phases"]] == [0, 500]
    assert [phase["rows"] for phase in told["phases"]] == [500, 500]
    batch = rows.batch(0, 1000)
    assert told["padding_share"] == pytest.approx(batch.padding / 32_000, abs=0.02)
    assert 0 <= told["padding_share_unlimited"] <= told["padding_share"]
    (rung,) = told["rungs"]
    assert rung["segments_per_row_mean"] == pytest.approx((np.diff(batch.cu_seqlens) > 0).sum() / 1000, rel=0.05)
    assert rung["segments_per_row_max"] <= rung["segments_per_row_limit"] == 4
    text = 32_000 - batch.padding - batch.segments
    for source, share in shares(mixed, batch).items():
        assert told["sources"][source]["tokens"] == pytest.approx(share * text, rel=0.1)
        tokens = mixed.docs["tokens"][mixed.docs["source"] == mixed.sources.index(source)].sum()
        epochs = told["sources"][source]["tokens"] / tokens
        assert told["sources"][source]["epochs"] == pytest.approx(epochs, rel=1e-3)  # tokens are rounded down
    a = [phase["sources"]["a"]["share"] for phase in told["phases"]]
    assert a[1] == pytest.approx(2 * a[0] / (1 + a[0]), rel=1e-4)


def test_more_than_four_epochs_are_warned_of() -> None:
    text = dataset([("small", 100), ("large", 9900)])
    equal = MixtureSettings(weights={"small": 0.5, "large": 0.5})
    warnings = describe(stream(text, mixture=equal, planned_tokens=3000))["warnings"]
    assert len(warnings) == 1 and "'small'" in warnings[0] and "4 times" in warnings[0]
    assert describe(stream(text, mixture=equal, planned_tokens=500))["warnings"] == []
    both = describe(stream(text, mixture=MixtureSettings(), planned_tokens=60_000))["warnings"]
    assert len(both) == 1 and re.search(r"reads 'large' 5\.\d times, 'small' 5\.\d times; ", both[0])


def test_a_phase_in_which_no_window_begins_is_told() -> None:
    text = dataset([("a", 10)] * 50 + [("b", 10)] * 50)
    phase = MixtureSettings(phases=[Phase(0.9, {"a": 3.0})])
    coarse = stream(text, PackingSettings(16, 4, window_tokens=1000), mixture=phase, planned_tokens=1600)
    (warning,) = describe(coarse)["warnings"]
    assert "phase from 0.9" in warning and "1,000" in warning
    fine = stream(text, PackingSettings(16, 4, window_tokens=50), mixture=phase, planned_tokens=1600)
    assert describe(fine)["warnings"] == []


@settings(max_examples=5)
@given(
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3),
    st.sampled_from(["best_fit", "concat"]),
    st.sampled_from([32, 256]),
    st.integers(0, 5),
)
def test_shares_hold_over_any_stretch(weights: list[float], fill: str, context: int, seed: int) -> None:
    """The small image of 0.5 % over any 20M tokens and 0.1 % over any 500M in windows of 1M: over any 20 windows, and 500."""
    lengths = np.random.default_rng(seed).geometric(0.03, 300).tolist()
    text = dataset(
        [*(("long", 9000) for _ in range(3)), *(("short", n) for n in lengths), ("slice", 700), ("rare", 500)]
    )
    mixture = MixtureSettings(weights=dict(zip(("long", "short", "rare"), weights, strict=True)))
    window, windows = 256 * 256, 60
    rows = stream(text, PackingSettings(context, 64, fill, window_tokens=window), mixture=mixture, seed=seed,
                  planned_tokens=window * windows)  # fmt: skip
    stretch = 2048 // context
    pieces = [join_pieces(rows.rows(first, stretch)) for first in range(0, rows.planned_rows - stretch, stretch)]
    served = np.array([np.bincount(text.docs["source"][p.docs], p.lengths, len(text.sources)) for p in pieces])
    before = np.concatenate([np.zeros((1, len(text.sources))), np.cumsum(served, axis=0)])
    want = np.array([mixture.weights.get(name, 0.0) for name in text.sources])
    want /= want.sum()
    for tokens, tolerance in ((20 * window, 0.005), (50 * window, 0.002)):
        ends = np.searchsorted(before.sum(axis=1), before.sum(axis=1) + tokens)
        begins = np.flatnonzero(ends < len(before))
        assert len(begins) > 100
        got = before[ends[begins]] - before[begins]
        assert np.abs(got / got.sum(axis=1, keepdims=True) - want).max() < tolerance
