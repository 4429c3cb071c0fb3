"""Jobs of the queue on the page: those that have no run, and what a job says of a run that has left."""

import json
import shutil

import pytest

from dwslm.page.export import export
from dwslm.page.watch import Watch, overview
from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import JobSpec
from tests.page.in_browser import MARKUP, poll, row, until
from tests.page.run_folders import BEGAN, Now, make_run, served
from tests.page.test_server import ask

HERE = {"worker": "w", "host": "here", "boot": "b1"}


def spec(id: str, **about) -> JobSpec:
    return JobSpec(**{"id": id, "name": f"name-{id}", "program": "train.py", "test": "t", "arm": id, **about})


def test_jobs_without_a_run_are_listed_as_they_stand(tmp_path):
    runs, now = tmp_path / "runs", Now(BEGAN)
    queue = Queue(tmp_path / "queue", now)
    ids = ["waits", "held", "out", "broke", "ran", "after", "own"]
    about = {"after": {"after": ["waits"]}, "own": {"program": "", "arguments": ["true"], "test": None, "arm": None}}
    queue.add([spec(id, **about.get(id, {})) for id in ids])
    now.now += 60
    queue.hold("held", "the GPU is wanted")
    queue.drop("out", "the paper loses below 689M", decision="K9")
    queue.end("broke", queue.claim("broke", **HERE), "bad_configuration", reason="no such setting", retries=0)
    make_run(runs, "ran", losses=[4.0], test="t", job="ran")
    queue.end("ran", queue.claim("ran", **HERE), "done")
    seen = overview(runs, BEGAN + 90, queue.folder)
    assert [(job.id, job.state, job.reason, job.since - BEGAN) for job in seen.jobs] == [
        ("own", "queued", "", 0),
        ("after", "queued", "waits for waits", 0),
        ("broke", "failed", "bad_configuration: no such setting", 60),
        ("out", "dropped", "the paper loses below 689M (K9)", 60),
        ("held", "paused", "waiting on purpose: the GPU is wanted", 60),
        ("waits", "queued", "", 0),
    ]
    export(runs, tmp_path / "out", None, now=BEGAN + 90, queue=queue.folder)
    index = (tmp_path / "out" / "index.html").read_text()
    for wanted in ("name-waits", "the paper loses below 689M (K9)", "1 run, 5 more not begun", '<section id="queue">'):
        assert wanted in index
    told = json.loads((tmp_path / "out" / "data" / "runs.json").read_text())
    counts = {state: n for state, n, _ in told["outcomes"]}  # a command of one's own is no run
    assert counts == {"queued": 2, "paused": 1, "done": 1, "failed": 1, "dropped": 1}


@pytest.mark.parametrize(
    ("deed", "state", "reason"),
    [
        ("hold", "paused", "waiting on purpose: tonight"),
        ("drop", "stopped", "enough seen (K3)"),
        ("priority", "queued", ""),
        ("lost", "queued", "lost; tried again in 30 s"),
        ("failed", "failed", "hang: no step for an hour"),
    ],
)
def test_a_run_that_has_left_stands_as_its_job_does(tmp_path, deed, state, reason):
    runs, now = tmp_path / "runs", Now(BEGAN)
    run = make_run(runs, losses=[4.0], job="j", end=None if deed in ("lost", "failed") else "preempted")
    queue = Queue(tmp_path / "queue", now)
    queue.add([spec("j")])
    claim = queue.claim("j", **HERE)
    watch = Watch(runs, queue.folder)
    assert watch.look(BEGAN + 90).runs[0].state == ("lost" if deed in ("lost", "failed") else "paused")
    if deed == "hold":
        queue.hold("j", "tonight")
    elif deed == "drop":
        queue.drop("j", "enough seen", decision="K3")
    about = {"lost": {"retries": 3, "wait_s": 120.0}, "failed": {"retries": 0, "reason": "no step for an hour"}}
    queue.end("j", claim, {"lost": "lost", "failed": "hang"}.get(deed, "preempted"), **about.get(deed, {}))
    found = watch.look(BEGAN + 90)
    assert [(one.path, one.state, one.reason) for one in found.runs] == [(run.path, state, reason)] and not found.jobs
    assert overview(runs, BEGAN + 90, queue.folder).runs == found.runs


def test_what_the_runs_own_files_say_stands_while_it_runs_and_when_it_is_done(tmp_path):
    runs, now = tmp_path / "runs", Now(BEGAN)
    queue = Queue(tmp_path / "queue", now)
    queue.add([spec("a"), spec("b")])
    going = make_run(runs, "a", losses=[4.0], job="a", end=None)
    make_run(runs, "b", losses=[4.0], job="b", began=BEGAN + 1)
    queue.claim("a", **HERE)
    queue.drop("b", "too late")  # it was through before anybody heard of it
    with going.lock():
        plain, told = overview(runs, BEGAN + 60), overview(runs, BEGAN + 60, queue.folder)
    assert told.runs == plain.runs and [run.state for run in told.runs] == ["done", "running"]


