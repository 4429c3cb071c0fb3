"""Scoring from the entry point's side, as its user's terminal sees it."""

import io

import pytest
from rich.console import Console

from dwslm.cli import score as score_command
from dwslm.cli.launch import launch
from dwslm.config import ScoreConfig
from dwslm.runs.folder import RunFolder, open_run
from tests.train.tiny_run import tiny_config

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory) -> RunFolder:
    runs = tmp_path_factory.mktemp("runs")
    launch(tiny_config(tiny_data, runs), [])
    return open_run("latest", runs)


@pytest.mark.parametrize("end", ["last batch", "last batch of another rank", "error"])
def test_the_cursor_comes_back_however_scoring_ends(run, monkeypatch, end):
    out = io.StringIO()
    monkeypatch.setattr(
        score_command, "rank_console", lambda ranks: Console(file=out, force_terminal=True, _environ={"TERM": "xterm"})
    )
    real = score_command.score

    def scored(*args, progress, **about):
        def share(done, total):
            if end == "error":
                progress(0, total)
                raise ValueError("not finite")
            progress(done if end == "last batch" else min(done, total - 1), total)

        return real(*args, progress=share, **about)

    monkeypatch.setattr(score_command, "score", scored)
    config = ScoreConfig(checkpoint=run.path.name, runs_dir=str(run.path.parent), device="cpu")
    config.evaluate.bootstrap_samples = 10
    if end == "error":
        with pytest.raises(ValueError, match="not finite"):
            score_command.score_checkpoint(config, [])
    else:
        score_command.score_checkpoint(config, [])
        assert "Held-out bits per byte" in out.getvalue()
    assert out.getvalue().count(HIDE) == out.getvalue().count(SHOW) == 1
