"""The queue from its commands' side: workers that are killed, GPUs that nobody shares, and what --multirun adds."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import hydra
import pytest

from dwslm.cli.launch import launch
from dwslm.cli.queue_add import Composed, arm_name, runs_of, score_of, training_job, vary, wait_for
from dwslm.cli.queue_job import Place, quoted, saved_of
from dwslm.config import CONFIGS, register
from dwslm.machine.boot import boot_id, started
from dwslm.machine.lease import Lease, Taken
from dwslm.runs import queue as queue_module
from dwslm.runs.folder import RunFolder, create_run, open_run
from dwslm.runs.queue import Queue, held
from dwslm.runs.queue_job import JobSpec
from dwslm.runs.queue_worker import Worker
from dwslm.runs.reader import events, metrics
from dwslm.runs.writer import RunWriter
from tests.train.tiny_run import STEPS, tiny_config

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload([__name__])
LIMIT_S = 60.0  # for what comes at once, on a machine that is busy with other things


def _work(folder: Path, gpus: list[str]) -> None:
    name = f"w{os.getpid()}"
    queue_module.LOST_WAIT_S, queue_module.LOST_RETRIES = (0.0,), 99  # kills may hit one job again and again
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    lock = Lease(name, folder=folder / "workers")
    place = Place(folder, lock, "here", dict.fromkeys(gpus), dict(os.environ), lambda text: None, folder / "gpus")
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(place, "asked_to_stop", True))
    Worker(
        name=name,
        host="here",
        boot=boot_id() or "",
        gpus=gpus,
        most=len(gpus),
        take=place.take,
        execute=place.execute,
        saved=saved_of,
        stop=lambda: place.asked_to_stop,
        poll_s=0.05,
    ).work(Queue(folder), until_empty=True)


def a_worker(folder: Path, gpus: list[str]):
    (folder / "workers").mkdir(parents=True, exist_ok=True)
    process = CHILDREN.Process(target=_work, args=(folder, gpus))
    process.start()
    return process


def shell(id: str, script: str, **about) -> JobSpec:
    return JobSpec(**{"id": id, "name": id, "program": "", "arguments": ["/bin/sh", "-c", script], "gpus": 1, **about})


def until(what, limit: float = LIMIT_S):
    end = time.monotonic() + limit
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_two_workers_never_share_a_gpu(tmp_path):
    queue, log = Queue(tmp_path / "q"), tmp_path / "log"
    script = f"echo start $CUDA_VISIBLE_DEVICES >> {log}; sleep 0.1; echo end $CUDA_VISIBLE_DEVICES >> {log}"
    queue.add([shell(f"j{i}", script) for i in range(5)])
    workers = [a_worker(queue.folder, ["GPU-a"]) for _ in range(2)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert lines(log) == [["start", "GPU-a"], ["end", "GPU-a"]] * 5  # never a start before the end of the one before
    queue.refresh()
    assert all(queue.done(id) for id in queue.jobs)


def test_kill_9_of_a_worker_frees_gpu_and_job_and_leaves_nothing_running(tmp_path):
    queue, log = Queue(tmp_path / "q"), tmp_path / "log"
    queue.add([shell("j", f"echo $$ >> {log}; test $(wc -l < {log}) -gt 1 || exec sleep 600")])
    first = a_worker(queue.folder, ["GPU-a"])
    pid = int(until(lambda: lines(log))[0][0])
    with pytest.raises(Taken, match="queue job j"):
        Lease("GPU-a", folder=queue.folder / "gpus")
    first.kill()

    def free():
        try:
            return Lease("GPU-a", folder=queue.folder / "gpus")
        except Taken:
            return None

    lease = until(free)
    assert started(pid) is None  # the lock outlives no process of the job
    lease.release()
    second = a_worker(queue.folder, ["GPU-a"])
    second.join()
    queue.refresh()
    job = queue.jobs["j"]
    assert (
        queue.done("j")
        and job.starts == 2
        and [event["kind"] for _, event in queue.log_of("j")[1::2]] == ["lost", "done"]
    )


def test_workers_killed_at_random_lose_no_job_and_run_none_twice_at_a_time(tmp_path):
    queue, log = Queue(tmp_path / "q"), tmp_path / "log"
    script = "flock -n {log}.{id} sh -c 'echo start {id} >> {log}; sleep 0.15; echo end {id} >> {log}' || echo twice >> {log}"
    queue.add([shell(f"j{i}", script.format(id=f"j{i}", log=log), gpus=i % 2) for i in range(12)])
    workers = [a_worker(queue.folder, ["GPU-a", "GPU-b"]) for _ in range(3)]
    for victim in (0, 1, 2, 0):
        already = len(lines(log))
        until(lambda already=already: len(lines(log)) > already or not any(worker.is_alive() for worker in workers))
        workers[victim].kill()
        workers[victim].join()
        workers[victim] = a_worker(queue.folder, ["GPU-a", "GPU-b"])
    for worker in workers:
        worker.join()
    queue.refresh()
    assert all(queue.done(id) for id in queue.jobs) and ["twice"] not in lines(log)
    for id, job in queue.jobs.items():
        starts, ends = (sum(line == [word, id] for line in lines(log)) for word in ("start", "end"))
        assert 1 <= ends <= starts <= job.starts


@pytest.mark.parametrize("way", ["hold", "drop", "priority", "worker"])
def test_a_running_job_is_asked_to_save_and_leaves(tmp_path, way):
    queue, log = Queue(tmp_path / "q"), tmp_path / "log"
    saves = (
        f"trap 'echo saved >> {log}; exit 75' USR1 TERM; echo start >> {log}; test $(wc -l < {log}) -gt 1 && exit 0; "
    )
    queue.add([shell("j", saves + "while :; do sleep 0.05; done")])
    worker = a_worker(queue.folder, ["GPU-a"])
    until(lambda: lines(log))
    if way == "hold":
        queue.hold("j", "tonight")
    elif way == "drop":
        queue.drop("j", "enough seen", decision="K3")
    elif way == "priority":
        queue.clock = lambda: time.time() - 3600  # added an hour ago, so its patience is at an end
        queue.add([shell("urgent", f"echo urgent >> {log}", priority=1)])
    else:
        os.kill(worker.pid, signal.SIGTERM)
    until(lambda: ["saved"] in lines(log))
    worker.join()
    queue.refresh()
    standing = queue.standing(queue.jobs["j"])
    expected = {"hold": "paused", "drop": "stopped", "priority": "done", "worker": "queued"}
    assert standing.state == expected[way] and queue.jobs["j"].failures == {}
    words = [word for (word,) in lines(log)]
    assert words == ["start", "saved"] + (["urgent", "start"] if way == "priority" else [])


def test_a_job_that_fails_says_why_and_what_it_printed(tmp_path):
    queue = Queue(tmp_path / "q")
    queue.add([shell("j", "echo words; echo 'error: no such setting' >&2; exit 1", gpus=0)])
    a_worker(queue.folder, []).join()
    queue.refresh()
    assert queue.standing(queue.jobs["j"]).why == "bad_configuration: exit code 1: no such setting"
    assert "words\n" in (queue.folder / "output" / "j.log").read_text()


def test_a_job_does_not_start_on_other_text_than_it_was_added_for(tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    spec = training_job(tiny_config(data, tmp_path / "runs"), "", None, 0, [])
    lock = Lease("w", folder=tmp_path)
    place = Place(tmp_path / "q", lock, "here", {}, {}, print)
    assert place.command(spec, None)[-2:] == ["--config-name", spec.id]
    with open(data / "valid" / "manifest.json", "a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match="is not the text that it was when the job was added"):
        place.command(spec, None)
    lock.release()


# ---- commands -------------------------------------------------------------------------------------------


def dwslm(monkeypatch, capsys, *words: str) -> str:
    from dwslm.cli import main

    monkeypatch.setattr(sys, "argv", ["dwslm", "queue", *words])
    main()
    return capsys.readouterr().out


def test_commands_change_what_ls_and_show_tell(tmp_path, monkeypatch, capsys):
    q = ["--queue", str(tmp_path / "q")]
    with pytest.raises(SystemExit):
        dwslm(monkeypatch, capsys, "ls", *q)
    assert "is no queue yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        dwslm(monkeypatch, capsys, "work", *q, "--until-empty")
    assert "is no queue yet" in capsys.readouterr().err and not (tmp_path / "q").exists()
    first = dwslm(monkeypatch, capsys, "add", *q, "--name", "[b]one[/b]", "--", "/bin/true").strip()
    second = dwslm(monkeypatch, capsys, "add", *q, "--after", first[-6:], "--", "/bin/sh", "-c", "true").strip()
    listed = dwslm(monkeypatch, capsys, "ls", *q)
    assert "[b]one[/b]" in listed and f"waits for {first}" in listed
    dwslm(monkeypatch, capsys, "hold", *q, second, "--reason", "a long story " * 20)
    assert listed.count(second) == dwslm(monkeypatch, capsys, "ls", *q).count(second) == 1
    dwslm(monkeypatch, capsys, "release", *q, second)
    dwslm(monkeypatch, capsys, "hold", *q, first, "--reason", "not today")
    assert "paused: waiting on purpose: not today" in dwslm(monkeypatch, capsys, "show", *q, first)
    dwslm(monkeypatch, capsys, "release", *q, first)
    dwslm(monkeypatch, capsys, "work", *q, "--until-empty", "--gpus", "0")
    assert dwslm(monkeypatch, capsys, "ls", *q).count("done") == 2
    dwslm(monkeypatch, capsys, "add", *q, "--name", "third", "--", "/bin/false")
    dwslm(monkeypatch, capsys, "drop", *q, "third", "--reason", "not needed", "--decision", "K1")
    shown = dwslm(monkeypatch, capsys, "show", *q, "third")
    assert "dropped: not needed" in shown and "decision K1" in shown
    with pytest.raises(SystemExit):
        dwslm(monkeypatch, capsys, "retry", *q, second)
    assert "only a failed, stopped or dropped one" in capsys.readouterr().err


def test_a_path_is_quoted_for_hydra(tmp_path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for name in ("plain", "with space", "it's", "a=b,c", "back\\slash"):
        run = RunFolder(tmp_path / name, {})
        (parsed,) = OverridesParser.create().parse_overrides([f"resume={quoted(run)}"])
        value = parsed.value()
        assert getattr(value, "text", value) == str(tmp_path / name)


def test_the_run_of_a_job_is_known_by_its_id(tmp_path):
    spec = JobSpec("j1", "n", "train.py", cwd=str(tmp_path), config={})
    assert runs_of([spec]) == {} and saved_of(spec) is None
    create_run(tmp_path / "runs", "other", {"config": {"proxy": {"job": None}}})
    run = create_run(tmp_path / "runs", "mine", {"config": {"proxy": {"job": "j1"}}})
    assert runs_of([spec])["j1"].id == run.id and score_of(run) is None
    for step in (16, 32, 48):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    for step in (16, 32):  # the third was not finished
        (run.checkpoints / f"step-{step:08d}" / "manifest.json").write_text("{}")
    assert saved_of(spec) == 32
    with RunWriter(run, 1) as writer:
        writer.evals({"slice": "overall", "bits_per_byte": 1.5, "step": 16, "tokens": 1})
        writer.evals({"slice": "overall", "bits_per_byte": 1.25, "step": 32, "tokens": 2})
    assert score_of(run) == 1.25


def test_waiting_gives_scores_and_names_what_failed(tmp_path):
    queue = Queue(tmp_path / "q")
    specs = [JobSpec(f"j{i}", f"n{i}", "train.py", cwd=str(tmp_path), config={}) for i in range(2)]
    queue.add(specs)
    run = create_run(tmp_path / "runs", "n", {"config": {"proxy": {"job": "j0"}}})
    with RunWriter(run, 1) as writer:
        writer.evals({"slice": "overall", "bits_per_byte": 1.25, "step": 32, "tokens": 2})
    queue.end("j0", queue.claim("j0", "w", "here", "b"), "done")
    assert wait_for(str(queue.folder), specs[:1]) == [1.25]
    queue.end("j1", queue.claim("j1", "w", "here", "b"), "out_of_memory", reason="too large", retries=0)
    with pytest.raises(ValueError, match=r"job j1 \(n1\) is not done but failed: out_of_memory: too large"):
        wait_for(str(queue.folder), specs)


def test_a_tests_arms_side_by_side(tmp_path, monkeypatch, capsys):
    queue = Queue(tmp_path / "q")
    plain = {"train": {"seed": 0}, "proxy": {"varies": []}}
    about = {"program": "train.py", "cwd": str(tmp_path), "config": plain, "test": "local"}
    queue.add([JobSpec(f"{arm}{seed}", arm, arm=arm, seed=seed, **about) for arm in ("kda", "gdn") for seed in (0, 1)])
    for id, score in (("kda0", 1.3131), ("kda1", 1.3173), ("gdn0", 1.3421)):
        record = {"config": {"proxy": {"job": id}}, "stream": "s" if id != "gdn0" else "z"}
        with RunWriter(create_run(tmp_path / "runs", id, record), 1) as writer:
            writer.evals({"slice": "overall", "bits_per_byte": score, "step": 1, "tokens": 1})
        queue.end(id, queue.claim(id, "w", "here", "b"), "done")
    queue.drop("gdn1", "no time")
    shown = dwslm(monkeypatch, capsys, "show", "--queue", str(queue.folder), "local")
    rows = {line.split()[1]: line.replace("│", " ").split()[1:] for line in shown.splitlines() if line.startswith("│")}
    assert rows == {"kda": ["1.3131", "1.3173", "1.3152", "0.0042"], "gdn": ["1.3421", "dropped", "1.3421"]}
    assert "not paired: seed 0: order of the data is s in arm kda and z in arm gdn" in shown


# ---- --multirun -----------------------------------------------------------------------------------------


@pytest.fixture
def multirun(monkeypatch, tmp_path, capsys):
    """`python train.py WORDS` in an empty folder, in this process. Returns what it printed."""
    register()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def start(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(_never)()
        return capsys.readouterr().out

    return start


def test_multirun_adds_paired_jobs_with_all_their_settings(tmp_path, multirun):
    multirun("test=stochastok", "experiment=proxy_cpu", "hydra.launcher.priority=3")
    queue = Queue(tmp_path / "queue")
    trains = [job.spec for job in queue.jobs.values() if job.spec.program == "train.py"]
    assert {(spec.arm, spec.seed) for spec in trains} == {
        (arm, seed) for arm in ("plain", "stochastok") for seed in (0, 1)
    }
    assert all(spec.config["data"]["stochastok"]["enabled"] == (spec.arm == "stochastok") for spec in trains)
    assert all(spec.priority == 3 and spec.gpus == 0 and spec.config["proxy"]["job"] == spec.id for spec in trains)
    scores = [job.spec for job in queue.jobs.values() if job.spec.program == "eval.py"]
    assert [spec.after for spec in scores] == [[spec.id] for spec in trains]
    assert all("spelling=true" in spec.arguments and "device=cpu" in spec.arguments for spec in scores)
    assert next(queue.in_order()).spec.program == "train.py" and sum(1 for _ in queue.in_order()) == 4
    with pytest.raises(ValueError, match="runs of arm plain may differ in the seed alone, and do in train.tokens"):
        multirun("test=stochastok", "experiment=proxy_cpu", "train.tokens=65536", "train.seed=2,3")
    with pytest.raises(ValueError, match="arm plain has seed 0 already"):
        multirun("test=stochastok", "experiment=proxy_cpu")
    queue.refresh()
    assert len(queue.jobs) == 8


@pytest.mark.slow
def test_a_sweep_of_ones_own_and_what_does_not_go_into_the_queue(tmp_path, multirun):
    words = ["--multirun", "experiment=proxy_cpu", "model.local=kda,gdn"]
    multirun(*words, "hydra.launcher.gpus=1")
    queue = Queue(tmp_path / "queue")
    assert [job.spec.config["model"]["local"] for job in queue.jobs.values()] == ["kda", "gdn"]
    assert {(job.spec.test, job.spec.gpus) for job in queue.jobs.values()} == {(None, 1)}
    with pytest.raises(ValueError, match="not paired, train.tokens is 2048 in the first and 4096 in the second"):
        multirun("--multirun", "experiment=proxy_cpu", "proxy.test=t", "train.tokens=2048,4096")
    with pytest.raises(ValueError, match="resume= in the queue"):
        multirun(*words, "resume=latest")
    with pytest.raises(ValueError, match="gpus=2"):
        multirun(*words, "hydra.launcher.gpus=2")
    queue.refresh()
    assert len(queue.jobs) == 2


def test_arms_are_named_by_what_varies():
    def names(*sweep):
        found = vary([words.split() for words in sweep])
        return [arm_name(Composed(None, words.split(), listed), found) for words in sweep for listed in ("", "x")]

    assert names("model.local=kda train.seed=0", "model.local=gdn train.seed=0") == [
        "local=kda",
        "x,local=kda",
        "local=gdn",
        "x,local=gdn",
    ]
    assert names("a.b=1 c.b=1 d=0", "a.b=2 c.b=2 d=0")[::2] == ["a.b=1,c.b=1", "a.b=2,c.b=2"]
    assert names("a.b=1 train.seed=0", "a.b=1 train.seed=1") == ["", "x"] * 2


@pytest.mark.slow
def test_every_ready_test_composes_at_both_sizes_and_is_paired(tmp_path, multirun):
    names = sorted(path.stem for path in (CONFIGS / "test").glob("*.yaml"))
    assert len(names) >= 9
    for name in names:
        for size in ([], ["experiment=proxy_cpu"]):
            said = multirun(f"test={name}", "dry_run=true", "train.seed=0", *size)
            assert "Would add" in said and name.replace("_", "-") in said
    assert not (tmp_path / "queue" / "log").exists()


@pytest.mark.slow
def test_a_run_goes_through_the_queue_and_a_killed_worker_costs_it_nothing(tiny_data, tmp_path):
    """Its rows are those of a run that nobody disturbed, from the checkpoint on as before it."""
    config = tiny_config(tiny_data, tmp_path / "runs")
    spec = training_job(config, "", None, 0, [])
    queue = Queue(tmp_path / "q")
    queue.add([spec])
    first = a_worker(queue.folder, [])
    until(lambda: saved_of(spec), limit=300)
    first.kill()
    first.join()
    until(lambda: not held(queue.lock_path(f"w{first.pid}")))
    a_worker(queue.folder, []).join()
    queue.refresh()
    job, run = queue.jobs[spec.id], runs_of([spec])[spec.id]
    assert queue.done(spec.id) and job.starts == 2 and len(list((tmp_path / "runs").glob("2*"))) == 1
    assert any(row["event"] == "resume" and row["step"] > 0 for row in events(run))
    launch(replace(config, runs_dir=str(tmp_path / "straight")), [])
    straight = open_run("latest", tmp_path / "straight")
    losses = [[row["loss"] for row in metrics(each)] for each in (run, straight)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    for row in metrics(run):  # waiting is a part of a step's time
        assert 0 <= row["data_seconds"] <= config.train.batch_tokens / row["tokens_per_second"]


def _never(config) -> None:
    raise AssertionError("trained in this process")