def test_a_folder_that_is_no_queue_is_named(tmp_path):
    make_run(tmp_path / "runs")
    with pytest.raises(ValueError, match=r"nowhere is no queue; name another with --queue"):
        export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN, queue=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def break_queue(queue: Queue, how: str) -> str:
    """Returns a piece of what the page says of it."""
    log = queue.folder / "log"
    if how == "gone":
        shutil.rmtree(queue.folder)
        return "is no queue"
    if how == "gap":
        (log / "00000001.json").unlink()
        return "00000001.json is missing"
    if how == "later gap":
        (log / "00000004.json").write_text((log / "00000002.json").read_text())
        return "00000003.json is missing"
    if how == "not a file":
        (log / "00000003.json").mkdir()
        return "cannot read "
    (log / "00000003.json").write_text('{"event": "add", "jobs": [{}]}')
    return "lacks what it should say"


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("how", ["gone", "gap", "later gap", "not a file", "no job"])
def test_a_damaged_queue_is_named_in_one_line_and_the_runs_go_on(tmp_path, how, read_before):
    runs, now = tmp_path / "runs", Now(BEGAN)
    queue = Queue(tmp_path / "queue", now)
    queue.add([spec("waits")])
    queue.add([spec("more")])
    folder = make_run(runs, "r", losses=[4.0]).path.name
    with served(runs, now, queue=queue.folder) as server:
        if read_before:
            assert b"name-waits" in ask(server, "/")[1]
        wanted = break_queue(queue, how)
        now.now += 5
        for path in ("/", f"/runs/{folder}.html", f"/data/{folder}.json", "/data/runs.json"):
            assert ask(server, path)[0].status == 200, path
        told = json.loads(ask(server, "/data/runs.json")[1])
        assert wanted in told["queue_wrong"] and "\n" not in told["queue_wrong"] and told["jobs"] == []
        assert [run["run"] for run in told["runs"]] == [folder]
        index = ask(server, "/")[1].decode()
        assert '<section id="queue">' in index and wanted in index
        shutil.rmtree(queue.folder, ignore_errors=True)
        Queue(queue.folder, now).add([spec("mended")])
        now.now += 5
        told = json.loads(ask(server, "/data/runs.json")[1])
        assert told["queue_wrong"] == "" and [job[3][0] for job in told["jobs"]] == ["name-mended"]


@pytest.mark.parametrize("events", [1, 2, 3])
def test_a_queue_made_anew_in_the_same_folder_is_noticed(tmp_path, events):
    """With fewer events than were read, as many, or more."""
    make_run(tmp_path / "runs")
    queue = Queue(tmp_path / "queue")
    queue.add([spec("old")])
    queue.add([spec("older")])
    watch = Watch(tmp_path / "runs", queue.folder)
    assert {job.id for job in watch.look(BEGAN).jobs} == {"old", "older"}
    shutil.rmtree(queue.folder)
    new = Queue(queue.folder)
    for number in range(events):
        new.add([spec(f"new-{number}")])
    assert [job.id for job in watch.look(BEGAN + 5).jobs] == [f"new-{n}" for n in reversed(range(events))]


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 1280])
def test_jobs_come_and_go_while_the_page_is_open(tmp_path, visit, width):
    runs, now = tmp_path / "runs", Now(BEGAN)
    queue = Queue(tmp_path / "queue", now)
    queue.add([spec("a"), spec("b", name=MARKUP, arm=MARKUP)])
    with served(runs, now, queue=queue.folder) as server:
        page = visit("about:blank", wait=False, viewport={"width": width, "height": 900})
        page.clock.install()
        page.goto(server.url)
        jobs = page.locator("#jobs tbody tr")
        names = "all => all.map((one) => one.firstChild.data)"
        assert jobs.locator("th").evaluate_all(names) == [MARKUP, "name-a"]
        as_made = jobs.nth(1).evaluate("(one) => one.outerHTML")
        poll(page)
        assert jobs.nth(1).evaluate("(one) => one.outerHTML") == as_made  # the script makes the same
        queue.hold("a", "tonight")
        now.now += 5
        poll(page)
        assert "paused" in jobs.nth(1).inner_text() and "waiting on purpose: tonight" in jobs.nth(1).inner_text()
        page.locator("#states button").filter(has_text="paused").click()
        assert not jobs.nth(0).is_visible() and jobs.nth(1).is_visible()
        page.locator("#states button").filter(has_text="paused").click()
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == width
        make_run(runs, "b", losses=[4.0], job="b")
        queue.drop("a", "enough")
        now.now += 5
        poll(page)
        assert "dropped" in jobs.inner_text() and row(page, "b").count() == 1
        make_run(runs, "a", losses=[4.0], job="a", began=BEGAN + 1)
        now.now += 5
        poll(page)
        until(page, "document.getElementById('queue').hidden")
        shutil.rmtree(queue.folder)
        now.now += 5
        poll(page)
        until(page, "document.getElementById('queue-wrong').innerText.includes('is no queue')")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        Queue(queue.folder, now).add([spec("c")])
        now.now += 5
        poll(page)
        until(page, "document.getElementById('queue-wrong').hidden && !document.getElementById('queue').hidden")
