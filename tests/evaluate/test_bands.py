"""Bands on models whose nats follow from the position."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from dwslm.evaluate.bands import BandReport, band_table, score_bands
from dwslm.evaluate.bits_per_byte import EvalSettings

EOD = 15
TOKEN_BYTES = np.array([1, 2, 3] + [1] * 12 + [0], dtype=np.int32)
BANDS = EvalSettings(bands=[4, 16, 32], micro_batch_tokens=64)


def by_position(batch):
    """1 nat before slot 4 of a segment, 0.5 before slot 16, then 0.25; 99 for eod; NaN without a target."""
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    slot = np.arange(len(batch.tokens)) - starts
    nats = np.select([slot < 4, slot < 16], [1.0, 0.5], 0.25)
    nats = np.where(batch.targets == EOD, 99.0, nats)
    return np.where(batch.targets == -100, np.nan, nats).astype(np.float32)


def doubled(batch):
    return 2 * by_position(batch)


def test_bands_of_a_position_dependent_model(make_dataset, make_doc):
    # Tokens 1 have 2 bytes, tokens 2 have 3. Rows have 32 slots, so 31 text tokens after the opening eod.
    #   4 tokens: reaches no second band; left out
    #   10 tokens of 2 bytes: slots 0-3 and 4-9
    #   40 tokens of 3 bytes: slots 0-3, 4-15 and 16-30, its other 9 tokens left out
    #   16 tokens of 2 bytes: ends with band 4-16, so it is not in the group of 16-32
    #   17 tokens of 2 bytes: one token in band 16-32
    lengths = [(4, 1), (10, 1), (40, 2), (16, 1), (17, 1)]
    dataset = make_dataset([make_doc("web", "en", [token] * n, n * token + n) for n, token in lengths])
    report = score_bands({"plain": by_position, "yarn": doubled}, dataset, TOKEN_BYTES, BANDS)

    found = {
        (row.longer_than, row.start, row.stop): (row.nats_fixed / 2**32, row.bytes, row.tokens, row.documents)
        for row in report.rows
        if row.model == "plain"
    }
    assert found == {
        # documents of 10, 40, 16 and 17: 4 tokens each; then 6, 12, 12 and 12
        (4, 0, 4): (16.0, 3 * 4 * 2 + 4 * 3, 16, 4),
        (4, 4, 16): (21.0, (6 + 12 + 12) * 2 + 12 * 3, 42, 4),
        # documents of 40 and 17
        (16, 0, 4): (8.0, 4 * 3 + 4 * 2, 8, 2),
        (16, 4, 16): (12.0, 12 * 3 + 12 * 2, 24, 2),
        (16, 16, 32): (4.0, 15 * 3 + 1 * 2, 16, 2),
    }
    last = [row for row in report.rows if row.stop == 32]
    assert [row.model for row in last] == ["plain", "yarn"]
    assert last[0].bits_per_byte == pytest.approx(4 / (47 * math.log(2)))
    assert last[1].nats_fixed == 2 * last[0].nats_fixed
    assert last[1].interval == pytest.approx([2 * end for end in last[0].interval])
    assert report.longest == 40


def test_rows_hold_one_document_each_at_the_last_edge(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * 5, 10)] * 3)
    shapes = []

    def model(batch):
        shapes.append((batch.context, batch.tokens.shape, batch.segments))
        return by_position(batch)

    score_bands({"plain": model}, dataset, TOKEN_BYTES, BANDS)
    assert shapes == [(32, (64,), 2), (32, (64,), 1)]


def test_max_documents_is_taken_from_the_long_ones(make_dataset, make_doc):
    lengths = [6, 7, 8, 2, 2]  # the fixture's hashes fall with the number: the two short ones have the lowest
    dataset = make_dataset([make_doc("web", "en", [1] * n, 2 * n) for n in lengths])
    options = EvalSettings(bands=[4, 16], max_documents=2)
    rows = score_bands({"plain": by_position}, dataset, TOKEN_BYTES, options).rows
    assert [(row.documents, row.tokens) for row in rows] == [(2, 8), (2, (7 - 4) + (8 - 4))]


def render(report):
    out = io.StringIO()
    Console(file=out, width=140).print(band_table(report))
    return out.getvalue()


def test_table_and_json(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * n, 2 * n) for n in (20, 30)])
    report = score_bands({"plain": by_position, "yarn": doubled}, dataset, TOKEN_BYTES, BANDS)
    assert BandReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    text = render(report)
    # 0.25 nats in 2 bytes: 0.1803 bits a byte at any document, and twice that
    row = next(line for line in text.splitlines() if "16 to 32" in line)
    assert "0.1803 (0.1803 to 0.1803)" in row and "0.3607" in row
    assert "plain" in text and "yarn" in text


def test_no_document_is_long_enough(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * 4, 8)])

    def never(batch):
        raise AssertionError("there is nothing to run a model on")

    report = score_bands({"plain": never}, dataset, TOKEN_BYTES, BANDS)
    assert report.rows == []
    assert render(report).strip() == ("No position bands: no document has more than 4 tokens (the longest has 4)")
    assert BandReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_band_that_no_document_reaches_is_left_out(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * 9, 18)])
    report = score_bands({"plain": by_position}, dataset, TOKEN_BYTES, BANDS)
    assert [(row.longer_than, row.start) for row in report.rows] == [(4, 0), (4, 4)]


def test_nats_that_are_not_finite_name_the_document(make_dataset, make_doc):
    dataset = make_dataset([make_doc("web", "en", [1] * 3, 6), make_doc("books", "en", [1] * 9, 18)])
    with pytest.raises(ValueError, match=r"document 1 of held-out \(source 'books'\).*nan"):
        score_bands({"plain": lambda batch: by_position(batch) * np.nan}, dataset, TOKEN_BYTES, BANDS)
