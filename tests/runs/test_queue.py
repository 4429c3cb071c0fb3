"""The queue's log and states, with a clock of the test's own and locks held here."""

import fcntl
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwslm.runs.queue import SILENT_S, Queue, held
from dwslm.runs.queue_job import JobSpec
from dwslm.runs.queue_log import QueueLog

HERE = {"host": "here", "boot": "b1"}


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


def spec(id, **about) -> JobSpec:
    return JobSpec(id=id, name=f"name-{id}", program="", arguments=["true"], gpus=0, **about)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(tmp_path, clock):
    return Queue(tmp_path / "queue", clock)


def lock(queue: Queue, worker: str) -> int:
    """The worker's lock, held by this process until the descriptor is closed."""
    path = queue.lock_path(worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def state(queue: Queue, id: str) -> str:
    return queue.standing(queue.jobs[id]).state


def next_id(queue: Queue) -> str | None:
    return next((job.id for job in queue.in_order()), None)


def test_a_job_is_queued_running_done(queue):
    queue.add([spec("a")])
    assert state(queue, "a") == "queued"
    claim = queue.claim("a", "w", **HERE)
    assert claim is not None and state(queue, "a") == "running"
    assert Queue(queue.folder, queue.clock).claim("a", "v", **HERE) is None
    queue.end("a", claim, "done")
    assert state(queue, "a") == "done" and next_id(queue) is None
    again = Queue(queue.folder, queue.clock)  # from the files alone
    assert state(again, "a") == "done" and again.jobs["a"].starts == 1


def test_priority_first_then_as_added(queue):
    queue.add([spec("a"), spec("b", priority=2), spec("c", priority=2), spec("d", priority=-1)])
    assert [job.id for job in queue.in_order()] == ["b", "c", "a", "d"]


def test_a_job_waits_for_those_it_names(queue):
    queue.add([spec("a", after=["b"]), spec("b")])
    assert next_id(queue) == "b"
    queue.end("b", queue.claim("b", "w", **HERE), "crash", retries=0, reason="broke")
    assert queue.standing(queue.jobs["a"]).why == "waits for b, which will not be done"
    assert not queue.may_become_ready()
    queue.retry("b")
    queue.end("b", queue.claim("b", "w", **HERE), "done")
    assert next_id(queue) == "a"
    with pytest.raises(ValueError, match="jobs wait for each other: "):
        queue.add([spec("d", after=["e"]), spec("e", after=["d"])])
    with pytest.raises(ValueError, match="waits for nobody, which is not in"):
        queue.add([spec("c", after=["nobody"])])


def test_jobs_are_added_all_or_none(queue):
    queue.add([spec("a")])
    with pytest.raises(ValueError, match="job a is in the queue already"):
        queue.add([spec("b"), spec("a")])
    with pytest.raises(ValueError, match="no, thanks"):
        queue.add([spec("b")], check=lambda: (_ for _ in ()).throw(ValueError("no, thanks")))
    assert list(Queue(queue.folder).jobs) == ["a"]


def test_a_hold_is_on_purpose_and_never_stale(queue, clock):
    queue.add([spec("a")])
    queue.hold("a", "the GPU is wanted elsewhere", until=clock.now + 100_000)
    clock.now += 50_000
    standing = queue.standing(queue.jobs["a"])
    assert standing.state == "paused" and "the GPU is wanted elsewhere" in standing.why and next_id(queue) is None
    clock.now += 50_001  # the hold has run out
    assert next_id(queue) == "a"
    assert queue.claim("a", "w", **HERE) is not None and queue.jobs["a"].hold is None
    queue.hold("a", "again")
    assert queue.standing(queue.jobs["a"]).why == "was asked to save and leave"
    queue.end("a", queue.jobs["a"].claim, "preempted")
    assert state(queue, "a") == "paused"
    queue.release("a")
    assert next_id(queue) == "a"
    with pytest.raises(ValueError, match="is not held"):
        queue.release("a")


def test_a_run_that_says_nothing_for_ten_minutes_is_stale(queue, clock):
    queue.add([spec("a")])
    claim = queue.claim("a", "w", **HERE)
    job = queue.jobs["a"]
    clock.now = claim.time + 599
    assert queue.standing(job).state == "running"
    clock.now = claim.time + 600
    assert queue.standing(job).state == "stale"
    assert queue.standing(job, reported=claim.time + 60).state == "running"


def test_a_preempted_job_keeps_its_place(queue):
    queue.add([spec("a"), spec("b")])
    claim = queue.claim("a", "w", **HERE)
    assert queue.preempt("a", claim, by="x") and not queue.preempt("a", claim, by="y")
    for _ in range(20):  # however often
        queue.end("a", queue.jobs["a"].claim, "preempted")
        assert [job.id for job in queue.in_order()] == ["a", "b"]
        queue.claim("a", "w", **HERE)


def test_failures_are_tried_again_after_a_wait_and_not_for_ever(queue, clock):
    queue.add([spec("a")])
    for left in (2, 1, 0):
        queue.end("a", queue.claim("a", "w", **HERE), "cuda_error", retries=2, wait_s=30, reason="Xid 31")
        assert state(queue, "a") == ("queued" if left else "failed")
        assert next_id(queue) is None
        clock.now += 31
        assert next_id(queue) == ("a" if left else None)
    assert queue.standing(queue.jobs["a"]).why == "cuda_error: Xid 31"
    queue.retry("a")
    assert next_id(queue) == "a" and not queue.jobs["a"].failures


def test_a_new_checkpoint_forgives_failures(queue):
    queue.add([spec("a")])
    for saved in (None, 100, 200, 300, 300):
        assert state(queue, "a") == "queued"
        queue.end("a", queue.claim("a", "w", **HERE), "crash", retries=1, saved=saved)
    assert state(queue, "a") == "failed"  # twice at step 300


def test_dropped_before_it_ran_or_stopped_after(queue):
    queue.add([spec("a"), spec("b"), spec("c")])
    queue.drop("a", "the paper loses below 689M", decision="K9")
    assert state(queue, "a") == "dropped" and queue.jobs["a"].decision == "K9"
    claim = queue.claim("b", "w", **HERE)
    queue.drop("b", "enough seen")
    queue.end("b", claim, "preempted")
    assert state(queue, "b") == "stopped" and queue.standing(queue.jobs["b"]).why == "enough seen"
    claim = queue.claim("c", "w", **HERE)
    queue.drop("c", "too late")
    queue.end("c", claim, "done")  # it was through before it heard of it
    assert state(queue, "c") == "done"
    with pytest.raises(ValueError, match="nothing to drop"):
        queue.drop("c", "again")
    with pytest.raises(ValueError, match="or done"):
        queue.retry("c")


# ---- workers that vanish --------------------------------------------------------------------------------


def test_a_claim_ends_with_its_workers_lock(queue):
    queue.add([spec("a")])
    fd = lock(queue, "w")
    claim = queue.claim("a", "w", **HERE)
    assert queue.reap(**HERE, saved=lambda spec: None) == []
    os.close(fd)
    other = Queue(queue.folder, queue.clock)
    assert other.reap(**HERE, saved=lambda spec: 16) == ["a"]
    assert next_id(other) == "a" and other.jobs["a"].saved == 16
    queue.refresh()
    taken = other.claim("a", "v", **HERE)
    queue.end("a", claim, "done")  # the old worker's word comes too late
    assert queue.jobs["a"].claim == taken and state(queue, "a") == "running"


def test_a_worker_that_vanishes_again_and_again_takes_the_job_along(queue, clock):
    queue.add([spec("a")])
    for waits in (0, 30, 120):
        queue.claim("a", "w", **HERE)
        queue.reap(**HERE, saved=lambda spec: None)
        assert queue.jobs["a"].not_before == clock.now + waits
        clock.now += waits
    queue.claim("a", "w", **HERE)
    queue.reap(**HERE, saved=lambda spec: None)
    assert state(queue, "a") == "failed"


def test_a_reboot_and_a_silent_host_end_claims_too(queue, clock):
    queue.add([spec("a"), spec("b")])
    fd = lock(queue, "w")
    queue.claim("a", "w", host="here", boot="b0")
    queue.claim("b", "w", host="there", boot="b9")
    os.utime(queue.lock_path("w"), (clock.now, clock.now))
    assert queue.gone(queue.jobs["a"].claim, **HERE) is None  # another machine of this name would still touch its lock
    clock.now += 121
    assert queue.gone(queue.jobs["a"].claim, **HERE) == "the machine was started anew"
    clock.now += SILENT_S - 122
    assert queue.gone(queue.jobs["b"].claim, **HERE) is None
    clock.now += 2
    assert queue.gone(queue.jobs["b"].claim, **HERE) == "host there is silent for 1 h"
    os.close(fd)


def test_a_lock_is_held_until_the_last_descriptor_is_closed(queue):
    fd = lock(queue, "w")
    copy = os.dup(fd)
    os.close(fd)
    assert held(queue.lock_path("w"))
    os.close(copy)
    assert not held(queue.lock_path("w")) and not held(queue.folder / "nothing")


# ---- the log --------------------------------------------------------------------------------------------


def _append(folder: Path, who: int, count: int) -> None:
    log, seen = QueueLog(folder), []
    for i in range(count):
        event = {"event": "x", "who": who, "i": i}
        log.append(lambda event=event: event, lambda number, event: seen.append(number), durable=False)
    assert seen == list(range(1, len(seen) + 1))  # everything, once, in order, its own among it


def test_four_processes_write_one_log(tmp_path):
    work = multiprocessing.get_context("forkserver")
    writers = [work.Process(target=_append, args=(tmp_path, who, 50)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    events = [event for _, event in QueueLog(tmp_path).new()]
    assert len(events) == 200
    for who in range(4):
        assert [event["i"] for event in events if event["who"] == who] == list(range(50))
    assert all(not name.startswith(".new") for name in os.listdir(tmp_path))


def test_what_a_power_cut_left_empty_is_no_event(queue):
    queue.add([spec("a")])
    claim = queue.claim("a", "w", **HERE)
    for text in ("", "\0\0\0", '{"event": 3}', '{"ev'):
        (queue.folder / "log" / f"{queue.log.last + 1:08d}.json").write_text(text)
        queue.refresh()
    assert queue.log.damaged == 4 and state(queue, "a") == "running"
    queue.end("a", claim, "done")
    assert state(Queue(queue.folder), "a") == "done"


def test_an_end_stands_though_a_power_cut_took_its_claim(queue):
    queue.add([spec("a")])
    claim = queue.claim("a", "w", **HERE)
    queue.end("a", claim, "done")
    (queue.folder / "log" / f"{claim.number:08d}.json").write_text("")
    assert state(Queue(queue.folder), "a") == "done"


def test_a_missing_event_is_named(queue):
    queue.add([spec("a")])
    queue.hold("a", "x")
    queue.release("a")
    (queue.folder / "log" / "00000002.json").unlink()
    with pytest.raises(ValueError, match=r"00000002\.json is missing"):
        Queue(queue.folder)


def test_what_a_later_version_added_is_passed_over(queue):
    queue.add([spec("a")])
    path = queue.folder / "log" / "00000001.json"
    event = json.loads(path.read_text())
    event["jobs"][0]["colour"] = "blue"
    path.write_text(json.dumps(event))
    (queue.folder / "log" / "00000002.json").write_text('{"event": "painted", "job": "a", "time": 1}')
    assert state(Queue(queue.folder), "a") == "queued"


@pytest.mark.parametrize(
    ("about", "said"),
    [({"gpus": -1}, "gpus=-1"), ({"program": "rm"}, "'rm' of job"), ({"arguments": []}, "has no command")],
)
def test_what_makes_no_job(about, said):
    with pytest.raises(ValueError, match=said):
        JobSpec(**{"id": "a", "name": "n", "program": "", "arguments": ["true"], **about})


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["claim", "done", "fail", "preempted", "kill", "reap", "hold", "release", "retry", "drop", "later"]
        ),
        st.sampled_from(["a", "b", "c"]),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(ACTIONS)
def test_whatever_happens_a_job_has_one_worker_and_files_tell_all(tmp_path_factory, actions):
    clock = Clock()
    queue = Queue(tmp_path_factory.mktemp("queue"), clock)
    queue.add([spec("a"), spec("b", after=["a"]), spec("c", priority=1)])
    fds: dict[str, int] = {}
    workers = 0
    for action, id in actions:
        job = queue.jobs[id]
        before = job.claim
        if action == "claim":
            may = id in [each.id for each in queue.in_order()]
            workers += 1
            fd = lock(queue, f"w{workers}")
            claim = queue.claim(id, f"w{workers}", **HERE)
            assert (claim is not None) == may and not (before and claim)
            if claim is None:
                os.close(fd)
            else:
                fds[id] = fd
        elif action in ("done", "fail", "preempted") and before is not None and id in fds:
            queue.end(id, before, "crash" if action == "fail" else action, retries=1, wait_s=10)
            os.close(fds.pop(id))
        elif action == "kill" and id in fds:
            os.close(fds.pop(id))
        elif action == "reap":
            lost = queue.reap(**HERE, saved=lambda spec: None)
            assert all(each not in fds and queue.jobs[each].claim is None for each in lost)
        elif action == "hold" and not job.over:
            queue.hold(id, "wait")
        elif action == "release" and job.hold:
            queue.release(id)
        elif action == "retry" and job.over and not queue.done(id):
            queue.retry(id)
        elif action == "drop" and not job.over:
            queue.drop(id, "no")
        elif action == "later":
            clock.now += 60
        assert {each for each, job in queue.jobs.items() if job.claim} >= set(fds)
    for fd in fds.values():
        os.close(fd)
    again = Queue(queue.folder, clock)
    assert again.jobs == queue.jobs and again._waiting == queue._waiting and list(again.running) == list(again.running)
