"""Attempts laid over each other, hours, means, and the points of a curve, against the plain reader and by hand."""

import math
from statistics import fmean

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dwslm.page.history import MEAN_OF, Reports, pick, trailing_mean
from dwslm.runs import reader
from dwslm.runs.durable import to_json
from dwslm.runs.figures import hours
from dwslm.runs.folder import RunFolder

ROWS = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1.0, 2.5, math.nan, math.inf])), max_size=8)
ATTEMPTS = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 12)), st.one_of(st.none(), ROWS)), max_size=4)


@given(ATTEMPTS, st.sampled_from([0, 32]))
def test_what_stands_is_what_the_plain_reader_says(tmp_path_factory, attempts, begun):
    run = tmp_path_factory.mktemp("run")
    resumes = {}
    for n, (resume, rows) in enumerate(attempts, 1):
        if resume is not None:
            resumes[n] = resume
            (run / f"events-trainer-{n}.jsonl").write_text(to_json({"event": "resume", "step": resume}) + "\n")
        if rows is not None:
            text = "".join(
                to_json({"attempt": n, "step": s, "tokens": 8 * s, "loss": v, "tokens_per_second": v}) + "\n"
                for s, v in rows
            )
            (run / f"metrics-{n}.jsonl").write_text(text)
    (run / "events-trainer-0.jsonl").write_text(to_json({"event": "start", "step": begun // 8, "tokens": begun}) + "\n")
    found, wanted = Reports(run).read(resumes, (begun // 8, begun)), reader.metrics(run)
    for name in ("step", "attempt", "tokens", "loss"):
        np.testing.assert_array_equal(found[name], np.array([row[name] for row in wanted], float))
    np.testing.assert_allclose(found["hours"], hours(RunFolder(run, {}), wanted), rtol=1e-12)
    every = reader.metrics(run, superseded=True)
    assert found.superseded == sum(row["superseded"] for row in every)
    assert len(found) == len(wanted)


def test_mean_of_the_last_twenty_reports():
    values = np.array([1e6 + i * 0.1 for i in range(50)])
    values[30] = math.nan
    found = trailing_mean(values)
    for i in range(50):
        window = [v for v in values[max(0, i + 1 - MEAN_OF) : i + 1].tolist() if math.isfinite(v)]
        assert math.isclose(found[i], fmean(window), rel_tol=1e-12)
    assert np.isnan(trailing_mean(np.array([math.nan, math.inf]))).all()
    assert len(trailing_mean(np.empty(0))) == 0


@given(st.integers(1, 5000), st.integers(0, 2**31))
def test_points_are_few_and_hold_every_extreme(n, seed):
    draw = np.random.default_rng(seed)
    series = [draw.normal(size=n), np.where(draw.random(n) < 0.01, np.nan, draw.normal(size=n))]
    limit = 400
    at = pick(series, limit)
    assert len(at) <= limit * 1.6  # extremes, and a mark for gaps where there are some
    assert at[0] == 0 and at[-1] == n - 1 and (np.diff(at) > 0).all()
    for values in series:
        if np.isfinite(values).any():
            assert np.nanargmin(values) in at and np.nanargmax(values) in at


def test_a_single_spike_among_tens_of_thousands_is_drawn():
    values = np.zeros(44_000)
    values[31_337] = 9.0
    assert 31_337 in pick([values], 500)


def test_parts_of_the_step_are_found(tmp_path):
    row = {"attempt": 1, "step": 1, "tokens": 8, "loss": 1.0, "data_seconds": 0.25, "wait_seconds": 0.5}
    (tmp_path / "metrics-1.jsonl").write_text(to_json(row) + "\n")
    history = Reports(tmp_path).read({})
    assert history.parts == ("data_seconds", "wait_seconds")
    assert history["data_seconds"].tolist() == [0.25]
