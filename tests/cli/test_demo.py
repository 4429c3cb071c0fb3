"""How the demo ends: with the way to its page."""

import sys
from pathlib import Path
from types import SimpleNamespace

from dwslm.cli import demo
from dwslm.cli.demo import REPOSITORY, how_to_look
from dwslm.cli.errors import make_console


def test_the_way_to_the_page_can_be_typed_where_the_reader_is(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(REPOSITORY / ".venv" / "bin" / "python"))
    here = "\n".join(how_to_look("20261129-1-demo-abc", REPOSITORY))
    assert ".venv/bin/dwslm page serve\n" in here
    assert "http://127.0.0.1:8250/#run=20261129-1-demo-abc" in here
    elsewhere = "\n".join(how_to_look("x", tmp_path))
    assert f"{REPOSITORY}/.venv/bin/dwslm page serve --runs {REPOSITORY}/runs" in elsewhere
    assert Path(REPOSITORY, "train.py").exists()


def test_the_kill_names_the_report_after_which_it_came(monkeypatch, capsys):
    """The checkpoint that the resume starts from may be a later one."""
    process = SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda: None)
    monkeypatch.setattr(demo.subprocess, "Popen", lambda *_, **__: process)
    monkeypatch.setattr(demo, "run_since", lambda _: SimpleNamespace(path=Path("runs/x")))
    monkeypatch.setattr(demo, "killable_step", lambda _: 40)
    assert demo.train_and_kill([], make_console()) == "x"
    assert "kill -9 after its report of step 40" in capsys.readouterr().out
