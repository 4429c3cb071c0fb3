"""What a run and its resumes say of what was chosen for the machine: the micro-batch, and engines."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from dwslm.cli import build as build_command
from dwslm.cli.build import build
from dwslm.cli.engines import engines
from dwslm.cli.find import REPOSITORY
from dwslm.cli.launch import launch
from dwslm.cli.receipts import make_receipt, other_engines
from dwslm.config import RunConfig, to_plain
from dwslm.data.mixture import MixtureSettings
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import events
from dwslm.train import checkpoint as checkpoints
from dwslm.train.loop import Position
from tests.train.tiny_run import tiny_config


def config_of(data: Path, runs: Path, steps: int, micro_batch_tokens: int | str) -> RunConfig:
    """Steps of 256 tokens of one mixture throughout, so that the plan may grow."""
    config = tiny_config(data, runs, micro_batch_tokens=micro_batch_tokens, tokens=steps * 256)
    config.data = replace(config.data, mixture=MixtureSettings())
    return config


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory) -> RunFolder:
    """4 steps of 256 tokens; a CPU does them whole."""
    runs = tmp_path_factory.mktemp("runs")
    launch(config_of(tiny_data, runs, 4, "auto"), [])
    return open_run("latest", runs)


def resumed(run: RunFolder, steps: int, asked: int | str | None = None) -> dict[str, str]:
    """The receipt of a resume with a longer plan, and another micro-batch where one is asked for."""
    config = config_of(Path(run.record["config"]["data"]["path"]), run.path.parent, steps, asked or 128)
    more = [f"train.micro_batch_tokens={asked}"] if asked else []
    launch(replace(config, resume="latest"), ["resume=latest", f"train.tokens={steps * 256}", *more])
    return [event["receipt"] for event in events(run) if event["event"] == "resume"][-1]


def test_the_run_keeps_what_was_asked_and_what_came_of_it(run):
    assert run.record["config"]["train"]["micro_batch_tokens"] == "auto" and run.record["micro_batch_tokens"] == 256
    found, _ = checkpoints.newest_good(run.checkpoints)
    assert found is not None
    assert found.state["micro_batch_tokens"] == 256 and found.state["config"]["train"]["micro_batch_tokens"] == "auto"


def test_the_document_names_all_that_run_json_and_events_hold(run):
    resumed(run, 5)
    told = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    of_run = told.partition("`run.json`: ")[2].partition("\n\n")[0]
    assert [name for name in run.record if f"`{name}`" not in of_run] == []
    of_all = told.partition("Every row has ")[2].partition(".")[0]
    of_events = told.partition("\n| events |")[2].partition("\n")[0]
    rows = events(run)
    assert {"start", "resume", "checkpoint", "score", "done"} <= {row["event"] for row in rows}
    for row in rows:
        own = of_events.partition(f"`{row['event']}`")[2].partition("); `")[0]
        given = [name for name in row if name not in ("event", "writer") and f"`{name}`" not in of_all]
        assert [name for name in given if f"`{name}`" not in own] == [], row["event"]


def test_a_resume_says_where_it_is_another(run):
    assert "micro-batch" not in resumed(run, 5)
    assert resumed(run, 6, 64)["micro-batch"].startswith("256 tokens before, 64 now: sums are")
    assert "micro-batch" not in resumed(run, 7)  # it has stayed with 64
    assert resumed(run, 8, "auto")["micro-batch"].startswith("64 tokens before, 256 now")


def test_engines_are_kept_of_each_start_and_a_resume_says_where_they_are_others(run, monkeypatch):
    assert run.record["engines"] == engines(tiny_config(Path(), Path()).model, torch.device("cpu"), 256)
    assert "engines" not in resumed(run, 9)
    monkeypatch.setattr(
        build_command, "engines", lambda *about: engines(*about) | {"delta rule": "fla", "head": "fused"}
    )
    told = resumed(run, 10)["engines"]
    assert told.startswith("delta rule torch before, fla now; head torch before, fused now: sums are grouped otherwise")
    assert "engines" not in resumed(run, 11)  # it has stayed with them
    monkeypatch.undo()
    assert resumed(run, 12)["engines"].startswith("delta rule fla before, torch now; head fused before, torch now")
    resumes = [event for event in events(run) if event["event"] == "resume"][-4:]
    assert [event["engines"]["head"] for event in resumes] == ["torch", "fused", "fused", "torch"]
    for event in resumes:
        assert event["versions"] == run.record["versions"] and event["versions"]["torch"] == version("torch")
        assert event["commit"] == run.record["commit"]


def test_a_run_from_before_engines_were_kept_says_nothing_of_them(run, tmp_path):
    config = config_of(Path(run.record["config"]["data"]["path"]), run.path.parent, 4, 64)
    old = RunFolder(tmp_path, {name: value for name, value in run.record.items() if name != "engines"})
    assert other_engines(old, build(config, lr=None)) == ""


def test_a_checkpoint_of_before_tells_by_its_configuration(run):
    """Its state does not hold the number, which could be no other than the setting."""
    config = config_of(Path(run.record["config"]["data"]["path"]), run.path.parent, 4, 64)
    found, _ = checkpoints.newest_good(run.checkpoints)
    assert found is not None
    state = {name: value for name, value in found.state.items() if name != "micro_batch_tokens"}
    state["config"] = to_plain(config_of(Path(), Path(), 4, 128))
    receipt = make_receipt(config, build(config, lr=None), run, found, state, Position(), "size", 0)
    assert receipt["micro-batch"].startswith("128 tokens before, 64 now")
