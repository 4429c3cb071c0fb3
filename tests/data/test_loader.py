import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dwslm.data.loader import GlobalBatch, Loader
from dwslm.data.mixture import MixtureSettings
from dwslm.data.packing import IGNORE, PackingSettings, RowStream
from dwslm.data.shards import Dataset
from tests.data.in_memory import dataset


@pytest.fixture(scope="module")
def text() -> Dataset:
    lengths = np.random.default_rng(3).integers(1, 60, 90).tolist()
    return dataset([("ab"[n % 2], length) for n, length in enumerate(lengths)])


def stream(text: Dataset) -> RowStream:
    packing = PackingSettings(context=16, segments_per_row=4, window_tokens=100)
    return RowStream(text, packing=packing, mixture=MixtureSettings(), seed=1, planned_tokens=9999, cache_dir=None)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


def serve(text: Dataset, steps: int, **arguments: Any) -> list[GlobalBatch]:
    with Loader(stream(text), **arguments) as loader:
        return list(islice(loader, steps))


def tokens(batches: list[GlobalBatch]) -> torch.Tensor:
    return torch.stack([torch.cat([micro.tokens for micro in batch.micro_batches]) for batch in batches])


def test_batches_are_the_rows_of_the_stream(text: Dataset) -> None:
    batches = serve(text, 3, first_row=5, rows=4, grad_accum=2)
    assert [(batch.first_row, batch.next_row) for batch in batches] == [(5, 13), (13, 21), (21, 29)]
    rows = stream(text)
    for batch in batches:
        assert len(batch.micro_batches) == 2
        for n, micro in enumerate(batch.micro_batches):
            expected = rows.batch(batch.first_row + 4 * n, 4)
            np.testing.assert_array_equal(micro.tokens, expected.tokens)
            np.testing.assert_array_equal(micro.targets, expected.targets)
            np.testing.assert_array_equal(micro.cu_seqlens, expected.cu_seqlens)
            assert (micro.tokens.dtype, micro.targets.dtype) == (torch.int32, torch.int64)
            assert (micro.cu_seqlens.dtype, micro.context) == (torch.int32, 16)
            assert micro.scored == expected.scored == int((micro.targets != IGNORE).sum())
        whole = rows.batch(batch.first_row, 8)
        assert (batch.scored, batch.segments, batch.padding) == (whole.scored, whole.segments, whole.padding)


def test_nothing_depends_on_how_far_ahead_it_reads(text: Dataset) -> None:
    expected = tokens(serve(text, 6, first_row=0, rows=3, depth=1))
    assert torch.equal(tokens(serve(text, 6, first_row=0, rows=3, depth=5)), expected)
    with Loader(stream(text), first_row=0, rows=3, depth=2) as loader:
        slow = []
        for batch in islice(loader, 6):
            time.sleep(0.01)
            slow.append(batch)
    assert torch.equal(tokens(slow), expected)


def test_a_position_is_all_it_takes_to_go_on(text: Dataset) -> None:
    straight = serve(text, 9, first_row=0, rows=2, grad_accum=2)
    parts = serve(text, 2, first_row=0, rows=2, grad_accum=2)
    parts += serve(text, 3, first_row=parts[-1].next_row, rows=2, grad_accum=2)
    parts += serve(text, 4, first_row=parts[-1].next_row, rows=2, grad_accum=2)
    assert torch.equal(tokens(parts), tokens(straight))


@pytest.mark.parametrize(("world", "grad_accum"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_share_the_same_global_batches(text: Dataset, world: int, grad_accum: int) -> None:
    one = serve(text, 4, first_row=0, rows=2, grad_accum=4)
    ranks = [
        serve(text, 4, first_row=0, rows=2, grad_accum=grad_accum, rank=rank, world=world) for rank in range(world)
    ]
    assert torch.equal(torch.cat([tokens(batches) for batches in ranks], dim=1), tokens(one))
    for batches in ranks:
        for batch, expected in zip(batches, one, strict=True):
            assert batch.scored == expected.scored
            assert batch.padding == expected.padding
            assert batch.next_row == expected.next_row
    for step in range(4):
        assert one[step].scored == sum(m.scored for batches in ranks for m in batches[step].micro_batches)


def test_micro_batches_may_be_cut_differently(text: Dataset) -> None:
    coarse = tokens(serve(text, 3, first_row=0, rows=8))
    assert torch.equal(tokens(serve(text, 3, first_row=0, rows=1, grad_accum=8)), coarse)


def test_stop_row(text: Dataset) -> None:
    with Loader(stream(text), first_row=0, rows=2, grad_accum=2, stop_row=11) as loader:
        assert [batch.next_row for batch in loader] == [4, 8]
        assert list(loader) == []


def test_an_error_in_the_thread_reaches_the_consumer_after_what_was_ready(
    text: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = stream(text)
    real = rows.rows

    def breaks(first: int, count: int) -> Any:
        if first >= 8:
            raise OSError("shard 3: the disk went away")
        return real(first, count)

    monkeypatch.setattr(rows, "rows", breaks)
    with Loader(rows, first_row=0, rows=4) as loader:
        assert [next(loader).first_row, next(loader).first_row] == [0, 4]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk went away"):
                next(loader)


def test_reads_no_further_ahead_than_it_may(text: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = stream(text)
    asked: list[int] = []
    real = rows.rows
    monkeypatch.setattr(rows, "rows", lambda first, count: asked.append(first) or real(first, count))
    with Loader(rows, first_row=0, rows=1, depth=2) as loader:
        next(loader)
        time.sleep(0.1)
        assert max(asked) <= 3  # one taken, two ready, one in hand


def test_close_ends_a_waiting_thread_and_may_be_repeated(text: Dataset) -> None:
    loader = Loader(stream(text), first_row=0, rows=1, depth=1)
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows 0"),
        ({"grad_accum": 0}, "grad_accum 0"),
        ({"depth": 0}, "depth 0"),
        ({"first_row": -1}, "first_row -1"),
        ({"rank": 2, "world": 2}, "rank 2.*0 to 1"),
    ],
)
def test_bad_arguments(text: Dataset, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(stream(text), **{"first_row": 0, "rows": 1, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinning_needs_a_gpu(text: Dataset) -> None:
    with pytest.raises(ValueError, match=r"pin.*GPU"):
        Loader(stream(text), first_row=0, rows=1, pin=True)


@pytest.mark.gpu
def test_pinned(text: Dataset) -> None:
    (batch,) = serve(text, 1, first_row=0, rows=2, pin=True)
    micro = batch.micro_batches[0]
    assert micro.tokens.is_pinned() and micro.targets.is_pinned() and micro.cu_seqlens.is_pinned()
