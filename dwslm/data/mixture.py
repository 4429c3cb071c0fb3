"""What share of the text each source gets, and how that changes over the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass
class Phase:
    """From a point of the run on, some sources count more (or less) than their base weight."""

    start: float = 0.0
    """Where the phase begins, as a fraction of the planned tokens, in [0, 1). The next one ends it."""

    scale: dict[str, float] = field(default_factory=dict)
    """Factor on the base weight of each named source; the weights are normalised again afterwards. Sources
    not named keep a factor of 1. `{"books": 2.0}` with start 0.75 is an anneal on books."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and 0.0 <= self.start < 1.0):
            raise ValueError(f"phase start {self.start}: must be a fraction of the planned tokens in [0, 1)")
        for source, factor in self.scale.items():
            if not (math.isfinite(factor) and factor >= 0.0):
                raise ValueError(
                    f"phase at {self.start}: the factor of source {source!r} is {factor}, must be 0 or more"
                )


@dataclass
class MixtureSettings:
    """Weights of the sources, in shares of *text tokens* (the opening eod of a segment and padding not
    counted)."""

    weights: dict[str, float] = field(default_factory=dict)
    """Relative weight of each source; they need not sum to 1. A source that is not named is not served. Empty
    means natural: each source by the tokens it has."""

    phases: list[Phase] = field(default_factory=list)
    """Changes of the weights, in order of their starts. Before the first one the base weights hold."""

    def __post_init__(self) -> None:
        for source, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0.0):
                raise ValueError(f"mixture weight of source {source!r} is {weight}: must be 0 or more")
        if self.weights and math.fsum(self.weights.values()) == 0.0:
            raise ValueError("mixture weights are all 0: give at least one source a weight")
        for before, after in pairwise(self.phases):
            if not before.start < after.start:
                raise ValueError(
                    f"phase starts must rise: {before.start} is followed by {after.start}; "
                    "sort the phases and merge those that begin together"
                )


def phase_shares(
    settings: MixtureSettings, sources: Sequence[str], tokens: Sequence[int]
) -> tuple[list[float], NDArray[np.float64]]:
    """Resolve the settings against the sources of a dataset and the text tokens that each of them holds.

    Returns the start of every phase, the first being 0.0, and the shares, float64 [phases, sources], each row
    of which sums to 1.

    Raises ValueError for a source that is not in the dataset, one that has a weight but no text, a factor
    that can have no effect, and a phase in which no source is left.
    """
    named = list(settings.weights) + [source for phase in settings.phases for source in phase.scale]
    for source in named:
        if source not in sources:
            raise ValueError(f"mixture names source {source!r}, the dataset has {', '.join(sorted(sources))}")
    weights = settings.weights or dict(zip(sources, map(float, tokens), strict=True))
    base = [weights.get(source, 0.0) for source in sources]
    if math.fsum(base) == 0.0:
        raise ValueError("the dataset holds no text: there is nothing to sample from")
    for source, weight, count in zip(sources, base, tokens, strict=True):
        if weight > 0.0 and count == 0:
            raise ValueError(f"mixture gives source {source!r} a weight, but the dataset has no text of it")

    phases = list(settings.phases)
    if not phases or phases[0].start > 0.0:
        phases.insert(0, Phase())
    shares = np.empty((len(phases), len(sources)))
    for row, phase in zip(shares, phases, strict=True):
        for source in phase.scale:
            if base[sources.index(source)] == 0.0:
                raise ValueError(f"phase at {phase.start} scales source {source!r}, whose weight is 0")
        scaled = [weight * phase.scale.get(source, 1.0) for source, weight in zip(sources, base, strict=True)]
        total = math.fsum(scaled)
        if not 0.0 < total < math.inf:
            raise ValueError(f"phase at {phase.start}: the scaled weights sum to {total}, no source can be chosen")
        row[:] = [weight / total for weight in scaled]
    return [phase.start for phase in phases], shares
