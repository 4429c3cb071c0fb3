"""Bits per byte by position in long documents: does text far back help, does a model outlive its context?

The first `edges[-1]` slots of each long document are one row, so that its text is scored with all the text
before it. Bands are compared over the same documents: of those that reach into a band, this band and all
bands before it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dwslm.data.order import Pieces
from dwslm.data.shards import Dataset
from dwslm.evaluate.bits_per_byte import EvalSettings, NatsFn, Progress, batches, choose_documents, text_nats
from dwslm.evaluate.report import ONE_NAT, bits_per_byte, bootstrap_interval, format_interval

BAND_SEGMENTS = 2  # of a row: one document, and padding


@dataclass(frozen=True)
class BandRow:
    """One model on one band of the documents with more than `longer_than` tokens.

    The band is the text predicted at slots `start .. stop` of its row, where slot 0 holds the opening eod.
    `nats_fixed` is exact, in units of 2^-32 nats; `interval` as in a report.
    """

    model: str
    longer_than: int
    start: int
    stop: int
    nats_fixed: int
    bytes: int
    tokens: int
    documents: int
    interval: list[float] | None

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nats_fixed, self.bytes)


@dataclass(frozen=True)
class BandReport:
    """Bands of all models on one dataset. `longest` is the number of tokens of its longest document."""

    edges: list[int]
    models: list[str]
    rows: list[BandRow]
    longest: int
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [{**asdict(row), "bits_per_byte": row.bits_per_byte} for row in self.rows]
        return {**asdict(self), "rows": rows}

    @classmethod
    def from_dict(cls, report: dict[str, Any]) -> Self:
        rows = [
            BandRow(**{key: value for key, value in row.items() if key != "bits_per_byte"}) for row in report["rows"]
        ]
        return cls(**{**report, "rows": rows})


def score_bands(
    nats_fns: Mapping[str, NatsFn],
    dataset: Dataset,
    token_bytes: NDArray[np.int32],
    settings: EvalSettings,
    *,
    progress: Progress | None = None,
) -> BandReport:
    """Scores the documents longer than the first of `settings.bands` by position.

    Args:
        nats_fns: by name, for instance without and with YaRN; each gets rows of `settings.bands[-1]` slots.
        token_bytes: bytes of text of each token, int32 [vocab_size].
        progress: called with (rows done, rows in all), anew for each model.

    A dataset without such a document gives a report without rows. Raises ValueError if a token's nats are
    not finite.
    """
    assert settings.bands, "no bands to score"
    assert len(token_bytes) == dataset.vocab_size, (len(token_bytes), dataset.vocab_size)
    edges = list(settings.bands)
    lengths = dataset.docs["tokens"].astype(np.int64)
    chosen = choose_documents(dataset.docs, np.flatnonzero(lengths > edges[0]), settings.max_documents)
    # One row a document: its first tokens, as many as fit beside the opening eod.
    documents = [
        Pieces(doc, np.zeros(1, dtype=np.int64), np.minimum(lengths[doc], edges[-1] - 1))
        for doc in chosen.reshape(-1, 1)
    ]

    rows = []
    if documents:
        for model, nats_fn in nats_fns.items():
            sums = band_sums(nats_fn, dataset, documents, token_bytes, settings, progress)
            rows += band_rows(model, sums, lengths[chosen], edges, settings)
    return BandReport(edges, list(nats_fns), rows, int(lengths.max(initial=0)), dataset.fingerprint)


def band_sums(
    nats_fn: NatsFn,
    dataset: Dataset,
    documents: list[Pieces],
    token_bytes: NDArray[np.int32],
    settings: EvalSettings,
    progress: Progress | None,
) -> NDArray[np.int64]:
    """Nats (2^-32), bytes and tokens of each document in each band, int64 [documents, 3, bands]."""
    context, starts = settings.bands[-1], [0, *settings.bands[:-1]]
    parts = []
    for batch in batches(dataset, documents, context, BAND_SEGMENTS, settings.micro_batch_tokens, progress):
        fixed, text = text_nats(nats_fn, batch, dataset)
        byte_counts = np.where(text, token_bytes[np.where(text, batch.targets, 0)], 0)
        by_slot = np.stack([fixed, byte_counts, text]).reshape(3, -1, context)  # int64 [3, rows, context]
        parts.append(np.add.reduceat(by_slot, starts, axis=2).transpose(1, 0, 2))
    return np.concatenate(parts)[: len(documents)]  # without the empty rows of the last batch


def band_rows(
    model: str, sums: NDArray[np.int64], lengths: NDArray[np.int64], edges: list[int], settings: EvalSettings
) -> list[BandRow]:
    """Adds documents up. `sums` is as `band_sums` gives it, `lengths` their tokens, [documents]."""
    rows = []
    for deepest in range(1, len(edges)):
        longer_than = edges[deepest - 1]
        members = sums[lengths > longer_than]
        if len(members) == 0:
            break
        for band in range(deepest + 1):
            nats, byte_counts, tokens = (members[:, part, band] for part in range(3))
            rows.append(
                BandRow(
                    model=model,
                    longer_than=longer_than,
                    start=0 if band == 0 else edges[band - 1],
                    stop=edges[band],
                    nats_fixed=sum(nats.tolist()),
                    bytes=sum(byte_counts.tolist()),
                    tokens=sum(tokens.tolist()),
                    documents=len(members),
                    # Not keyed by the model: all are resampled alike, so they can be compared.
                    interval=bootstrap_interval(
                        nats / ONE_NAT,
                        byte_counts,
                        settings.bootstrap_samples,
                        f"{settings.seed}\0bands\0{longer_than}\0{band}",
                    ),
                )
            )
    return rows


def band_table(report: BandReport) -> RenderableType:
    """The bands for a terminal, models side by side, or one line that says why there are none."""
    if not report.rows:
        return Text(
            f"No position bands: no document has more than {report.edges[0]:,} tokens "
            f"(the longest has {report.longest:,})"
        )
    table = Table(title="Bits per byte by position in long documents", title_justify="left")
    table.add_column("documents of more than")
    for name in ("slots", "documents", "bytes", *report.models):
        table.add_column(name, justify="right")
    for row in report.rows:
        if row.model != report.models[0]:
            continue
        place = (row.longer_than, row.start)
        scored = [other for other in report.rows if (other.longer_than, other.start) == place]
        table.add_row(
            f"{row.longer_than:,} tokens" if row.start == 0 else "",
            f"{row.start:,} to {row.stop:,}",
            f"{row.documents:,}",
            f"{row.bytes:,}",
            *(f"{other.bits_per_byte:.4f} ({format_interval(other.interval)})" for other in scored),
            end_section=row.start == row.longer_than,  # the group's last band
        )
    table.caption = "In brackets: 95 % interval over documents"
    table.caption_justify = "left"
    return table
