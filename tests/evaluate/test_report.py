"""Intervals against cases with a known answer; reports as JSON and as text."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from dwslm.evaluate.report import (
    DOCUMENT_DTYPE,
    ONE_NAT,
    Report,
    Scores,
    bootstrap_interval,
    make_report,
    tables,
)

LN2 = math.log(2)


def make_scores(rows, sources=("books", "[code]"), languages=("en", "fr"), available=None):
    """`rows` of (source, language, tokens, bytes, nats_fixed)."""
    documents = np.array([(i, *row) for i, row in enumerate(rows)], dtype=DOCUMENT_DTYPE)
    return Scores(documents, list(sources), list(languages), 512, "f00d", available or len(rows))


def test_interval_of_two_equal_documents():
    # Two documents of one byte, of 1 and 3 bits. Drawn anew they give 1, 2, 2 or 3 bits per byte, each in a
    # quarter of the rounds: the 2.5 % and 97.5 % points are 1 and 3.
    low, high = bootstrap_interval(np.array([1, 3]) * LN2, np.array([1, 1]), samples=400, key="k")
    assert (low, high) == (pytest.approx(1), pytest.approx(3))


def test_interval_divides_sums():
    # 0 bits in 1 byte and 6 bits in 3 bytes give 0, 6/4 or 2 bits per byte; a mean of means would give 1 and
    # not 6/4.
    nats, byte_counts = np.array([0, 6]) * LN2, np.array([1, 3])
    seen = {
        round(bootstrap_interval(nats, byte_counts, samples=1, key=str(k))[0], 9) for k in range(40)
    }  # one round a key: both ends are its value
    assert seen == {0, 1.5, 2}


def test_interval_of_many_documents_is_the_normal_one():
    # Equal bytes, independent documents: the mean's standard error is s / sqrt(n), its 95 % +- 1.96 of that.
    rng = np.random.default_rng(1)
    nats = rng.normal(2000, 300, size=1500)
    low, high = bootstrap_interval(nats, np.full(1500, 1000), samples=4000, key="k")
    mean, error = nats.mean() / 1000 / LN2, nats.std() / math.sqrt(1500) / 1000 / LN2
    assert low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_interval_covers_the_truth():
    # Of 200 data sets from one source of 2 bits per byte, 95 % of the intervals should hold 2, +- 3 sigma.
    rng = np.random.default_rng(2)
    held = 0
    for data_set in range(200):
        byte_counts = rng.integers(100, 1000, size=100)
        nats = byte_counts * (2 * LN2) + rng.normal(0, 50, size=100)
        low, high = bootstrap_interval(nats, byte_counts, samples=300, key=str(data_set))
        held += low <= 2 <= high
    assert 178 <= held <= 199


def test_interval_depends_on_its_slice_and_seed_alone():
    rows = [(n % 2, 0, 10, 1000 + n, (700 + 13 * n % 50) * ONE_NAT) for n in range(40)]
    both = make_report(make_scores(rows), samples=100, seed=5)
    alone = make_report(make_scores([row for row in rows if row[0] == 0]), samples=100, seed=5)
    other_seed = make_report(make_scores(rows), samples=100, seed=6)
    assert both.by_source[0].interval == alone.by_source[0].interval
    assert both.by_source[0].interval != other_seed.by_source[0].interval
    assert both.by_source[0].nats_fixed == other_seed.by_source[0].nats_fixed


def test_one_document_has_no_interval():
    assert bootstrap_interval(np.array([1.0]), np.array([1]), samples=10, key="k") is None


def test_json_keeps_integers_exactly():
    odd = 2**61 + 1  # no double holds it
    rows = [(0, 0, 7, 30_000, odd), (0, 1, 8, 10, odd + 2), (1, 1, 9, 40_000, odd + 4)]
    report = make_report(make_scores(rows, available=5), samples=50, seed=0)
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert Report.from_dict(json.loads(text)) == report
    assert json.loads(text)["overall"]["nats_fixed"] == 3 * odd + 6  # beyond int64 as well
    french = json.loads(text)["crossed"][1]
    assert (french["source"], french["language"], french["small"]) == ("books", "fr", True)
    assert french["bits_per_byte"] == report.crossed[1].bits_per_byte


def test_slices_under_20_kb_are_small():
    rows = [(0, 0, 7, 19_999, ONE_NAT), (1, 0, 7, 20_000, ONE_NAT)]
    report = make_report(make_scores(rows), samples=5, seed=0)
    assert [row.small for row in report.by_source] == [True, False]
    assert not report.overall.small


def test_tables_as_plain_text():
    # 30,000 bytes at 2 bits; 100 bytes at 1 bit.
    rows = [
        (0, 0, 9000, 30_000, round(2 * LN2 * 30_000 * ONE_NAT)),
        (1, 1, 50, 100, round(LN2 * 100 * ONE_NAT)),
    ]
    report = make_report(make_scores(rows, available=7), samples=5, seed=0)
    out = io.StringIO()
    Console(file=out, width=120).print(tables(report))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert any("books" in line and "2.0000" in line and "30,000" in line and "9,000" in line for line in lines)
    assert any("[code]" in line and "fr" in line and "1.0000 *" in line for line in lines)
    assert any("* less than 20 kB of text" in line for line in lines)
    assert any("scored 2 of 7 documents" in line for line in lines)
    out = io.StringIO()
    Console(file=out, width=120).print(tables(report, crossed=False))
    assert "By source and language" not in out.getvalue() and "By language" in out.getvalue()
