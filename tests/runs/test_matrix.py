"""Cases of the fault matrix that no other test has, once each; `python -m tests.runs.matrix` counts them all."""

import random

import pytest

from tests.runs import matrix


@pytest.mark.parametrize(
    "case", [matrix.double_start, matrix.crash_loop, matrix.torn, matrix.killed_writer, matrix.names]
)
def test_nothing_is_lost(case, tmp_path):
    faults, _ = case(tmp_path, random.Random(0))
    assert faults >= 1


def test_what_is_lost_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "metrics", lambda folder: [])
    row, lost = matrix.run_case(12, "torn tails", matrix.torn, 2, tmp_path, 0)
    assert lost == 2 and row.startswith("| 12 | torn tails | 2 | 2 | 0 | AssertionError")
