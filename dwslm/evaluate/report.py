"""From the totals of each document to bits per byte by slice, with intervals, as JSON and as tables."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

ONE_NAT = 2**32  # totals are integers of 2^-32 nats, so the sum of slices is the whole, exactly
SMALL_BYTES = 20_000  # a slice with less text than this says little; it is shown and marked
RESAMPLED_AT_ONCE = 2**22  # documents drawn in one numpy call of the bootstrap: 32 MB of indices

DOCUMENT_DTYPE = np.dtype(
    [
        ("index", "<i8"),  # in the dataset
        ("source", "<u2"),
        ("language", "<u2"),
        ("tokens", "<i8"),
        ("bytes", "<i8"),  # UTF-8 bytes of the text
        ("nats_fixed", "<i8"),  # in units of 2^-32 nats, so up to 2^31 nats a document
    ]
)


@dataclass(frozen=True)
class Scores:
    """The totals of every scored document: what a report is made from.

    `documents` is an array of DOCUMENT_DTYPE whose `source` and `language` index the two lists of names.
    `fingerprint` names the dataset, `available` is how many documents it holds (more than were scored if
    `max_documents` said so).
    """

    documents: np.ndarray
    sources: list[str]
    languages: list[str]
    context: int
    fingerprint: str
    available: int


def bits_per_byte(nats_fixed: int, byte_count: int) -> float:
    """Total nats / (ln 2 x total bytes), from integers of any size."""
    return nats_fixed / (ONE_NAT * byte_count) / math.log(2)


@dataclass(frozen=True)
class Slice:
    """One row of a report. `source` or `language` is None where the row runs over all of them.

    `nats_fixed` is exact, in units of 2^-32 nats. `interval` holds the 2.5 % and 97.5 % points of bits per
    byte when the slice's documents are drawn anew with replacement; None for a single document, which has
    no spread.
    """

    source: str | None
    language: str | None
    nats_fixed: int
    bytes: int
    tokens: int
    documents: int
    interval: list[float] | None

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nats_fixed, self.bytes)

    @property
    def small(self) -> bool:
        return self.bytes < SMALL_BYTES

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits_per_byte": self.bits_per_byte, "small": self.small}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        derived = {"bits_per_byte", "small"}
        return cls(**{key: value for key, value in row.items() if key not in derived})


@dataclass(frozen=True)
class Report:
    """Bits per byte of one model on one dataset: overall, by source, by language and by both."""

    overall: Slice
    by_source: list[Slice]
    by_language: list[Slice]
    crossed: list[Slice]
    context: int
    fingerprint: str
    available: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. `nats_fixed` may pass 2^53: read it as an integer, not as a double."""
        return {
            "overall": self.overall.to_dict(),
            "by_source": [row.to_dict() for row in self.by_source],
            "by_language": [row.to_dict() for row in self.by_language],
            "crossed": [row.to_dict() for row in self.crossed],
            "context": self.context,
            "fingerprint": self.fingerprint,
            "available": self.available,
        }

    @classmethod
    def from_dict(cls, report: dict[str, Any]) -> Self:
        return cls(
            overall=Slice.from_dict(report["overall"]),
            by_source=[Slice.from_dict(row) for row in report["by_source"]],
            by_language=[Slice.from_dict(row) for row in report["by_language"]],
            crossed=[Slice.from_dict(row) for row in report["crossed"]],
            context=report["context"],
            fingerprint=report["fingerprint"],
            available=report["available"],
        )


def bootstrap_interval(nats: np.ndarray, byte_counts: np.ndarray, samples: int, key: str) -> list[float] | None:
    """95 % percentile bootstrap of bits per byte over documents (Efron and Tibshirani 1993, chapter 13).

    Each of `samples` rounds draws as many documents as there are, with replacement, and divides the sums;
    documents and not tokens, because the tokens of one document go well or badly together. `nats` and
    `byte_counts` are [documents]. The draws depend on `key` alone, so a slice keeps its interval whatever
    other slices stand beside it.
    """
    count = len(nats)
    if count < 2:
        return None
    generator = np.random.default_rng(list(hashlib.sha256(key.encode()).digest()))
    nats, byte_counts = nats.astype(np.float64), byte_counts.astype(np.float64)
    ratios = np.empty(samples)
    rounds_at_once = max(1, RESAMPLED_AT_ONCE // count)
    for first in range(0, samples, rounds_at_once):
        rounds = min(rounds_at_once, samples - first)
        drawn = generator.integers(count, size=(rounds, count))
        ratios[first : first + rounds] = nats[drawn].sum(axis=1) / byte_counts[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975]) / math.log(2)
    return [float(low), float(high)]


