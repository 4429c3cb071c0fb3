import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dwslm.data.loader import GlobalBatch, Loader
from dwslm.data.mixture import MixtureSettings, Phase
from dwslm.data.packing import IGNORE, PackingSettings, RowStream, Rung
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
    batches = serve(text, 3, first_row=5, micro_batch_tokens=64, grad_accum=2)
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
    expected = tokens(serve(text, 6, first_row=0, micro_batch_tokens=48, depth=1))
    assert torch.equal(tokens(serve(text, 6, first_row=0, micro_batch_tokens=48, depth=5)), expected)
    with Loader(stream(text), first_row=0, micro_batch_tokens=48, depth=2) as loader:
        slow = []
        for batch in islice(loader, 6):
            time.sleep(0.01)
            slow.append(batch)
    assert torch.equal(tokens(slow), expected)


def test_a_position_is_all_it_takes_to_go_on(text: Dataset) -> None:
    straight = serve(text, 9, first_row=0, micro_batch_tokens=32, grad_accum=2)
    parts = serve(text, 2, first_row=0, micro_batch_tokens=32, grad_accum=2)
    parts += serve(text, 3, first_row=parts[-1].next_row, micro_batch_tokens=32, grad_accum=2)
    parts += serve(text, 4, first_row=parts[-1].next_row, micro_batch_tokens=32, grad_accum=2)
    assert torch.equal(tokens(parts), tokens(straight))


def laddered(text: Dataset, step: int, window: int) -> RowStream:
    """12 steps: 3 of rows of 16, 6 of 32, 3 of 128, and another mixture from step 6 on."""
    packing = PackingSettings(16, 4, window_tokens=window, ladder=[Rung(0.25, 32, 6), Rung(0.75, 128, 16)])
    mixture = MixtureSettings(phases=[Phase(0.5, {"a": 3.0})])
    return RowStream(
        text, packing=packing, mixture=mixture, seed=1, planned_tokens=12 * step, step_tokens=step, cache_dir=None
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("grad_accum", range(1, 9))
def test_any_split_serves_the_same_global_batches_on_every_rung(text: Dataset, world: int, grad_accum: int) -> None:
    # 8 ranks and as many micro-batches each must divide it; 1, 2, 4 and 8 of them serve the very same batches.
    step_tokens = 128 * 8 * (8 if 8 % grad_accum == 0 else grad_accum)
    one = laddered(text, step_tokens, 4096)
    ranks = []
    for rank in range(world):
        with Loader(laddered(text, step_tokens, 4096), first_row=0, micro_batch_tokens=step_tokens // (world * grad_accum),
                    grad_accum=grad_accum, rank=rank, world=world) as loader:  # fmt: skip
            ranks.append(list(islice(loader, 12)))
    row = 0
    for step in range(12):
        context = [16, 32, 128][(step >= 3) + (step >= 9)]
        expected = one.batch(row, step_tokens // context)
        micros = [micro for batches in ranks for micro in batches[step].micro_batches]
        assert {micro.context for micro in micros} == {context}
        np.testing.assert_array_equal(torch.cat([micro.tokens for micro in micros]), expected.tokens)
        np.testing.assert_array_equal(torch.cat([micro.targets for micro in micros]), expected.targets)
        assert sum(micro.scored for micro in micros) == expected.scored
        for batches in ranks:
            batch = batches[step]
            assert (batch.first_row, batch.next_row) == (row, row + step_tokens // context)
            assert (batch.scored, batch.segments, batch.padding) == (
                expected.scored,
                expected.segments,
                expected.padding,
            )
        row += step_tokens // context
    assert row == one.planned_rows


def test_a_resume_in_the_middle_of_a_phase_a_rung_and_a_document_is_exact(text: Dataset) -> None:
    def steps(first_row: int, count: int) -> list[GlobalBatch]:
        with Loader(laddered(text, 1024, 256), first_row=first_row, micro_batch_tokens=512, grad_accum=2) as loader:
            return list(islice(loader, count))

    straight = steps(0, 12)
    parts: list[GlobalBatch] = []
    for count in (1, 3, 3, 1, 2, 2):  # stops after steps 1 (rung 1), 4 (rung 2), 7 (phase 2), 8, 10 (rung 3)
        parts += steps(parts[-1].next_row if parts else 0, count)
    assert torch.equal(tokens(parts), tokens(straight))
    # Each of these stops is in the middle of a document that goes on in the batch after.
    rows = laddered(text, 1024, 256)
    for step in (1, 4, 7, 8, 10):
        before, after = (rows.rows(b.first_row, b.next_row - b.first_row) for b in straight[step - 1 : step + 1])
        cut = {
            (int(d), int(s + n)) for row in before for d, s, n in zip(row.docs, row.starts, row.lengths, strict=True)
        }
        goes_on = {(int(d), int(s)) for row in after for d, s in zip(row.docs, row.starts, strict=True) if s > 0}
        if step != 10:  # rows of 128 hold these documents whole
            assert cut & goes_on


def test_a_step_that_would_be_of_two_rungs_is_refused(text: Dataset) -> None:
    loader = Loader(laddered(text, 1024, 256), first_row=2, micro_batch_tokens=1024)
    with loader, pytest.raises(ValueError, match="rows 130 to 194 are of two rungs"):
        list(islice(loader, 4))


def test_documents_of_a_batch_are_named(text: Dataset) -> None:
    (batch,) = serve(text, 1, first_row=3, micro_batch_tokens=64)
    docs = stream(text).batch(3, 4).docs
    assert batch.docs.tolist() == sorted({int(doc) for doc in docs if doc >= 0})


def test_stop_row(text: Dataset) -> None:
    with Loader(stream(text), first_row=0, micro_batch_tokens=32, grad_accum=2, stop_row=11) as loader:
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
    with Loader(rows, first_row=0, micro_batch_tokens=64) as loader:
        assert [next(loader).first_row, next(loader).first_row] == [0, 4]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk went away"):
                next(loader)


def test_reads_no_further_ahead_than_it_may(text: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = stream(text)
    asked: list[int] = []
    real = rows.rows
    monkeypatch.setattr(rows, "rows", lambda first, count: asked.append(first) or real(first, count))
    with Loader(rows, first_row=0, micro_batch_tokens=16, depth=2) as loader:
        next(loader)
        time.sleep(0.1)
        assert max(asked) <= 3  # one taken, two ready, one in hand


def test_close_ends_a_waiting_thread_and_may_be_repeated(text: Dataset) -> None:
    loader = Loader(stream(text), first_row=0, micro_batch_tokens=16, depth=1)
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_tokens": 0}, "micro_batch_tokens 0"),
        ({"micro_batch_tokens": 24}, "micro_batch_tokens 24.*context 16"),
        ({"grad_accum": 0}, "grad_accum 0"),
        ({"depth": 0}, "depth 0"),
        ({"first_row": -1}, "first_row -1"),
        ({"rank": 2, "world": 2}, "rank 2.*0 to 1"),
    ],
)
def test_bad_arguments(text: Dataset, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(stream(text), **{"first_row": 0, "micro_batch_tokens": 16, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinning_needs_a_gpu(text: Dataset) -> None:
    with pytest.raises(ValueError, match=r"pin.*GPU"):
        Loader(stream(text), first_row=0, micro_batch_tokens=16, pin=True)


@pytest.mark.gpu
def test_pinned(text: Dataset) -> None:
    (batch,) = serve(text, 1, first_row=0, micro_batch_tokens=32, pin=True)
    micro = batch.micro_batches[0]
    assert micro.tokens.is_pinned() and micro.targets.is_pinned() and micro.cu_seqlens.is_pinned()
