"""The everyday jobs from the entry points' side, and every mistake that shows only once things are built."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from dwslm.cli import receipts
from dwslm.cli.find import REPOSITORY
from dwslm.cli.launch import launch
from dwslm.cli.score import score_checkpoint
from dwslm.config import ScoreConfig
from dwslm.data.mixture import MixtureSettings
from dwslm.evaluate.spelling import SpellingSettings
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.reader import evals, events, metrics
from dwslm.runs.writer import RunWriter
from dwslm.train import checkpoint as checkpoints
from dwslm.train.signals import Preempted
from dwslm.train.step import TrainStep
from tests.train.tiny_run import STEPS, in_child, tiny_config


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory) -> RunFolder:
    runs = tmp_path_factory.mktemp("runs")
    launch(tiny_config(tiny_data, runs), [])
    return open_run("latest", runs)


def scoring(run: RunFolder, **changes) -> ScoreConfig:
    config = ScoreConfig(checkpoint=run.path.name, runs_dir=str(run.path.parent), device="cpu", **changes)
    config.evaluate.bootstrap_samples = 10
    return config


def test_run_json_says_what_the_run_is(run):
    record = run.record
    assert record["config"]["model"]["width"] == 32 and record["steps"] == STEPS and record["seed"] == 0
    assert len(record["config_hash"]) == 64 and record["versions"]["torch"] == version("torch")
    assert {row["rule"] for row in record["routing"]} == {"muonh", "adamh", "adam"}
    assert record["sizes"]["matrices"] > 0


def test_scores_of_slices_sum_to_the_whole_and_land_in_the_run(run, capsys):
    score_checkpoint(scoring(run, baselines=True), [])
    said = capsys.readouterr().out
    assert "xz -9" in said and "order-0 byte model" in said and "95 % interval" in said
    rows = [row for row in evals(run) if row["writer"] == "score"]
    whole = next(row for row in rows if row["slice"] == "overall")
    for kind in ("source", "language", "crossed"):
        for key in ("nats_fixed", "bytes", "text_tokens", "documents"):
            assert sum(row[key] for row in rows if row["slice"] == kind) == whole[key]
    in_training = next(row for row in evals(run) if row["step"] == STEPS and row["slice"] == "overall")
    same = ("nats_fixed", "bytes", "text_tokens", "step", "tokens", "context", "dataset")
    assert {key: whole[key] for key in same} == {key: in_training[key] for key in same}
    assert whole["tokens"] == STEPS * 256 and whole["text_tokens"] != whole["tokens"]


def test_a_step_or_the_best_can_be_scored_and_a_missing_one_is_named(run, capsys):
    score_checkpoint(replace(scoring(run), checkpoint=f"{run.id}@18"), [])
    assert "step 18" in capsys.readouterr().out
    score_checkpoint(replace(scoring(run), checkpoint=f"{run.id}@best"), [])
    with pytest.raises(ValueError, match="has checkpoints of steps 16, 18, 20, 24"):
        score_checkpoint(replace(scoring(run), checkpoint=f"{run.id}@3"), [])


def test_own_text_and_long_bands(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("words of my own", encoding="utf-8")
    score_checkpoint(scoring(run, text="mine.txt"), [])
    assert "mine.txt" in capsys.readouterr().out
    config = scoring(run, bands=True)
    config.evaluate.bands = [64, 128, 256]
    score_checkpoint(config, ["evaluate.bands=[64,128,256]"])
    said = capsys.readouterr().out
    assert "YaRN x4" in said and "as trained" in said
    bands = [row for row in evals(run) if row["slice"] == "band"]
    assert bands and all(row["tokens"] == STEPS * 256 and row["text_tokens"] > 0 for row in bands)
    with pytest.raises(ValueError, match="nosuch/valid is not a prepared dataset"):
        score_checkpoint(scoring(run, data="nosuch"), [])
    with pytest.raises(FileNotFoundError, match="no such file"):
        score_checkpoint(scoring(run, text=str(tmp_path / "nothing.txt")), [])


def test_a_dry_run_tells_all_and_leaves_nothing(tiny_data, tmp_path, capsys):
    launch(replace(tiny_config(tiny_data, tmp_path), dry_run=True), [])
    said = capsys.readouterr().out
    for part in ("Parameters by group", "Routing", "peak rate", "First micro-batch", "One step", "Memory estimate"):
        assert part in said
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_a_resume_trains_nothing(tiny_data, run, capsys):
    before = sorted(run.path.iterdir())
    launch(
        replace(tiny_config(tiny_data, run.path.parent), resume="latest", dry_run=True),
        ["resume=latest", "dry_run=true"],
    )
    said = capsys.readouterr().out
    assert "Memory estimate" in said and "done:" not in said
    assert sorted(run.path.iterdir()) == before


def test_what_a_resume_changes_outlives_a_kill_before_the_next_save(tiny_data, tmp_path):
    config = tiny_config(tiny_data, tmp_path, tokens=4 * 256)
    config.data.mixture = MixtureSettings()
    launch(config, [])
    run = open_run("latest", tmp_path)
    longer = replace(config, resume="latest", train=replace(config.train, tokens=40 * 256, log_every=1))
    in_child(longer, ["resume=latest", f"train.tokens={40 * 256}"], lambda seconds: bool(metrics(run)[4:]))
    launch(replace(config, resume="latest"), ["resume=latest"])
    assert metrics(run)[-1]["step"] == 40


def test_other_scores_of_a_checkpoint_do_not_steer_the_run(tiny_data, tmp_path, run):
    """A score of fewer documents, lower than all the run's own, must not be its best so far."""
    config = tiny_config(tiny_data, tmp_path, tokens=16 * 256)
    config.data.mixture = MixtureSettings()
    config.train = replace(config.train, tokens=8 * 256)
    launch(config, [])
    half = open_run("latest", tmp_path)
    with RunWriter(half, 1, writer="score") as writer:
        writer.evals({"step": 8, "tokens": 8 * 256, "slice": "overall", "bits_per_byte": 0.01})
    launch(replace(config, resume="latest", train=replace(config.train, tokens=16 * 256)),
           ["resume=latest", f"train.tokens={16 * 256}"])  # fmt: skip
    assert checkpoints.pins(half.checkpoints)[16] == ["best"]