def summarise(documents: np.ndarray, source: str | None, language: str | None, *, samples: int, seed: int) -> Slice:
    """Adds the given documents (DOCUMENT_DTYPE) up to one row. `source` and `language` only name it."""
    return Slice(
        source=source,
        language=language,
        nats_fixed=sum(documents["nats_fixed"].tolist()),  # Python integers: no overflow at any size
        bytes=sum(documents["bytes"].tolist()),
        tokens=sum(documents["tokens"].tolist()),
        documents=len(documents),
        interval=bootstrap_interval(
            documents["nats_fixed"] / ONE_NAT, documents["bytes"], samples, f"{seed}\0{source}\0{language}"
        ),
    )


def make_report(scores: Scores, *, samples: int, seed: int) -> Report:
    """Adds the documents up by slice, if it has any. `samples` and `seed` are the bootstrap's."""
    documents = scores.documents

    def row(members: np.ndarray, source: str | None = None, language: str | None = None) -> Slice:
        return summarise(members, source, language, samples=samples, seed=seed)

    sources = split(documents, "source", scores.sources)
    languages = split(documents, "language", scores.languages)
    return Report(
        overall=row(documents),
        by_source=[row(members, source=name) for name, members in sources],
        by_language=[row(members, language=name) for name, members in languages],
        crossed=[
            row(members, source, language)
            for source, of_source in sources
            for language, members in split(of_source, "language", scores.languages)
        ],
        context=scores.context,
        fingerprint=scores.fingerprint,
        available=scores.available,
    )


def report_rows(report: Report) -> list[dict[str, Any]]:
    """One plain row per slice for a run's evals file, the overall one last: who finds it knows that all are there."""
    kinds = {
        "source": report.by_source,
        "language": report.by_language,
        "crossed": report.crossed,
        "overall": [report.overall],
    }
    about = {"context": report.context, "dataset": report.fingerprint, "documents_available": report.available}
    return [run_row(kind, row.to_dict()) | about for kind, slices in kinds.items() for row in slices]


def run_row(kind: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a slice of this kind as a run keeps them.

    Their own `tokens` become `text_tokens`: `tokens` in a run's rows says how far training was.
    """
    return {"slice": kind} | {("text_tokens" if key == "tokens" else key): value for key, value in figures.items()}


def split(documents: np.ndarray, field: str, names: list[str]) -> list[tuple[str, np.ndarray]]:
    """The documents by `source` or `language`, each part with its name; there is no empty part."""
    return [(names[value], documents[documents[field] == value]) for value in np.unique(documents[field])]


def format_interval(interval: list[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def slice_table(title: str, names: list[str], rows: list[tuple[list[str], Slice]]) -> Table:
    """A column for each of `names`, then the figures. Rows of less than SMALL_BYTES are marked and dimmed."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in ("bits per byte", "95 % interval", "bytes", "tokens", "documents"):
        table.add_column(name, justify="right")
    for labels, row in rows:
        table.add_row(
            *(Text(label) for label in labels),  # Text: a name in square brackets is no markup
            f"{row.bits_per_byte:.4f}" + (" *" if row.small else ""),
            format_interval(row.interval),
            f"{row.bytes:,}",
            f"{row.tokens:,}",
            f"{row.documents:,}",
            style="dim" if row.small else None,
        )
    if any(row.small for _, row in rows):
        table.caption = f"* less than {SMALL_BYTES // 1000} kB of text"
        table.caption_justify = "left"
    return table


def tables(report: Report, *, crossed: bool = True) -> RenderableType:
    """The report for a terminal; rich itself falls back to plain text where the output is none."""
    all_and_sources = [(["all"], report.overall)] + [([str(row.source)], row) for row in report.by_source]
    parts: list[RenderableType] = [
        slice_table(f"Held-out bits per byte, context {report.context:,}", ["source"], all_and_sources),
        slice_table("By language", ["language"], [([str(row.language)], row) for row in report.by_language]),
    ]
    if crossed:
        rows = [([str(row.source), str(row.language)], row) for row in report.crossed]
        parts.append(slice_table("By source and language", ["source", "language"], rows))
    if report.overall.documents < report.available:
        parts.append(Text(f"scored {report.overall.documents:,} of {report.available:,} documents"))
    return Group(*parts)
