"""Scoring documents: every text token of every document, once, given as much of its document as a row holds.

A document is cut into pieces of `context - 1` tokens, the last one shorter, and each piece is a segment
`[eod, t1 .. tn]` as in training: its first token is predicted from eod, and nothing carries over from the
piece before. Only text tokens count. The closing eod has no bytes, so its nats are dropped as well.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dwslm.data.batch import IGNORE, Batch, assemble
from dwslm.data.fill import best_fit
from dwslm.data.order import Pieces
from dwslm.data.shards import DOC_DTYPE, Dataset, token_dtype
from dwslm.data.tokenizer import token_bytes
from dwslm.evaluate.report import DOCUMENT_DTYPE, ONE_NAT, Scores, Slice, summarise

NatsFn = Callable[[Batch], np.ndarray]
"""Batch -> float32 [tokens], -ln p(target) at each position. Positions without a target are not read."""

Totals = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds up integers over the processes that score together."""

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all) after each batch."""

# No working model gives one token this; below it a piece of 2^15 tokens fits its int64 total.
MAX_NATS = 2.0**16


MOST = {"context": 2**20, "micro_batch_tokens": 2**20, "segments_per_row": 2**14, "bootstrap_samples": 1_000_000}
"""Of these settings: what memory is asked for grows with them, at the first scoring, which may be hours into a run."""


@dataclass
class EvalSettings:
    """How checkpoints are scored. What changes scores must stay the same for all that are compared."""

    context: int | None = None
    """Slots in a row, so the text that a token can be predicted from; None is the context of training. It
    changes scores."""

    micro_batch_tokens: int = 16_384
    """Slots in one forward pass, rounded down to whole rows, one row at least. It changes speed and memory
    only."""

    segments_per_row: int = 64
    """The most segments in a row, padding included. It changes speed only: short documents cost padding
    when it is small."""

    max_documents: int | None = None
    """Score only this many documents, those with the lowest hashes of their ids, so always the same; None
    is all of them. Reports say when documents were left out. Bands take as many of the long documents."""

    bootstrap_samples: int = 1000
    """Rounds of the bootstrap behind each 95 % interval."""

    seed: int = 0
    """Of the bootstrap's draws."""

    bands: list[int] = field(default_factory=lambda: [4_096, 16_384, 32_768])
    """Where position bands of long documents end, in slots; the last is the context they are scored at.
    Empty leaves the bands out."""

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 2:
            raise ValueError(f"evaluate context {self.context}: must be 2 or more, an eod and a token")
        if self.segments_per_row < 2:
            raise ValueError(f"evaluate segments_per_row {self.segments_per_row}: must be 2 or more, text and padding")
        for name in ("micro_batch_tokens", "max_documents", "bootstrap_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"evaluate {name} {value}: must be 1 or more")
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"evaluate {name} {value}: must be at most {most}")
        rising = all(low < high for low, high in zip([1, *self.bands], self.bands, strict=False))
        if len(self.bands) == 1 or not rising:
            raise ValueError(f"evaluate bands {list(self.bands)}: must be two or more rising positions, or empty")
        if self.bands and self.bands[-1] > MOST["context"]:
            raise ValueError(f"evaluate bands {list(self.bands)}: the last must be at most {MOST['context']}")