def test_a_missing_dataset_says_how_to_make_it(tmp_path):
    with pytest.raises(ValueError, match="not a prepared dataset .* or make it with `dwslm prepare"):
        launch(tiny_config(tmp_path / "none", tmp_path), [])


def copy_of(data: Path, to: Path) -> Path:
    for path in data.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(data)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


def test_another_tokenizer_a_cut_shard_and_an_altered_one_are_named(tiny_data, tmp_path):
    data = copy_of(tiny_data, tmp_path / "data")
    tokenizer = data / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole + b"\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        launch(tiny_config(data, tmp_path / "runs"), [])
    tokenizer.write_bytes(whole)

    shard = next((data / "train").glob("*.bin"))
    tokens = shard.read_bytes()
    shard.write_bytes(tokens[:-2])
    with pytest.raises(ValueError, match=shard.name):
        launch(tiny_config(data, tmp_path / "runs"), [])
    shard.write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    config = tiny_config(data, tmp_path / "runs")
    config.data.verify = "sha256"
    with pytest.raises(ValueError, match=shard.name):
        launch(config, [])


def test_a_mixture_of_a_source_that_is_not_there_is_named(tiny_data, tmp_path):
    config = tiny_config(tiny_data, tmp_path)
    config.data.mixture = MixtureSettings(weights={"notes": 1.0, "poems": 1.0})
    with pytest.raises(ValueError, match="poems"):
        launch(config, [])


