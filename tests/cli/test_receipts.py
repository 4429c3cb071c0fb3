"""What a run and its resumes say of a micro-batch that was chosen for the machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from dwslm.cli.build import build
from dwslm.cli.launch import launch
from dwslm.cli.receipts import make_receipt
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


def test_a_resume_says_where_it_is_another(run):
    assert "micro-batch" not in resumed(run, 5)
    assert resumed(run, 6, 64)["micro-batch"].startswith("256 tokens before, 64 now: sums are")
    assert "micro-batch" not in resumed(run, 7)  # it has stayed with 64
    assert resumed(run, 8, "auto")["micro-batch"].startswith("64 tokens before, 256 now")


def test_a_checkpoint_of_before_tells_by_its_configuration(run):
    """Its state does not hold the number, which could be no other than the setting."""
    config = config_of(Path(run.record["config"]["data"]["path"]), run.path.parent, 4, 64)
    found, _ = checkpoints.newest_good(run.checkpoints)
    assert found is not None
    state = {name: value for name, value in found.state.items() if name != "micro_batch_tokens"}
    state["config"] = to_plain(config_of(Path(), Path(), 4, 128))
    receipt = make_receipt(config, build(config, lr=None), run, found, state, Position(), "size", 0)
    assert receipt["micro-batch"].startswith("128 tokens before, 64 now")