def score(
    nats_fn: NatsFn,
    dataset: Dataset,
    settings: EvalSettings,
    *,
    training_context: int,
    progress: Progress | None = None,
    rank: int = 0,
    world: int = 1,
    total: Totals = lambda numbers: numbers,
) -> Scores:
    """Total nats of each document.

    Of several processes each scores every `world`-th batch, from the `rank`-th on, and `total` adds up over them. Batches
    are the same whatever their number, so the totals are.

    The totals do not depend on how rows are filled or batches are cut, beyond what that changes in
    `nats_fn` itself: each token's nats are rounded to 2^-32 (exact for a float32 of 2^-9 or more) and
    integers are added.

    Raises ValueError if a token's nats are not finite, naming its document, and if the document table is
    not the one that the manifest describes.
    """
    check_totals(dataset)
    context = settings.context or training_context
    chosen = choose_documents(dataset.docs, np.arange(len(dataset.docs)), settings.max_documents)
    rows = fill_rows(cut_pieces(dataset.docs, chosen, context - 1), context, settings.segments_per_row)

    nats_fixed = np.zeros(len(dataset.docs), dtype=np.int64)
    tokens = np.zeros(len(dataset.docs), dtype=np.int64)
    segments, at_once = settings.segments_per_row, settings.micro_batch_tokens
    for batch in batches(dataset, rows, context, segments, at_once, progress, rank, world):
        fixed, text = text_nats(nats_fn, batch, dataset)
        used = batch.docs >= 0
        np.add.at(nats_fixed, batch.docs[used], segment_sums(fixed, batch)[used])
        np.add.at(tokens, batch.docs[used], segment_sums(text.astype(np.int64), batch)[used])
    nats_fixed, tokens = total(nats_fixed), total(tokens)
    expected = np.zeros_like(tokens)
    expected[chosen] = dataset.docs["tokens"][chosen]
    assert np.array_equal(tokens, expected), "not every text token was scored once"

    documents = np.zeros(len(chosen), dtype=DOCUMENT_DTYPE)
    documents["index"] = chosen
    documents["nats_fixed"] = nats_fixed[chosen]
    for name in ("source", "language", "tokens", "bytes"):
        documents[name] = dataset.docs[name][chosen]
    return Scores(
        documents,
        dataset.sources,
        dataset.languages,
        context,
        dataset.fingerprint,
        available=len(dataset.docs),
    )


def score_text(
    nats_fn: NatsFn,
    path: str | Path,
    tokenizer: Tokenizer,
    settings: EvalSettings,
    *,
    eod: int,
    training_context: int,
) -> Slice:
    """Bits per byte of a user's own file, taken as one document.

    Args:
        tokenizer: the model's own.
        eod: id of its end-of-document token.

    Raises FileNotFoundError if there is no such file, ValueError if it is empty, is not UTF-8, or the
    tokenizer does not give its bytes back.
    """
    scores = score(nats_fn, text_dataset(path, tokenizer, eod), settings, training_context=training_context)
    return summarise(scores.documents, str(path), None, samples=settings.bootstrap_samples, seed=settings.seed)


def text_dataset(path: str | Path, tokenizer: Tokenizer, eod: int) -> Dataset:
    """A text file as a dataset of one document, in memory. Raises as `score_text`."""
    path = Path(path)
    if not path.is_file():
        what = "a folder, not a file" if path.is_dir() else "no such file"
        raise FileNotFoundError(f"{path}: {what} to score")
    raw = path.read_bytes()
    if not raw:
        raise ValueError(f"{path} is empty: there is nothing to score")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): convert it before scoring it") from None
    lengths = token_bytes(tokenizer)
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=token_dtype(len(lengths)))
    if int(lengths[tokens].sum()) != len(raw):
        raise ValueError(
            f"{path}: its {len(raw)} bytes became tokens of {int(lengths[tokens].sum())} bytes; "
            "this tokenizer does not keep text as it is, so bits per byte can't be given"
        )
    counts = {"documents": 1, "tokens": len(tokens), "bytes": len(raw)}
    manifest: dict[str, Any] = {
        "sources": [str(path)],
        "languages": [""],
        "vocab_size": len(lengths),
        "eod": eod,
        "tokenizer_hash": "",
        "slices": [{"source": str(path), "language": "", **counts}],
        "shards": [counts],
    }
    docs = np.array([(0, len(tokens), len(raw), 0, 0, 0)], dtype=DOC_DTYPE)
    return Dataset(path, manifest, hashlib.sha256(raw).hexdigest(), docs, [tokens])


def check_totals(dataset: Dataset) -> None:
    """The document table must add up, slice by slice, to what the manifest says. Raises ValueError if not."""
    docs = dataset.docs
    stated = {(row["source"], row["language"]): (row["tokens"], row["bytes"]) for row in dataset.manifest["slices"]}
    slice_of = docs["source"].astype(np.int64) * len(dataset.languages) + docs["language"]
    found = {}
    for number in np.unique(slice_of):
        source, language = divmod(int(number), len(dataset.languages))
        rows = docs[slice_of == number]
        totals = (int(rows["tokens"].sum(dtype=np.int64)), int(rows["bytes"].sum(dtype=np.int64)))
        found[dataset.sources[source], dataset.languages[language]] = totals
    for source_name, language_name in sorted(stated.keys() | found.keys()):
        key = source_name, language_name
        if stated.get(key) != found.get(key):
            raise ValueError(
                f"{dataset.path}: source {source_name!r}, language {language_name!r} has (tokens, bytes) "
                f"{found.get(key)} in the document table, {stated.get(key)} in the manifest; prepare it again"
            )