def test_a_resume_on_other_data_is_refused(tiny_data, tmp_path):
    data = copy_of(tiny_data, tmp_path / "data")
    config = tiny_config(tiny_data, tmp_path / "runs", tokens=8 * 256)
    launch(config, [])
    manifest = data / "train" / "manifest.json"
    altered = json.loads(manifest.read_text())
    altered["made_by"] = {"other": True}
    manifest.write_text(json.dumps(altered))
    moved = replace(config, resume="latest")
    moved.data.path = str(data)
    with pytest.raises(ValueError, match="is not what .* was trained on"):
        launch(moved, ["resume=latest", f"data.path={data}"])


def test_one_process_a_run(tiny_data, tmp_path, run):
    with run.lock(), pytest.raises(ValueError, match=r"in use by pid"):
        launch(replace(tiny_config(tiny_data, run.path.parent), resume="latest"), ["resume=latest"])


def test_a_longer_plan_goes_on_and_says_so(tiny_data, tmp_path, capsys):
    config = tiny_config(tiny_data, tmp_path, tokens=8 * 256)
    config.data.mixture = MixtureSettings()
    launch(config, [])
    config.train = replace(config.train, tokens=12 * 256)
    launch(replace(config, resume="latest"), ["resume=latest", f"train.tokens={12 * 256}"])
    said = capsys.readouterr().out
    assert "2,048 tokens before, 3,072 now" in said
    run = open_run("latest", tmp_path)
    assert [row["step"] for row in metrics(run)] == list(range(1, 13))
    assert next(e for e in events(run) if e["event"] == "resume")["changed"] == {"train.tokens": 12 * 256}


def test_a_full_disk_while_saving_is_one_line_and_loses_nothing(tiny_data, tmp_path, run):
    """The child may write no file longer than its logs: its first save fails as on a full disk."""
    config = tiny_config(tiny_data, tmp_path)

    assert in_child(config, [], lambda seconds: False, file_bytes=60_000) == 1
    failed = open_run("latest", tmp_path)
    last = events(failed)[-1]
    assert last["event"] == "failed" and "cannot save checkpoint" in last["reason"]
    assert not list(failed.checkpoints.glob("tmp-*")) and not list(failed.checkpoints.glob("step-*"))
    launch(replace(config, resume="latest"), ["resume=latest"])
    losses = [[row["loss"] for row in metrics(r)] for r in (failed, run)]
    assert np.array_equal(*losses)


def test_best_compares_only_scores_of_the_same_text_and_is_found_again_after_a_kill(tiny_data, tmp_path):
    config = tiny_config(tiny_data, tmp_path, tokens=8 * 256)
    config.data.mixture = MixtureSettings()
    launch(config, [])
    run = open_run("latest", tmp_path)
    assert checkpoints.pins(run.checkpoints)[8] == ["best"]
    checkpoints.unpin(run.checkpoints, 8, "best")  # as a kill between score and pin leaves it
    launch(replace(config, resume="latest"), ["resume=latest"])
    assert checkpoints.pins(run.checkpoints)[8] == ["best"]
    # From here on fewer documents are scored: whatever their score, the earlier one is of other text.
    train = replace(config.train, tokens=16 * 256, eval_documents=1)
    launch(replace(config, resume="latest", train=train),
           ["resume=latest", f"train.tokens={16 * 256}", "train.eval_documents=1"])  # fmt: skip
    assert checkpoints.pins(run.checkpoints)[16] == ["best"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"text": "a.txt", **more}, "text= scores one file: leave out bands, yarn_factor, baselines, spelling and")
            for more in (
                {"bands": True},
                {"yarn_factor": 2.0},
                {"baselines": True},
                {"spelling_tests": SpellingSettings(items=3)},
            )
        ),
        ({"yarn_factor": 4.0}, "yarn_factor=4.0 is of the bands"),
        ({"yarn_factor": -2.0, "bands": True}, "yarn_factor=-2.0 must be 1 or more"),
        ({"text": ""}, "a folder, not a file to score"),
        ({"text": "nothing.txt"}, "nothing.txt: no such file to score"),
    ],
)
def test_a_request_that_would_be_ignored_is_refused_before_anything_is_scored(run, change, message, capsys):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        score_checkpoint(scoring(run, **change), [])
    assert "Held-out" not in capsys.readouterr().out


