"""A mixture held against a dataset: the streams of text that it needs, and what share each gets in each phase."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dwslm.data.mixture import EVERY, MixtureSettings
from dwslm.data.shards import Dataset


@dataclass(frozen=True)
class Stream:
    """Documents that are read one after the other: a source, a slice of it, or what slices leave of it."""

    source: str
    language: str | None
    """None: all languages of the source that have no stream of their own."""
    rest: bool
    """Whether slices of the source have streams of their own."""

    @property
    def name(self) -> str:
        """`books`, `code/code-c`, or `code, rest`."""
        if self.language is not None:
            return f"{self.source}/{self.language}"
        return f"{self.source}, rest" if self.rest else self.source

    def find(self, by_name: dict[str, float], default: float) -> float:
        """What is given for the slice, else for its source, else the default."""
        own = f"{self.source}/{self.language}"
        return by_name.get(own, by_name.get(self.source, default))


def make_streams(dataset: Dataset, names: Mapping[str, str]) -> list[Stream]:
    """The coarsest streams that keep apart what is named; `names` are those of `MixtureSettings.names()`.

    Raises ValueError for a name that is no source, and no slice, of the dataset, with the setting that names it.
    """
    pairs = {(row["source"], row["language"]) for row in _slices(dataset)}
    apart: dict[str, set[str]] = {}
    for name, setting in names.items():
        if name in dataset.sources:
            continue
        source, _, language = name.rpartition("/")
        if source not in dataset.sources:
            there = ", ".join(sorted(dataset.sources))
            raise ValueError(f"{setting} names source {name!r}, the dataset has {there}: {_way_out(setting, name)}")
        if (source, language) not in pairs:
            there = ", ".join(sorted(other for of, other in pairs if of == source))
            raise ValueError(
                f"{setting} names slice {name!r}, the dataset has of {source!r} {there}: {_way_out(setting, name)}"
            )
        apart.setdefault(source, set()).add(language)
    streams: list[Stream] = []
    for source in dataset.sources:
        own = sorted(apart.get(source, ()))
        streams += [Stream(source, language, True) for language in own]
        if not own or any(of == source and language not in own for of, language in pairs):
            streams.append(Stream(source, None, bool(own)))
    return streams


def _way_out(setting: str, name: str) -> str:
    """What to do where a setting names what isn't there; it may come from the experiment and not from the user."""
    if setting.startswith("data.mixture.phases["):
        return "name what is there, or leave the phases out with data.mixture.phases=[]"
    if setting == "data.mixture.anneal.sources":
        return "name what is there, or leave the anneal out with data.mixture.anneal.sources=[]"
    if setting.startswith("data.mixture.") and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
        return f"name what is there, or leave it out with '~{setting}.{name}'"
    return "name what is there"


def stream_table(dataset: Dataset, streams: list[Stream]) -> NDArray[np.int64]:
    """Which of the streams a document is in, by its source and language, int64 [sources, languages]."""
    table = np.zeros((len(dataset.sources), len(dataset.languages)), dtype=np.int64)
    # Those of single languages last, since the others are given the whole source.
    for number, stream in sorted(enumerate(streams), key=lambda pair: pair[1].language is not None):
        source = dataset.sources.index(stream.source)
        language = slice(None) if stream.language is None else dataset.languages.index(stream.language)
        table[source, language] = number
    return table


def stream_of(dataset: Dataset, streams: list[Stream]) -> NDArray[np.int64]:
    """Which of the streams each document belongs to, int64 [documents]."""
    numbers: NDArray[np.int64] = stream_table(dataset, streams)[dataset.docs["source"], dataset.docs["language"]]
    return numbers


def phase_shares(settings: MixtureSettings, streams: list[Stream], tokens: list[int]) -> NDArray[np.float64]:
    """Shares of text tokens, float64 [phases of `settings.all_phases()`, streams], each row summing to 1.

    Args:
        tokens: what each stream holds.

    Raises ValueError for one that has a weight but no text, a factor that can have no effect, and a phase in which
    nothing is left.
    """
    base = _base_weights(settings, streams, tokens)
    phases = settings.all_phases()
    shares = np.empty((len(phases), len(streams)))
    for row, phase in zip(shares, phases, strict=True):
        for name in phase.scale:
            hit = [w for s, w in zip(streams, base, strict=True) if name in (s.source, f"{s.source}/{s.language}")]
            if math.fsum(hit) == 0.0:
                raise ValueError(f"phase at {phase.start} scales source {name!r}, whose weight is 0")
        scaled = [weight * stream.find(phase.scale, 1.0) for weight, stream in zip(base, streams, strict=True)]
        total = math.fsum(scaled)
        if not 0.0 < total < math.inf:
            raise ValueError(f"phase at {phase.start}: the scaled weights sum to {total}, no source can be chosen")
        row[:] = [weight / total for weight in scaled]
    return shares


def _base_weights(settings: MixtureSettings, streams: list[Stream], tokens: list[int]) -> list[float]:
    if not sum(tokens):
        raise ValueError("the dataset holds no text: there is nothing to sample from")
    if not settings.weights:
        return [float(count) for count in tokens]
    own = [f"{stream.source}/{stream.language}" in settings.weights for stream in streams]
    # A source's weight is shared out by tokens over those of its streams that have none themselves.
    left: dict[str, int] = {}
    for stream, count, named in zip(streams, tokens, own, strict=True):
        left[stream.source] = left.get(stream.source, 0) + (0 if named else count)
    for name, weight in settings.weights.items():
        text = [n for s, n in zip(streams, tokens, strict=True) if name == f"{s.source}/{s.language}"]
        if weight > 0.0 and (sum(text) if text else left[name]) == 0:
            raise ValueError(f"mixture gives source {name!r} a weight, but the dataset has no text of it")
    weights: list[float] = []
    for stream, count, named in zip(streams, tokens, own, strict=True):
        if named:
            weights.append(settings.weights[f"{stream.source}/{stream.language}"])
        else:
            share = count / left[stream.source] if left[stream.source] else 0.0
            weights.append(settings.weights.get(stream.source, 0.0) * share)
    return weights


def epoch_caps(settings: MixtureSettings, streams: list[Stream]) -> list[float]:
    """The most epochs of each stream, infinity where there is no cap."""
    every = settings.max_epochs.get(EVERY, math.inf)
    return [stream.find(settings.max_epochs, every) for stream in streams]


def check_sources(settings: MixtureSettings, sources: list[str]) -> None:
    """Raises ValueError where a source, or what it was rephrased from, is not in the dataset, and for a cap on every source
    where one has that name."""
    if EVERY in settings.max_epochs and EVERY in sources:
        raise ValueError(
            f"data.mixture.max_epochs: {EVERY!r} is whatever is not named, and a source of the dataset: cap sources by their "
            "names, or prepare that one under another (--source, --source-field)"
        )
    for pair in settings.rephrased.items():
        for name in pair:
            if name not in sources:
                raise ValueError(
                    f"data.mixture.rephrased names source {name!r}, the dataset has {', '.join(sorted(sources))}: "
                    "name what is there"
                )


def _slices(dataset: Dataset) -> list[dict[str, str]]:
    """Pairs of source and language that have documents."""
    pairs = np.unique(dataset.docs["source"].astype(np.int64) * len(dataset.languages) + dataset.docs["language"])
    made = [divmod(int(pair), len(dataset.languages)) for pair in pairs]
    return [{"source": dataset.sources[source], "language": dataset.languages[language]} for source, language in made]
