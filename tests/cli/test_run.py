"""`dwslm run`: the command line, GPUs and their leases, and a real run that is killed under it."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dwslm.cli import run as run_command
from dwslm.cli.find import REPOSITORY
from dwslm.cli.launch import launch
from dwslm.cli.run import lease_gpus, processes, resume_command, resumed, split, visible
from dwslm.machine.lease import Lease, Taken
from dwslm.runs.folder import create_run, open_run
from dwslm.runs.reader import events, metrics
from tests.train.tiny_run import STEPS, tiny_config


def test_settings_follow_train_py_and_a_whole_command_is_kept():
    assert split(["experiment=main", "train.seed=1"]) == (
        [sys.executable, str(REPOSITORY / "train.py")],
        ["experiment=main", "train.seed=1"],
    )
    launcher, overrides = split(["torchrun", "--nproc-per-node=2", "train.py", "experiment=main"])
    assert launcher == ["torchrun", "--nproc-per-node=2", "train.py"] and overrides == ["experiment=main"]
    assert split(["--config-dir", "myconf", "experiment=mine"])[1] == ["--config-dir", "myconf", "experiment=mine"]
    with pytest.raises(ValueError, match="'sleep' is no setting, and no train.py follows it"):
        split(["sleep", "5"])


def test_what_goes_on_after_a_failure():
    folder = Path("/runs/r")
    assert resume_command(["python", "train.py"], ["experiment=demo"])(folder) == [
        "python",
        "train.py",
        f"resume={folder}",
    ]
    again = resume_command(["train.py"], [f"resume={folder}", "train.tokens=9"])
    assert again(folder) == ["train.py", f"resume={folder}", "train.tokens=9"]  # a longer plan stays asked for


def test_the_run_that_a_resume_means_is_found_before_the_start(tmp_path):
    assert resumed(["experiment=main"]) is None and resumed(["resume=null"]) is None
    run = create_run(tmp_path, "x", {})
    assert resumed(["resume=latest", f"runs_dir={tmp_path}"]).path == run.path
    with pytest.raises(ValueError, match="no run 'nosuch'"):
        resumed(["resume=nosuch", f"runs_dir={tmp_path}"])


def test_processes_of_a_launcher():
    assert processes(["python", "train.py"]) == 1
    assert processes(["torchrun", "--nproc_per_node=4", "train.py"]) == 4
    assert processes(["torchrun", "--nproc-per-node", "2", "train.py"]) == 2
    with pytest.raises(ValueError, match="--gpus N"):
        processes(["torchrun", "--nproc-per-node=gpu", "train.py"])


class FakeGpu:
    def __init__(self, uuid):
        self.uuid = uuid

    def name(self):
        return "NVIDIA H200", self.uuid

    def watch_xid(self):
        return True


GPUS = [FakeGpu("GPU-aa1"), FakeGpu("GPU-bb2"), FakeGpu("GPU-cc3")]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ["GPU-aa1", "GPU-bb2", "GPU-cc3"]),
        ("2,0", ["GPU-cc3", "GPU-aa1"]),
        ("GPU-bb", ["GPU-bb2"]),
        ("", []),
        ("-1", []),
        ("1,9,0", ["GPU-bb2"]),  # as CUDA reads it: the first that is not there ends the list
    ],
)
def test_gpus_that_are_visible(chosen, expected):
    assert list(visible(GPUS, chosen)) == expected


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(run_command, "list_gpus", lambda: GPUS)
    monkeypatch.setattr("dwslm.machine.lease.lease_folder", lambda: tmp_path / "leases")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_first_free_gpu_is_leased(gpus):
    with Lease("GPU-aa1"):
        found, leases = lease_gpus(None, ["train.py"], [])
        assert list(found) == ["GPU-bb2"] == [lease.gpu for lease in leases]
        with pytest.raises(Taken, match="2 GPUs wanted, 1 free; GPU GPU-aa1 is in use by pid"):
            lease_gpus(2, ["train.py"], [])
        leases[0].release()
    with pytest.raises(ValueError, match="5 GPUs wanted, 3 are visible"):
        lease_gpus(5, ["train.py"], [])
    assert lease_gpus(None, ["train.py"], ["train.device=cpu"]) == ({}, [])


def test_without_a_gpu_there_is_nothing_to_lease(monkeypatch):
    monkeypatch.setattr(run_command, "list_gpus", lambda: [])
    assert lease_gpus(None, ["train.py"], []) == ({}, [])
    with pytest.raises(ValueError, match="no GPU is visible"):
        lease_gpus(1, ["train.py"], [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--notify-command", "x {nosuch}"], "braces around none of"),
        (["--step-seconds", "0"], "deadline step=0.0"),
        (["--retries", "-1"], "retries=-1"),
        (["--clock-cap", "0"], "clock_cap_mhz=0"),
        (["--", "sleep", "5"], "no train.py follows it"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words, told):
    parser = argparse.ArgumentParser()
    run_command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["run", *words])
    with pytest.raises(ValueError, match=told):
        arguments.run(arguments)


# ---- a real run -----------------------------------------------------------------------------------------

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from dwslm.cli.errors import one_line_errors
from dwslm.cli.launch import launch
from tests.train.tiny_run import tiny_config
config = tiny_config(Path(sys.argv[1]), Path(sys.argv[2]))
words = sys.argv[3:]
with one_line_errors():
    launch(replace(config, resume=words[0].partition("=")[2]) if words else config, words)
"""

