"""A new run from the weights of another."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest

from dwslm.cli.launch import launch
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import metrics
from dwslm.train import checkpoint as checkpoints
from tests.train.tiny_run import STEPS, in_child, tiny_config


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    launch(tiny_config(tiny_data, root), [])
    return open_run("latest", root)


def test_init_from_takes_the_weights_alone(tiny_data, tmp_path, run):
    config = replace(tiny_config(tiny_data, tmp_path, tokens=256), init_from=str(run.checkpoints / f"step-{STEPS:08d}"))
    launch(config, [])
    new = open_run("latest", tmp_path)
    # One step from trained weights starts far below the loss of fresh ones.
    assert metrics(new)[0]["loss"] < metrics(run)[0]["loss"] - 0.3
    assert int(checkpoints.newest_good(new.checkpoints)[0].load_optimizer()["step"]) == 1


def test_weights_of_another_tokenizer_are_refused(tiny_data, tmp_path, run):
    """Its vocabulary may well have as many entries."""
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    tokenizer = (other / "tokenizer.json").read_bytes() + b"\n"
    (other / "tokenizer.json").write_bytes(tokenizer)
    for split in ("train", "valid"):
        manifest = other / split / "manifest.json"
        told = json.loads(manifest.read_text()) | {"tokenizer_hash": hashlib.sha256(tokenizer).hexdigest()}
        manifest.write_text(json.dumps(told))
    runs = tmp_path / "runs"
    config = tiny_config(other, runs)
    at = str(run.checkpoints / f"step-{STEPS:08d}")
    with pytest.raises(
        ValueError, match="was trained with another tokenizer than .*: prepare the text with that run's"
    ):
        launch(replace(config, init_from=at), [])
    assert not runs.exists()


def test_a_run_from_given_weights_that_is_killed_before_its_first_save_still_has_them(tiny_data, tmp_path, run):
    config = replace(tiny_config(tiny_data, tmp_path, tokens=512), init_from=str(run.checkpoints / f"step-{STEPS:08d}"))
    begun = in_child(config, [], lambda seconds: any(tmp_path.glob("2*/run.json")))
    new = open_run("latest", tmp_path)
    assert begun is None
    shutil.rmtree(new.checkpoints, ignore_errors=True)  # as if the kill had come before the save
    launch(replace(config, init_from=None, resume="latest"), ["resume=latest"])
    assert metrics(new)[0]["loss"] < metrics(run)[0]["loss"] - 0.3


def test_a_checkpoint_of_another_shape_is_named_tensor_by_tensor(tiny_data, tmp_path, run):
    config = replace(tiny_config(tiny_data, tmp_path), init_from=str(run.checkpoints / f"step-{STEPS:08d}"))
    config.model = replace(config.model, mlp_hidden=128)
    with pytest.raises(ValueError, match=r"of another model: layers\.0\.mlp\.up\.weight has shape \[64, 32\]"):
        launch(config, [])
    assert not list(tmp_path.iterdir())
