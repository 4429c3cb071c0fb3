"""Settings of packing: the shape of rows, and how it grows in the course of a run."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

MOST_WINDOW_TOKENS = 2**28
MOST_SEGMENTS = 2**14


@dataclass
class Rung:
    """Longer rows from a point of the run on."""

    start: float = 0.0
    """Where the rung begins, as a fraction of the planned tokens, in (0, 1); rounded up to a whole step."""

    context: int = 4096
    """Slots in a row from there on; more than before."""

    segments_per_row: int = 32
    """The most segments in a row from there on, padding included."""

    def __post_init__(self) -> None:
        if not 0.0 < self.start < 1.0:
            raise ValueError(f"ladder start {self.start}: must be a fraction of the planned tokens in (0, 1)")
        if self.segments_per_row < 2:
            raise ValueError(f"ladder segments_per_row {self.segments_per_row}: must be 2 or more, text and padding")
        if self.segments_per_row > MOST_SEGMENTS:
            raise ValueError(f"ladder segments_per_row {self.segments_per_row}: must be at most {MOST_SEGMENTS}")


@dataclass
class PackingSettings:
    """How text is laid out in rows."""

    context: int = 2048
    """Slots in a row: the longest segment, opening eod included. With a ladder, those it begins with."""

    segments_per_row: int = 32
    """The most segments in a row, padding included. It fixes the size of `cu_seqlens`; short documents cost
    padding when it is small."""

    fill: str = "best_fit"
    """`best_fit`: best-fit decreasing inside each window, whole pieces only. `concat`: one document after the
    other, cut where a row ends."""

    window_tokens: int = 1_048_576
    """Text tokens packed and shuffled together. Larger windows leave less padding and take more memory."""

    ladder: list[Rung] = field(default_factory=list)
    """Rungs with longer rows, in order. A micro-batch holds as many tokens on each, in fewer rows; the held-out set is
    always scored at the last context. Text that a rung has packed and not served goes into the next."""

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ValueError(f"packing context {self.context}: must be 2 or more, an eod and a token")
        if self.segments_per_row < 2:
            raise ValueError(f"packing segments_per_row {self.segments_per_row}: must be 2 or more, text and padding")
        if self.segments_per_row > MOST_SEGMENTS:
            raise ValueError(f"packing segments_per_row {self.segments_per_row}: must be at most {MOST_SEGMENTS}")
        if self.fill not in ("best_fit", "concat"):
            raise ValueError(f"packing fill {self.fill!r}: must be best_fit or concat")
        for before, after in pairwise([Rung(0.5, self.context), *self.ladder]):
            if not before.context < after.context:
                raise ValueError(f"ladder contexts must rise: {before.context} is followed by {after.context}")
        for before, after in pairwise(self.ladder):
            if not before.start < after.start:
                raise ValueError(f"ladder starts must rise: {before.start} is followed by {after.start}")
        if self.window_tokens > MOST_WINDOW_TOKENS:
            raise ValueError(f"packing window_tokens {self.window_tokens}: must be at most {MOST_WINDOW_TOKENS}")
        if self.window_tokens < self.last_context:
            raise ValueError(
                f"packing window_tokens {self.window_tokens}: must be at least the context, {self.last_context}"
            )

    @property
    def last_context(self) -> int:
        """Slots in a row at the end of the run."""
        return self.ladder[-1].context if self.ladder else self.context


def first_step(fraction: float, steps: int) -> int:
    """The first step, counted from 0, that lies at or after a fraction of the run."""
    return math.ceil(fraction * steps - 1e-9)  # the small number undoes what 0.07 of 100 steps is too large by
