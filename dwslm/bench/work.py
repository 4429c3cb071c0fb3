"""The work: microbatches packed from real documents, and what can be said of their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwslm.data.mixture import MixtureSettings
from dwslm.data.packing import PackingSettings, RowStream
from dwslm.data.shards import Dataset

SEGMENTS_PER_ROW = 32
SLOTS_STEP = 16
"""Boundaries are padded with empty segments up to a multiple of this, the same for all batches of a size."""
SMALL_WINDOW = 262_144
"""Text tokens packed together; a training run packs more at once, which changes little but the time it takes."""


@dataclass(frozen=True)
class Work:
    """Batches of one size.

    Attributes:
        tokens, context: of a batch, which is tokens / context rows.
        slots: entries of every `cu_seqlens` less one.
        cu_seqlens: int32 [slots + 1] for each batch; the first one is timed.
        targets: int64 [tokens] for each batch, -100 where nothing is scored.
        text: lengths of the segments of text, over all batches.
        padding: share of slots that hold no text.
    """

    tokens: int
    context: int
    slots: int
    cu_seqlens: list[NDArray[np.int32]]
    targets: list[NDArray[np.int64]]
    text: NDArray[np.int64]
    padding: float

    @property
    def rows(self) -> int:
        return self.tokens // self.context

    def lengths(self, batch: int = 0) -> NDArray[np.int64]:
        """Lengths of a batch's segments, padding included, empty ones left out."""
        return sizes(self.cu_seqlens[batch], self.cu_seqlens[batch][1:] > self.cu_seqlens[batch][:-1])


def make_work(dataset: Dataset, tokens: int, context: int, seed: int, batches: int) -> Work:
    """Packs `batches` batches as a training run would.

    Raises:
        ValueError: where `context` does not divide `tokens`, or as `RowStream` does.
    """
    if tokens % context:
        raise ValueError(
            f"{tokens} tokens are not a whole number of rows of {context}: choose another --tokens or --contexts"
        )
    rows = tokens // context
    packing = PackingSettings(
        context=context, segments_per_row=SEGMENTS_PER_ROW, window_tokens=max(SMALL_WINDOW, 2 * tokens)
    )
    stream = RowStream(
        dataset,
        packing=packing,
        mixture=MixtureSettings(),
        seed=seed,
        planned_tokens=tokens * batches,
        cache_dir=None,
    )
    made = [stream.batch(i * rows, rows) for i in range(batches)]
    # The first one is timed: that in the middle by what attention has to do in it.
    middle = sorted(range(batches), key=lambda i: int(np.square(sizes(made[i].cu_seqlens, made[i].docs >= 0)).sum()))[
        batches // 2
    ]
    made = [made[middle], *made[:middle], *made[middle + 1 :]]
    used = max(int(np.count_nonzero(np.diff(batch.cu_seqlens))) for batch in made)
    slots = -(-(used + 1) // SLOTS_STEP) * SLOTS_STEP
    return Work(
        tokens=tokens,
        context=context,
        slots=slots,
        cu_seqlens=[with_slots(batch.cu_seqlens, slots) for batch in made],
        targets=[batch.targets.astype(np.int64) for batch in made],
        text=np.concatenate([sizes(batch.cu_seqlens, batch.docs >= 0) for batch in made]),
        padding=sum(batch.padding for batch in made) / (tokens * batches),
    )


def with_slots(cu_seqlens: NDArray[np.int32], slots: int) -> NDArray[np.int32]:
    """The same boundaries with another number of empty segments at the end, int32 [slots + 1]."""
    total = cu_seqlens[-1]
    starts = cu_seqlens[:-1][np.diff(cu_seqlens) > 0]
    assert len(starts) <= slots, (len(starts), slots)
    return np.concatenate([starts, np.full(slots + 1 - len(starts), total)]).astype(np.int32)


def sizes(cu_seqlens: NDArray[np.int32], which: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Lengths of the segments that `which` [slots] picks."""
    bounds = cu_seqlens.astype(np.int64)
    return (bounds[1:] - bounds[:-1])[which]


def describe(work: Work) -> dict[str, Any]:
    """The work as the report states it."""
    text = work.text
    return {
        "tokens": work.tokens,
        "context": work.context,
        "rows": work.rows,
        "segments": [int(len(work.lengths(i))) for i in range(len(work.cu_seqlens))],
        "slots": work.slots,
        "padding_share": work.padding,
        "scored_share": float(np.mean([np.mean(targets >= 0) for targets in work.targets])),
        "lengths": {
            "min": int(text.min()),
            "median": float(np.median(text)),
            "mean": float(text.mean()),
            "p90": float(np.quantile(text, 0.9)),
            "max": int(text.max()),
            "share_of_tokens_at_context": float(text[text == work.context].sum() / text.sum()),
        },
    }


def describe_documents(dataset: Dataset, contexts: Sequence[int]) -> dict[str, Any]:
    """Lengths of whole documents, before rows cut them."""
    tokens = dataset.docs["tokens"].astype(np.int64)
    longest = max(contexts)
    return {
        "documents": len(tokens),
        "tokens": int(tokens.sum()),
        "median": float(np.median(tokens)),
        "mean": float(tokens.mean()),
        "share_of_tokens_in_long": float(tokens[tokens >= longest].sum() / tokens.sum()),
        "long": longest,
    }
