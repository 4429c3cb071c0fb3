"""Workers: eight of them and two thousand jobs, who goes first, and who makes room for whom."""

import fcntl
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import JobSpec
from dwslm.runs.queue_worker import PATIENCE_S, Outcome, Worker, makes_room_for

# Children are forked from a clean server process: this one may have threads by now, with which a fork can hang.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload([__name__])

JOBS, WORKERS = 2000, 8


class Nothing:
    """No GPU held."""

    names = ()

    def release(self) -> None: ...


class Clock:
    now = 1_000.0

    def __call__(self):
        return self.now


def spec(id, **about) -> JobSpec:
    return JobSpec(**{"id": id, "name": id, "program": "", "arguments": ["true"], "gpus": 0, **about})


def a_worker(name: str, **about) -> Worker:
    return Worker(
        **{
            "name": name, "host": "here", "boot": "b1", "gpus": (), "most": 8, "poll_s": 0.01,
            "take": lambda spec, avoid: Nothing(), "saved": lambda spec: None,
            "execute": lambda job, claim, have: Outcome("done", {}),
        }
        | about
    )  # fmt: skip


def _work(folder: Path, number: int) -> None:
    name = f"w{number}"
    lock = os.open(folder / "workers" / f"{name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = os.open(folder / "executed", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def execute(job, claim, have):
        os.write(done, f"{job.id} {name}\n".encode())
        code = os.waitpid(os.posix_spawn("/bin/sh", ["/bin/sh", "-c", *job.spec.arguments], {}), 0)[1]
        return Outcome("done" if code == 0 else "crash", {"retries": 0, "code": code})

    a_worker(name, execute=execute).work(Queue(folder), until_empty=True)


def test_eight_workers_run_two_thousand_jobs_once_each(tmp_path):
    queue = Queue(tmp_path)
    (tmp_path / "workers").mkdir()
    queue.add([spec(f"{i:04d}", arguments=[f"exit {int(i % 500 == 7)}"], priority=i % 3) for i in range(JOBS)])
    workers = [CHILDREN.Process(target=_work, args=(tmp_path, number)) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    executed = [line.split() for line in (tmp_path / "executed").read_text().splitlines()]
    assert sorted(id for id, _ in executed) == [f"{i:04d}" for i in range(JOBS)]  # every one, and none twice
    assert len({worker for _, worker in executed}) == WORKERS
    queue.refresh()
    states = Counter(queue.standing(job).state for job in queue.jobs.values())
    assert states == {"done": JOBS - 4, "failed": 4} and all(job.starts == 1 for job in queue.jobs.values())


def test_jobs_of_higher_priority_go_first_and_dependents_last(tmp_path):
    queue, ran = Queue(tmp_path), []

    def execute(job, claim, have):
        ran.append(job.id)
        return Outcome("done", {})

    queue.add([spec("a", after=["c"]), spec("b"), spec("c", priority=1), spec("d", priority=5)])
    assert a_worker("w", execute=execute).work(queue, until_empty=True) == 4
    assert ran == ["d", "c", "a", "b"]


def test_a_job_that_waits_for_gpus_is_passed_by_none_that_needs_one(tmp_path):
    queue, ran = Queue(tmp_path), []

    def execute(job, claim, have):
        ran.append(job.id)
        return Outcome("done", {})

    def take(spec, avoid):
        return Nothing() if spec.gpus < 2 else None  # one is free, two are wanted

    queue.add([spec("many", gpus=2), spec("one", gpus=1), spec("none"), spec("more-than-it-has", gpus=8, priority=9)])
    worker = a_worker("w", gpus=["GPU-1", "GPU-2"], take=take, execute=execute, stop=lambda: bool(ran))
    worker.work(queue)
    assert ran == ["none"] and [job.id for job in queue.in_order()] == ["more-than-it-has", "many", "one"]


def test_a_worker_leaves_when_only_jobs_for_others_are_left(tmp_path):
    queue = Queue(tmp_path)
    queue.add([spec("many", gpus=2), spec("held"), spec("after", after=["held"]), spec("one", gpus=1)])
    queue.hold("held", "not now")
    assert a_worker("w", gpus=["GPU-1"]).work(queue, until_empty=True) == 1
    assert a_worker("v", gpus=["GPU-1", "GPU-2"], most=1).work(queue, until_empty=True) == 0
    queue.refresh()
    assert queue.done("one") and not queue.done("many")


def test_gpus_go_back_when_somebody_else_was_first_and_when_a_job_breaks_the_worker(tmp_path):
    queue, free = Queue(tmp_path), []

    class Held(Nothing):
        def release(self):
            free.append("gpu")

    queue.add([spec("a", gpus=1), spec("b", gpus=1)])

    def take(spec, avoid):
        if spec.id == "a":  # the other worker claims it in this moment
            Queue(tmp_path).claim("a", "other", "there", "b2")
        return Held()

    def execute(job, claim, have):
        assert free == ["gpu"] and job.id == "b"
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError):
        a_worker("w", gpus=["GPU-1"], take=take, execute=execute).work(queue)
    assert free == ["gpu", "gpu"]
    assert queue.standing(queue.jobs["b"]).why == "worker_error: RuntimeError: a fault of ours"


def test_a_job_avoids_the_gpus_that_failed_it(tmp_path):
    queue, seen = Queue(tmp_path), []

    def take(spec, avoid):
        seen.append(set(avoid))
        return Nothing()

    def execute(job, claim, have):
        about = {"retries": 2, "avoid": ["GPU-1"]}
        return Outcome("done", {}) if len(seen) == 2 else Outcome("hardware", about)

    queue.add([spec("a", gpus=1)])
    a_worker("w", gpus=["GPU-1"], take=take, execute=execute).work(queue, until_empty=True)
    assert len(seen) == 1 and not queue.done("a")  # has no other GPU: leaves it to another worker
    a_worker("v", gpus=["GPU-1", "GPU-2"], take=take, execute=execute).work(queue, until_empty=True)
    assert seen == [set(), {"GPU-1"}] and queue.done("a")


def room(queue: Queue, clock: Clock, running: dict[str, tuple[int, int]], wanted: JobSpec) -> set[str]:
    """Which of the running jobs {id: (priority, gpus)} make room for a waiting one."""
    queue.add([spec(id, priority=priority, gpus=gpus) for id, (priority, gpus) in running.items()])
    for id in running:
        assert queue.claim(id, f"w-{id}", "here", "b1") is not None
    queue.add([wanted])
    assert not any(makes_room_for(queue, queue.jobs[id], "here", gpus=8) for id in running)  # patience first
    clock.now += PATIENCE_S
    return {id for id in running if makes_room_for(queue, queue.jobs[id], "here", gpus=8) is not None}


@pytest.mark.parametrize(
    ("running", "wanted", "leave"),
    [
        ({"a": (0, 1), "b": (1, 1), "c": (0, 1)}, {"gpus": 1, "priority": 2}, {"c"}),  # lowest priority, started last
        ({"a": (0, 1), "b": (1, 1), "c": (0, 1)}, {"gpus": 3, "priority": 2}, {"a", "b", "c"}),
        ({"a": (0, 1), "b": (2, 1)}, {"gpus": 2, "priority": 2}, set()),  # would not do: nobody leaves in vain
        ({"a": (1, 1)}, {"gpus": 1, "priority": 1}, set()),  # not above
        ({"a": (0, 4), "b": (0, 1)}, {"gpus": 1, "priority": 1}, {"b"}),
        ({"a": (0, 0)}, {"gpus": 0, "priority": 1}, {"a"}),  # a worker is wanted, no GPU
        ({"a": (0, 1)}, {"gpus": 1, "priority": 1, "after": ["a"]}, set()),
    ],
)
def test_who_makes_room(tmp_path, running, wanted, leave):
    clock = Clock()
    assert room(Queue(tmp_path, clock), clock, running, spec("wanted", **wanted)) == leave


def test_no_more_make_room_than_are_needed(tmp_path):
    clock = Clock()
    queue = Queue(tmp_path, clock)
    assert room(queue, clock, {"a": (0, 1), "b": (0, 1)}, spec("wanted", gpus=1, priority=1)) == {"b"}
    assert queue.preempt("b", queue.jobs["b"].claim, by="wanted")
    assert makes_room_for(queue, queue.jobs["a"], "here", gpus=8) is None
    assert makes_room_for(queue, queue.jobs["b"], "here", gpus=8) is None  # is on its way
    assert makes_room_for(queue, queue.jobs["a"], "elsewhere", gpus=8) is None
