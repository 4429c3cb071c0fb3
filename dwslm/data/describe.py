"""What a plan will serve, in numbers: by phase, by source, by rung. To be read before a run is paid for."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwslm.data.order import join_pieces
from dwslm.data.packing import Progress, RowStream
from dwslm.data.shares import epoch_caps
from dwslm.data.windows import padding_share, segments_of_rows

SHARES_EVERY = 65_536  # slots between the beginnings of two stretches whose shares are looked at
MANY_EPOCHS = 4  # up to about 4, repeated text is nearly as good as new: arXiv:2305.16264


def describe(stream: RowStream, progress: Progress | None = None, sample_windows: int = 4) -> dict[str, Any]:
    """Counts the rows of the whole plan and says what is in them.

    Tokens are exact to a fraction of a window. Padding and segments are measured on `sample_windows` windows from the
    start of each phase; for the exact figures every window's text would have to be laid out.

    Returns `planned_tokens` (slots), `rows`, `key`; `padding_share` of the slots, and `padding_share_unlimited`, what it
    would be if a row could have any number of segments; `phases`, each with its start, first_row, rows, context,
    text_tokens, padding_share and sources; `sources` over the whole plan; `rungs`, each with its start, context,
    first_row, rows, `segments_per_row_mean`, `_max`, `_limit` (padding included) and `_needed` (the most that a row would
    have without the limit), `padding_share`, `padding_share_unlimited`; `rephrased`; `stochastok`,
    splits per token; and `warnings`. `sources` maps the name of a source, or of a slice that is read by itself, to its share
    of the text tokens, `tokens`, `epochs`, and over the whole plan `cap` (null without one).
    """
    stream.count_rows(stream.planned_rows, progress)
    phases: list[dict[str, Any]] = []
    rungs: list[dict[str, Any]] = []
    slot = 0
    for number, leg in enumerate(stream.legs):
        mine = _phases(stream, number, sample_windows)
        weights = np.array([phase["rows"] for phase in mine], dtype=np.float64)
        segments = np.concatenate([phase.pop("segments") for phase in mine])
        needed = np.concatenate([phase.pop("needed") for phase in mine])
        rungs.append(
            {
                "start": slot / stream.planned_tokens,
                "context": leg.context,
                "first_row": stream.first_rows[number],
                "rows": leg.rows,
                "segments_per_row_mean": float(segments.mean()),
                "segments_per_row_max": int(segments.max()),
                "segments_per_row_limit": leg.segments_per_row,
                "segments_per_row_needed": int(needed.max()),
                "padding_share": float(np.average([phase["padding_share"] for phase in mine], weights=weights)),
                "padding_share_unlimited": float(
                    np.average([phase.pop("padding_share_unlimited") for phase in mine], weights=weights)
                ),
            }
        )
        phases += mine
        slot += leg.rows * leg.context
    slots = [rung["rows"] * rung["context"] for rung in rungs]
    sources = _whole(stream)
    warnings = stream.warnings
    for phase in phases:
        if not phase["sources"]:
            warnings.append(
                f"the phase from {phase['start']:.4g} of the plan is never served: a phase begins with a window, and no window "
                f"of {stream.packing.window_tokens:,} text tokens begins in it; make data.packing.window_tokens smaller"
            )
    many = [
        f"{name!r} {figures['epochs']:,.1f} times"
        for name, figures in sources.items()
        if figures["epochs"] > MANY_EPOCHS and figures["cap"] is None
    ]
    if many:
        warnings.append(
            f"this plan reads {', '.join(many)}; text repeated more than {MANY_EPOCHS} times teaches little: "
            "lower the weight, add text, or make the plan shorter"
        )
    return {
        "planned_tokens": sum(slots),
        "rows": stream.planned_rows,
        "key": stream.key,
        "padding_share": float(np.average([rung["padding_share"] for rung in rungs], weights=slots)),
        "padding_share_unlimited": float(np.average([r["padding_share_unlimited"] for r in rungs], weights=slots)),
        "phases": phases,
        "sources": sources,
        "rungs": rungs,
        "rephrased": dict(stream.mixture.rephrased),
        "stochastok": stream.text.proportion,
        "warnings": warnings,
    }


def check_epochs(description: dict[str, Any]) -> None:
    """Raises ValueError where a plan reads something more often than its cap allows, with the numbers."""
    over = [
        f"{name!r} would be read {figures['epochs']:.2f} times ({figures['tokens']:,} tokens of its "
        f"{figures['tokens'] / figures['epochs']:,.0f}), its cap is {figures['cap']:g}"
        for name, figures in description["sources"].items()
        if figures["cap"] is not None and figures["epochs"] > figures["cap"]
    ]
    if over:
        raise ValueError(
            f"the mixture exceeds data.mixture.max_epochs: {'; '.join(over)}. Lower the weight, shorten the plan, add text, "
            "or raise the cap"
        )


def _phases(stream: RowStream, number: int, sample_windows: int) -> list[dict[str, Any]]:
    """The phases of one leg, with `segments` of the sampled rows, and those `needed` without a limit."""
    leg, streams = stream.legs[number], stream.partitions[number]
    phases = []
    ends = [*leg.phase_rows[1:], leg.rows]
    # Text that the leg before has packed and not served is served here.
    read = leg.cursor_at(0) - np.bincount(
        stream.stream_numbers(number)[leg.origin.carried.docs], leg.origin.carried.lengths, len(streams)
    )
    for start, row, end in zip(stream.phase_starts[number], leg.phase_rows, ends, strict=True):
        # A phase begins with a window, and so does the next one.
        first = int(np.searchsorted(leg.index.starts, row))
        stop_row = leg.rows if end == leg.rows else int(leg.index.starts[np.searchsorted(leg.index.starts, end)])
        until = leg.cursor_at(min(stop_row, leg.rows))
        tokens, read = until - read, until
        numbers = [n for n in range(first, leg.index.windows) if leg.index.starts[n] < leg.index.starts[n + 1]]
        windows = [leg.pack(n, leg.segments_per_row) for n in numbers[:sample_windows]]
        unlimited = [leg.pack(n, leg.context) for n in numbers[:sample_windows]]
        none = np.zeros(1, dtype=np.int64)
        phases.append(
            {
                "start": start,
                "first_row": stream.first_rows[number] + row,
                "rows": end - row,
                "context": leg.context,
                "text_tokens": round(tokens.sum()),
                "padding_share": padding_share(windows, leg.context),
                "padding_share_unlimited": padding_share(unlimited, leg.context),
                "segments": np.concatenate([none, *(segments_of_rows(w, leg.context) for w in windows)])[1:],
                "needed": np.concatenate([none, *(segments_of_rows(w, leg.context) for w in unlimited)]),
                "sources": {
                    s.name: {
                        "share": float(count / tokens.sum()),
                        "tokens": round(count),
                        "epochs": float(count / max(1, order.epoch_tokens)),
                    }
                    for s, order, count in zip(streams, leg.streams, tokens, strict=True)
                    if count > 0.5
                },
            }
        )
    return phases


def _whole(stream: RowStream) -> dict[str, dict[str, Any]]:
    """Streams over the whole plan, as the last leg has them."""
    leg, streams = stream.legs[-1], stream.partitions[-1]
    tokens = leg.cursor_at(leg.rows)
    caps = epoch_caps(stream.mixture, streams)
    return {
        s.name: {
            "share": float(count / tokens.sum()),
            "tokens": round(count),
            "epochs": float(count / max(1, order.epoch_tokens)),
            "cap": None if math.isinf(cap) else cap,
        }
        for s, order, count, cap in zip(streams, leg.streams, tokens, caps, strict=True)
        if count > 0.5
    }


def share_errors(
    stream: RowStream, tokens: int, stretches: Sequence[int] = (20_000_000, 500_000_000)
) -> list[dict[str, Any]]:
    """How far served shares are from the weights, over every stretch of text.

    Lays out the first `tokens` slots of each leg, or as many as its first phase has, without their text.

    Returns for each leg and stretch its `context`, `stretch` (text tokens), `stretches` (how many of them were looked at,
    one from every 65,536 slots on) and `worst`, the largest difference of a stream's share from its weight. What is
    shorter than a stretch gives nothing for it.
    """
    found: list[dict[str, Any]] = []
    for number, (first_row, leg) in enumerate(zip(stream.first_rows, stream.legs, strict=True)):
        want = leg.quotas[0] / leg.quotas[0].sum()
        end = min([leg.rows, tokens // leg.context, *leg.phase_rows[1:2]])
        at_once = max(1, SHARES_EVERY // leg.context)
        served: list[NDArray[np.float64]] = [np.zeros(len(want))]
        for row in range(0, end - at_once + 1, at_once):
            pieces = join_pieces(stream.rows(first_row + row, at_once))
            numbers = stream.streams_of(number, pieces.docs)
            served.append(np.bincount(numbers, pieces.lengths, len(want)).astype(np.float64))
        before = np.cumsum(served, axis=0)
        position = before.sum(axis=1)
        for stretch in stretches:
            ends = np.searchsorted(position, position + stretch)
            begins = np.flatnonzero(ends < len(position))
            if len(begins):
                got = before[ends[begins]] - before[begins]
                worst = np.abs(got / got.sum(axis=1, keepdims=True) - want).max()
                row_of = {"context": leg.context, "stretch": stretch, "stretches": len(begins), "worst": float(worst)}
                found.append(row_of)
    return found
