"""How the demo ends: with the way to its page."""

import sys
from pathlib import Path

from dwslm.cli.demo import REPOSITORY, how_to_look


def test_the_way_to_the_page_can_be_typed_where_the_reader_is(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(REPOSITORY / ".venv" / "bin" / "python"))
    here = "\n".join(how_to_look("20261129-1-demo-abc", REPOSITORY))
    assert ".venv/bin/dwslm page serve\n" in here
    assert "http://127.0.0.1:8250/#run=20261129-1-demo-abc" in here
    elsewhere = "\n".join(how_to_look("x", tmp_path))
    assert f"{REPOSITORY}/.venv/bin/dwslm page serve --runs {REPOSITORY}/runs" in elsewhere
    assert Path(REPOSITORY, "train.py").exists()
