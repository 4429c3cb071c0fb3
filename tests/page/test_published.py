"""The decision that the project publishes with its runs, and the page that it makes of them."""

import re
import shutil
from pathlib import Path

import pytest

from dwslm.page.export import export
from dwslm.runs.decisions import check, load
from dwslm.runs.folder import list_runs

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture
def runs(tmp_path):
    """A copy: readers keep a cache beside the runs."""
    return shutil.copytree(RESULTS / "proxy-cpu" / "runs", tmp_path / "runs")


def test_every_figure_is_its_runs(runs):
    (decision,) = load(RESULTS / "proxy-cpu" / "decisions.toml")
    assert check(decision, runs) == []
    assert len(decision.figures) == 6 and decision.winner and len(decision.runs) == len(list_runs(runs)[0]) == 4


def test_the_page_shows_the_decision_and_its_runs(runs, tmp_path):
    done = export(runs, tmp_path / "page", RESULTS / "proxy-cpu" / "decisions.toml", now=1.8e9)
    index = done.index.read_text(encoding="utf-8")
    assert done.runs == 4 and "0.03 for runs of this length" in index
    assert "Verdict: lr=0.03 is better by tokens and by hours." in index


def test_the_printed_table_is_that_of_the_runs(runs):
    """Of docs/results/proxy-cpu.md, against the last overall score of each run."""
    from dwslm.runs.figures import value

    found: dict[str, list[str]] = {}
    for run in reversed(list_runs(runs)[0]):
        found.setdefault(run.arm, []).append(f"{value(run, 'bits_per_byte'):.4f}")
    text = (RESULTS / "proxy-cpu.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[1:3]
        for line in text.splitlines()
        if (cells := re.findall(r"[\w.=]+", line))[:1] and "=" in cells[0]
    }
    assert {arm: rows[arm] for arm in found} == found and len(found) == 2
