"""Batches ahead of time: one background thread that reads, packs and pins while the device computes.

Rows come out of memory-mapped shards a hundred times faster than a model eats them, so one thread is enough
and there are no worker processes. What is served depends on the position alone.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dwslm.data.batch import Batch
from dwslm.data.packing import RowStream


@dataclass(frozen=True)
class TorchBatch:
    """One micro-batch as tensors on the CPU; see `Batch` for what they hold."""

    tokens: Tensor
    """int32 [rows * context]"""
    targets: Tensor
    """int64 [rows * context]"""
    cu_seqlens: Tensor
    """int32 [rows * segments_per_row + 1]"""
    context: int
    scored: int
    """Positions of this micro-batch that have a loss."""

    @property
    def rows(self) -> int:
        return len(self.tokens) // self.context

    @property
    def slots(self) -> int:
        """Segments that there is room for."""
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True)
class GlobalBatch:
    """What one rank gets of one optimizer step, and what it must know of the whole of it."""

    micro_batches: list[TorchBatch]
    """This rank's share, `grad_accum` of them."""
    scored: int
    """Positions with a loss in the global batch, all ranks: summed losses are divided by it."""
    segments: int
    """Segments of text in the global batch."""
    padding: int
    """Slots of padding in the global batch."""
    first_row: int
    next_row: int
    """Position to go on from after this step."""
    docs: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Documents that the global batch holds text of, as indices into the dataset, in rising order."""


class Loader:
    """Iterates over global batches from `first_row` on, without end or up to `stop_row`.

    The global batch is the next world * grad_accum * micro_batch_tokens slots of the stream, cut into micro-batches
    in order; rank r gets the r-th run of `grad_accum` of them. Another number of ranks, with grad_accum changed to
    match, serves the same global batches. On each rung of a ladder a micro-batch is of as many slots, in rows of the
    rung's context.

    The thread owns the stream until `close`; use it as a context manager, or call `close`.

    Args:
        stream: where the rows come from.
        first_row: position to begin at.
        micro_batch_tokens: slots of a micro-batch, a multiple of every context.
        grad_accum: micro-batches per rank and step.
        rank, world: this process among how many.
        depth: global batches kept ready.
        pin: put tensors into pinned memory, for copies to the GPU that don't wait.
        stop_row: serve no global batch that goes beyond this row.

    Raises ValueError for numbers that make no sense and for `pin` without a GPU. An error of the thread is
    raised from `next`, after the batches made before it.
    """

    def __init__(
        self,
        stream: RowStream,
        *,
        first_row: int,
        micro_batch_tokens: int,
        grad_accum: int = 1,
        rank: int = 0,
        world: int = 1,
        depth: int = 2,
        pin: bool = False,
        stop_row: int | None = None,
    ) -> None:
        for name, value, least in (
            ("first_row", first_row, 0),
            ("micro_batch_tokens", micro_batch_tokens, 1),
            ("grad_accum", grad_accum, 1),
            ("world", world, 1),
            ("depth", depth, 1),
        ):
            if value < least:
                raise ValueError(f"loader {name} {value}: must be {least} or more")
        for leg in stream.legs:
            if micro_batch_tokens % leg.context:
                raise ValueError(
                    f"loader micro_batch_tokens {micro_batch_tokens}: must be a multiple of the context {leg.context}"
                )
        if not 0 <= rank < world:
            raise ValueError(f"loader rank {rank}: must be from 0 to {world - 1}")
        if pin and not torch.cuda.is_available():
            raise ValueError("loader pin: pinned memory needs an NVIDIA GPU, and torch sees none")
        self._stream = stream
        self._tokens = micro_batch_tokens
        self._grad_accum = grad_accum
        self._rank = rank
        self._global_tokens = micro_batch_tokens * grad_accum * world
        self._depth = depth
        self._pin = pin
        # A thread begins on the first GPU, where pinning would leave a context of every rank.
        self._device = torch.cuda.current_device() if pin else None
        self._stop_row = stop_row

        self._ready: deque[GlobalBatch] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(first_row,), name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GlobalBatch:
        with self._changed:
            if self._closed:
                raise ValueError("the loader is closed")
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread after the batch it is making and wait for it. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, row: int) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            while self._stop_row is None or self._next_row(row) <= self._stop_row:
                batch = self._make(row)
                row = batch.next_row
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, it belongs to the consumer
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _next_row(self, row: int) -> int:
        """Row after the global batch that begins with `row`."""
        return row + self._global_tokens // self._stream.legs[self._stream.leg_of(row)].context

    def _make(self, row: int) -> GlobalBatch:
        stream, next_row = self._stream, self._next_row(row)
        leg = stream.legs[stream.leg_of(row)]
        if stream.legs[stream.leg_of(next_row - 1)].context != leg.context:
            raise ValueError(f"rows {row} to {next_row} are of two rungs: a step must begin where a rung does")
        rows = stream.rows(row, next_row - row)
        each = self._tokens // leg.context
        first = self._rank * self._grad_accum * each
        micro_batches = [
            self._tensors(stream.assemble(rows[begin : begin + each], leg))
            for begin in range(first, first + self._grad_accum * each, each)
        ]
        segments = sum(len(pieces) for pieces in rows)
        text = sum(int(pieces.lengths.sum()) for pieces in rows)
        return GlobalBatch(
            micro_batches=micro_batches,
            scored=stream.scored(rows),
            segments=segments,
            padding=self._global_tokens - text - segments,
            first_row=row,
            next_row=next_row,
            docs=np.unique(np.concatenate([pieces.docs for pieces in rows])),
        )

    def _tensors(self, batch: Batch) -> TorchBatch:
        def tensor(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
            result = torch.from_numpy(array)
            return result.pin_memory() if self._pin else result

        return TorchBatch(
            tokens=tensor(batch.tokens),
            targets=tensor(batch.targets.astype(np.int64)),
            cu_seqlens=tensor(batch.cu_seqlens),
            context=batch.context,
            scored=batch.scored,
        )