def choose_documents(docs: np.ndarray, candidates: NDArray[np.int64], max_documents: int | None) -> NDArray[np.int64]:
    """The candidates with the lowest id hashes, at most `max_documents`, in dataset order."""
    if max_documents is None or len(candidates) <= max_documents:
        return candidates
    lowest = np.argsort(docs["id_hash"][candidates], kind="stable")[:max_documents]
    return np.sort(candidates[lowest])


def cut_pieces(docs: np.ndarray, chosen: NDArray[np.int64], longest: int) -> Pieces:
    """Each document from its first token on in pieces of `longest` text tokens, the last one shorter."""
    tokens = docs["tokens"][chosen].astype(np.int64)
    count = -(-tokens // longest)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    starts = number * longest
    return Pieces(np.repeat(chosen, count), starts, np.minimum(np.repeat(tokens, count) - starts, longest))


def fill_rows(pieces: Pieces, context: int, segments_per_row: int) -> list[Pieces]:
    """All pieces in rows, by best fit; nothing is left over."""
    row_of, rows = best_fit(pieces.lengths + 1, context, segments_per_row)
    order = np.argsort(row_of, kind="stable")
    bounds = np.searchsorted(row_of[order], np.arange(rows + 1))
    in_order = pieces[order]
    return [in_order[slice(*bound)] for bound in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def batches(
    dataset: Dataset,
    rows: Sequence[Pieces],
    context: int,
    segments_per_row: int,
    micro_batch_tokens: int,
    progress: Progress | None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """The rows in batches of one shape, so that a model is compiled once: empty rows fill up the last. Every `world`-th."""
    none = np.empty(0, dtype=np.int64)
    at_once = max(1, micro_batch_tokens // context)
    for first in range(rank * at_once, len(rows), world * at_once):
        taken = list(rows[first : first + at_once])
        taken += [Pieces(none, none, none)] * (at_once - len(taken))
        yield assemble(dataset, taken, context, segments_per_row)
        if progress is not None:
            progress(min(first + at_once, len(rows)), len(rows))


def text_nats(nats_fn: NatsFn, batch: Batch, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Nats of the text tokens in units of 2^-32, int64 [tokens], 0 elsewhere; and where they are predicted.

    Raises ValueError for nats that are not finite, or of MAX_NATS or more.
    """
    text = batch.targets != IGNORE
    text[batch.cu_seqlens[1:][batch.docs >= 0] - 1] = False  # a segment's last slot predicts eod, or nothing
    nats = nats_fn(batch)
    assert nats.shape == text.shape and nats.dtype == np.float32, (nats.shape, nats.dtype)
    bad = text & ~(np.abs(nats) < MAX_NATS)  # "not below" is true of nan as well
    if bad.any():
        slot = int(np.argmax(bad))
        segment = int(np.searchsorted(batch.cu_seqlens, slot, side="right")) - 1
        doc, token = int(batch.docs[segment]), int(batch.starts[segment] + slot - batch.cu_seqlens[segment])
        source = dataset.sources[dataset.docs["source"][doc]]
        raise ValueError(
            f"document {doc} of {dataset.path} (source {source!r}): the model gives its token {token} "
            f"{float(nats[slot])} nats, so it has no score; find where its weights stopped being finite"
        )
    fixed = np.rint(np.where(text, nats, 0).astype(np.float64) * ONE_NAT).astype(np.int64)
    return fixed, text


def segment_sums(values: NDArray[np.int64], batch: Batch) -> NDArray[np.int64]:
    """Sum of [tokens] values over each segment, int64 [slots]; exact, as integers are."""
    before = np.concatenate([[0], np.cumsum(values)])
    return before[batch.cu_seqlens[1:]] - before[batch.cu_seqlens[:-1]]