def test_a_run_that_takes_no_scores_is_told_before_they_are_made(run, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run.path)
    with pytest.raises(
        ValueError, match=f"scores cannot be written to {run.path}: name a copy of the checkpoint's folder"
    ):
        score_checkpoint(scoring(run), [])
    assert "Held-out" not in capsys.readouterr().out


def test_what_is_given_of_evaluate_counts_in_every_spelling(run, capsys):
    config = scoring(run)
    config.evaluate.max_documents = 3
    for spelling in ("evaluate.max_documents=3", "++evaluate.max_documents=3"):
        score_checkpoint(config, [spelling])
        assert "scored 3 of 24 documents" in capsys.readouterr().out


def test_entry_points_leave_no_log_files_where_they_are_called(tmp_path):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), "model.locl=3"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.strip() == "error: unknown setting model.locl: did you mean model.local?"


def test_other_threads_are_said_in_the_receipt(tiny_data, tmp_path, capsys):
    config = tiny_config(tiny_data, tmp_path, tokens=256)
    launch(config, [])
    run = open_run("latest", tmp_path)
    record = json.loads((run.path / "run.json").read_text())
    record["hardware"]["cpus"] = 7
    (run.path / "run.json").write_text(json.dumps(record))
    launch(replace(config, resume="latest"), ["resume=latest"])
    assert "1 now, 7 at the start" in capsys.readouterr().out


def test_a_signal_in_the_first_step_says_that_there_is_nothing_to_save(tiny_data, tmp_path, monkeypatch, capfd):
    plain = TrainStep.run

    def signalled(step, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(step, *arguments)

    monkeypatch.setattr(TrainStep, "run", signalled)
    with pytest.raises(Preempted):
        launch(tiny_config(tiny_data, tmp_path), [])
    said = capfd.readouterr()
    assert "SIGTERM: leaves at once" in said.err
    (run,) = tmp_path.glob("2*")
    assert f"by SIGTERM at step 0, nothing to save yet; go on with: python train.py resume={run}\n" in said.out


def test_a_run_too_large_for_the_cpu_that_it_found_is_refused_unless_it_is_meant(
    tiny_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(receipts, "machine_memory", lambda: 1000)
    found = tiny_config(tiny_data, tmp_path, device="auto")
    with pytest.raises(
        ValueError, match=r"needs .* GB or more, of which there are .* take a small one .* train\.device=cpu"
    ):
        launch(found, [])
    assert not list(tmp_path.iterdir())
    launch(replace(found, dry_run=True), [])  # which tells the sizes
    assert "Memory estimate" in capsys.readouterr().out
    meant = tiny_config(tiny_data, tmp_path, tokens=256)
    launch(meant, [])
    assert open_run("latest", tmp_path).record["steps"] == 1


@pytest.mark.parametrize(("words", "expected"), [
    (["train.py", "--experiment=main"], "--experiment=main: settings have no dashes: experiment=main"),
    (["eval.py", "checkpoint=443b1a", "model.layers=3"], "model.layers is a setting of train.py; see docs/settings.md"),
    (["eval.py", "443b1a"], "443b1a is not name=value: did you mean checkpoint=443b1a?"),
    (["eval.py", "experiment=main"], "experiment is a setting of train.py: eval.py takes checkpoint=RUN"),
])  # fmt: skip
def test_words_of_another_command_line_are_one_line(words, expected, tmp_path):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / words[0]), *words[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, f"error: {expected}\n")


def test_the_help_of_scoring_offers_no_experiments():
    done = subprocess.run([sys.executable, str(REPOSITORY / "eval.py"), "--help"], capture_output=True, text=True)
    assert "checkpoint: null" in done.stdout and "proxy_8l" not in done.stdout
