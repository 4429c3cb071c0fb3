"""What share of the text each source gets, and how that changes over the run: the settings."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

EVERY = "every"  # in `max_epochs`: whatever is not named


@dataclass
class Phase:
    """From a point of the run on, some sources count more (or less) than their base weight."""

    start: float = 0.0
    """Where the phase begins, as a fraction of the planned tokens, in [0, 1)."""

    scale: dict[str, float] = field(default_factory=dict)
    """Factor on the base weight of each named source, or slice as `source/language`; the weights are normalised
    again afterwards. What is not named keeps a factor of 1. `{"books": 2.0}` with start 0.75 is an anneal on
    books. A slice's own factor stands in place of its source's."""

    end: float | None = None
    """Where it ends, in (start, 1]; from there to the next phase the base weights hold. Null: the next phase ends
    it, or the run."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and 0.0 <= self.start < 1.0):
            raise ValueError(f"phase start {self.start}: must be a fraction of the planned tokens in [0, 1)")
        if self.end is not None and not self.start < self.end <= 1.0:
            raise ValueError(f"phase at {self.start}: its end is {self.end}, must be above its start and at most 1")
        for source, factor in self.scale.items():
            if not (math.isfinite(factor) and factor >= 0.0):
                raise ValueError(
                    f"phase at {self.start}: the factor of source {source!r} is {factor}, must be 0 or more"
                )


@dataclass
class Anneal:
    """The last phase in short: high-quality sources count more while the learning rate falls."""

    sources: list[str] = field(default_factory=list)
    """Sources, or slices as `source/language`. Empty: no anneal."""

    factor: float = 2.0
    """Factor on their base weights."""

    start: float = 0.75
    """Where it begins, as a fraction of the planned tokens; it ends with the run."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 0.0):
            raise ValueError(f"anneal factor {self.factor}: must be 0 or more")
        if not (math.isfinite(self.start) and 0.0 <= self.start < 1.0):
            raise ValueError(f"anneal start {self.start}: must be a fraction of the planned tokens in [0, 1)")
        twice = {source for source in self.sources if self.sources.count(source) > 1}
        if twice:
            raise ValueError(f"anneal sources name {', '.join(sorted(twice))} twice")


@dataclass
class MixtureSettings:
    """Weights of the sources, in shares of *text tokens* (the opening eod of a segment and padding not
    counted). A source is named as in the dataset, a slice of it as `source/language`."""

    weights: dict[str, float] = field(default_factory=dict)
    """Relative weight of each source or slice; they need not sum to 1. A source that is not named is not served.
    A slice that has a weight of its own is taken out of its source, whose weight is then for the rest of it. Empty
    means natural: everything by the tokens it has."""

    phases: list[Phase] = field(default_factory=list)
    """Changes of the weights, in order of their starts. Outside of them the base weights hold."""

    anneal: Anneal = field(default_factory=Anneal)
    """A last phase for high-quality sources."""

    max_epochs: dict[str, float] = field(default_factory=dict)
    """How often the text of a source or slice may be read in the whole run; `every` stands for all that are not named. A
    plan that would read something more often is refused before it starts."""

    rephrased: dict[str, str] = field(default_factory=dict)
    """Where a source was rephrased from another, by a model say: {rephrased source: original source}. It is
    shown with the mixture, and kept with the run; it changes nothing that is served."""

    def __post_init__(self) -> None:
        for source, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0.0):
                raise ValueError(f"mixture weight of source {source!r} is {weight}: must be 0 or more")
        if self.weights and math.fsum(self.weights.values()) == 0.0:
            raise ValueError("mixture weights are all 0: give at least one source a weight")
        for source, epochs in self.max_epochs.items():
            if not (math.isfinite(epochs) and epochs > 0.0):
                raise ValueError(f"mixture max_epochs of {source!r} is {epochs}: must be above 0")
        for source, original in self.rephrased.items():
            if source == original:
                raise ValueError(f"mixture rephrased says that {source!r} was rephrased from itself")
        named = self.named_phases()
        for before, after in pairwise(named):
            annealed = after is named[-1] and bool(self.anneal.sources)
            if not before.start < after.start:
                if annealed:
                    raise ValueError(
                        f"the anneal begins at {after.start}, and the last phase at {before.start}, not before it: give "
                        "another data.mixture.anneal.start, or leave the phases out with data.mixture.phases=[]"
                    )
                raise ValueError(
                    f"phase starts must rise: {before.start} is followed by {after.start}; "
                    "sort the phases and merge those that begin together"
                )
            if before.end is not None and before.end > after.start:
                raise ValueError(
                    f"phases overlap: the one from {before.start} to {before.end} goes on for "
                    f"{before.end - after.start:.4g} of the planned tokens after {after.start}, where the "
                    f"{'anneal' if annealed else 'next'} begins; end it there, or "
                    f"{'give another data.mixture.anneal.start' if annealed else 'merge them'}"
                )

    def named_phases(self) -> list[Phase]:
        """The phases, and the anneal as the last of them."""
        if not self.anneal.sources:
            return list(self.phases)
        return [*self.phases, Phase(self.anneal.start, dict.fromkeys(self.anneal.sources, self.anneal.factor))]

    def all_phases(self) -> list[Phase]:
        """Phases that follow each other without a gap from 0 on, those with nothing but base weights included."""
        phases: list[Phase] = []
        for phase in self.named_phases():
            gap = 0.0 if not phases else phases[-1].end
            if gap is not None and gap < phase.start:
                phases.append(Phase(gap))
            phases.append(phase)
        if not phases:
            return [Phase()]
        if phases[-1].end is not None and phases[-1].end < 1.0:
            phases.append(Phase(phases[-1].end))
        return phases

    def names(self, where: str = "data.mixture") -> dict[str, str]:
        """Every source or slice that a weight, phase or cap is for, and the first setting that names it.

        Args:
            where: the setting that this mixture is.
        """
        named = [(name, "weights") for name in self.weights]
        named += [(name, f"phases[{i}].scale") for i, phase in enumerate(self.phases) for name in phase.scale]
        named += [(name, "anneal.sources") for name in self.anneal.sources]
        named += [(name, "max_epochs") for name in self.max_epochs if name != EVERY]
        found: dict[str, str] = {}
        for name, setting in named:
            found.setdefault(name, f"{where}.{setting}")
        return found


@dataclass
class Past:
    """The mixture that a branch's beginning was trained with. `branch=` fills this in."""

    until_row: int = 0
    """Rows served with it."""

    mixture: MixtureSettings = field(default_factory=MixtureSettings)
    """Weights and phases that held until then; phases that would have begun later have no part in it."""

    def __post_init__(self) -> None:
        if self.until_row < 1:
            raise ValueError(f"past until_row {self.until_row}: must be 1 or more")