SUPERVISE = """
import os, sys
from pathlib import Path
from dwslm.cli import child
from dwslm.cli.run import open_log
from dwslm.machine.supervisor import Job, Supervisor, SupervisorSettings
from dwslm.runs.reader import events
script, data, runs, *more = sys.argv[1:]
command = [sys.executable, script, data, runs]
job = Job(command, lambda folder: [*command, f"resume={folder}"], dict(os.environ), child.ANNOUNCE, open_log)
if more:
    job.run = Path(more[0])
    job.command, job.history = job.resume(job.run), [row for row in events(job.run) if row["writer"] == "supervisor"]
sys.exit(Supervisor(job, SupervisorSettings(back_off=lambda n: 0.1), say=lambda text: None).run())
"""


def supervisor(*words):
    """A supervisor of the tiny run, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SUPERVISE, *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def saved(runs, step="*"):
    """Manifests of checkpoints, once there are any."""
    while not (found := list(runs.glob(f"*/checkpoints/step-{step}/manifest.json"))):
        time.sleep(0.01)
    return found


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.slow
def test_a_run_killed_under_the_supervisor_ends_as_one_that_was_not(tiny_data, tmp_path, script):
    launch(tiny_config(tiny_data, tmp_path / "straight"), [])
    straight = open_run("latest", tmp_path / "straight")
    process = supervisor(script, tiny_data, tmp_path / "runs")
    run = saved(tmp_path / "runs", "00000008")[0].parents[2]
    os.kill(json.loads((run / "lock").read_text())["pid"], signal.SIGKILL)
    assert process.wait(120) == 0
    run = open_run("latest", tmp_path / "runs")
    told = events(run)
    ends = [row["kind"] for row in told if row["event"] == "attempt_ended"]
    assert ends == ["killed", "done"] and [row["event"] for row in told][-1] == "supervisor_ended"
    assert next(row for row in told if row["event"] == "resume")["step"] >= 8
    last = f"step-{STEPS:08d}/model.safetensors"
    assert (run.checkpoints / last).read_bytes() == (straight.checkpoints / last).read_bytes()
    assert [row["loss"] for row in metrics(run)] == [row["loss"] for row in metrics(straight)]


@pytest.mark.slow
def test_a_supervisor_that_is_killed_takes_the_run_along_and_the_next_one_goes_on(tiny_data, tmp_path, script):
    runs = tmp_path / "runs"
    process = supervisor(script, tiny_data, runs)
    saved(runs)
    run = open_run("latest", runs)
    while not any(row["event"] == "supervised" for row in events(run)):  # it looks for the run now and then
        time.sleep(0.01)
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while True:
        try:
            run.lock().release()  # free: nothing trains in it any more
            break
        except ValueError:
            assert time.monotonic() < end, "the trainer outlived its supervisor"
            time.sleep(0.02)
    assert supervisor(script, tiny_data, runs, run.path).wait(120) == 0
    told = [row["event"] for row in events(run)]
    assert told.count("supervisor_lost") == 1 and told[-1] == "supervisor_ended" and metrics(run)[-1]["step"] == STEPS
