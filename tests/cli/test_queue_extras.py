"""What the queue does through optional packages: workers on Slurm, and a search."""

import argparse
import math
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from dwslm.cli import main, queue_job, queue_search, queue_slurm
from dwslm.cli.run import DEADLINES
from dwslm.machine.boot import below
from dwslm.machine.watch import Deadlines
from dwslm.runs.folder import create_run
from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import JobSpec
from dwslm.runs.writer import RunWriter


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("optim.lr=log:0.001:0.03", ("optim.lr", "log", ["0.001", "0.03"])),
        ("optim.momentum=0.9:0.99", ("optim.momentum", "float", ["0.9", "0.99"])),
        ("model.layers=int:4:12", ("model.layers", "int", ["4", "12"])),
        ("model.local=kda,gdn", ("model.local", "one of", ["kda", "gdn"])),
    ],
)
def test_ranges_of_a_search(text, read):
    assert queue_search.space(text) == read


@pytest.mark.parametrize("text", ["optim.lr", "=1:2", "a=2:1", "a=x:y", "a=cube:1:2", "a=1:2:3:4"])
def test_what_is_no_range(text):
    with pytest.raises(ValueError, match=f"--space {text}: give NAME=LOW:HIGH"):
        queue_search.space(text)


def test_optuna_proposes_the_queue_runs_and_a_killed_search_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    folder, over = tmp_path / "queue", threading.Event()

    def work():  # the loss is smallest at 0.01; one trial fails
        queue = Queue(folder)
        while not over.wait(0.01):
            queue.refresh()
            for job in list(queue.in_order()):
                claim = queue.claim(job.id, "w", "here", "b1")
                rate = job.spec.config["optim"]["lr"]
                if job.spec.name.endswith("-1"):
                    queue.end(job.id, claim, "crash", retries=0)
                    continue
                run = create_run(tmp_path / "runs", job.spec.name, {"config": job.spec.config})
                with RunWriter(run, 1) as writer:
                    writer.evals({"slice": "overall", "bits_per_byte": 1 + abs(rate - 0.01), "step": 1, "tokens": 1})
                queue.end(job.id, claim, "done")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        about = {"study": "s", "space": ["optim.lr=log:0.001:0.1"], "words": ["experiment=proxy_cpu"], "at_once": 2}
        arguments = argparse.Namespace(**about, trials=3, seed=0, priority=0)
        study = queue_search.search(arguments, folder, poll_s=0.05)
        assert len(study.trials) >= 4
        arguments.trials = 5
        study = queue_search.search(arguments, folder, poll_s=0.05)
    finally:
        over.set()
        worker.join()
    finished = [trial for trial in study.trials if trial.value is not None]
    assert len(finished) == 5 and all(trial.value == 1 + abs(trial.params["optim.lr"] - 0.01) for trial in finished)
    assert len({trial.params["optim.lr"] for trial in study.trials}) == len(study.trials) == len(Queue(folder).jobs)


def a_slurm_job(tmp_path, **about) -> argparse.Namespace:
    given = {
        "workers": 1,
        "gpus": 0,
        "cpus": 1,
        "minutes": 5,
        "warn_seconds": 30,
        "partition": None,
        "option": [],
        "local": True,
        **{flag: getattr(Deadlines, name) / unit for flag, (name, unit, _) in DEADLINES.items()},
    }
    return argparse.Namespace(**given | about)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("train.py", Deadlines(start=1200, step=90.0, save=300, evaluation=1800)),
        ("", Deadlines(start=math.inf)),  # it says nothing on its way
    ],
)
def test_a_worker_is_told_how_long_its_trainings_may_be_silent(tmp_path, monkeypatch, program, expected):
    given = []

    class Noted(queue_job.Recording):
        def __init__(self, job, settings, **about):
            given.append(settings.deadlines)
            super().__init__(job, settings, **about)

    monkeypatch.setattr(queue_job, "Recording", Noted)
    monkeypatch.setattr(queue_job.Place, "command", lambda place, spec, run: ["/bin/true"])
    queue = Queue(tmp_path / "queue")
    queue.add([JobSpec("j", "j", program, arguments=["/bin/true"], cwd=str(tmp_path), config={}, gpus=0)])
    words = [
        "--queue",
        str(queue.folder),
        "--until-empty",
        "--gpus",
        "0",
        "--start-minutes",
        "20",
        "--step-seconds",
        "90",
    ]
    monkeypatch.setattr(sys, "argv", ["dwslm", "queue", "work", *words])
    main()
    queue.refresh()
    assert queue.done("j") and given == [expected]


def test_workers_on_slurm_are_told_the_same(tmp_path, monkeypatch):
    class Executor:
        def __init__(self, **about):
            pass

        def update_parameters(self, **about):
            pass

        def submit(self, job):
            return job

    monkeypatch.setattr(queue_slurm, "submitit", lambda: SimpleNamespace(AutoExecutor=Executor))
    (job,) = queue_slurm.submit(a_slurm_job(tmp_path, step_seconds=90.0), tmp_path)
    assert job.command[job.command.index("--step-seconds") + 1] == "90.0"
    assert job.command[job.command.index("--evaluation-minutes") + 1] == "30.0"
    with pytest.raises(ValueError, match=r"deadline step=0\.0 must be above 0"):
        queue_slurm.submit(a_slurm_job(tmp_path, step_seconds=0.0), tmp_path)


def test_an_option_of_sbatch_has_a_value(tmp_path):
    with pytest.raises(ValueError, match="--option qos: give NAME=VALUE"):
        queue_slurm.submit(a_slurm_job(tmp_path, option=["qos"]), tmp_path)


@pytest.mark.slow
def test_submitit_starts_a_worker(tmp_path):
    pytest.importorskip("submitit")
    queue = Queue(tmp_path / "queue")
    queue.add([JobSpec("j", "j", "", arguments=["/bin/sh", "-c", f"echo ran >> {tmp_path}/log"], gpus=0)])
    (job,) = queue_slurm.submit(a_slurm_job(tmp_path), queue.folder)
    assert job.result() == 0
    queue.refresh()
    assert queue.done("j") and (tmp_path / "log").read_text() == "ran\n"


@pytest.mark.slow
def test_slurms_warning_puts_the_job_back_and_the_worker_in_again(tmp_path):
    pytest.importorskip("submitit")
    queue, log = Queue(tmp_path / "queue"), tmp_path / "log"
    script = f"trap 'echo saved >> {log}; exit 75' TERM; echo start >> {log}; while :; do sleep 0.05; done"
    queue.add([JobSpec("j", "j", "", arguments=["/bin/sh", "-c", script], gpus=0)])
    (job,) = queue_slurm.submit(a_slurm_job(tmp_path), queue.folder)
    wait = threading.Event()
    while not log.exists():
        assert not wait.wait(0.05)
        assert not job.done(force_check=True), job.exception()
    os.kill(below(job._process.pid)[0], signal.SIGUSR2)  # what Slurm sends the task, as submitit asks it to
    for _ in range(1200):
        queue.refresh()
        if queue.jobs["j"].ended is not None:
            break
        wait.wait(0.05)
    job._process.kill()
    assert log.read_text().split() == ["start", "saved"]
    assert queue.jobs["j"].ended["kind"] == "preempted" and next(queue.in_order()).id == "j"
