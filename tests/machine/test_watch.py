import json

import pytest

from dwslm.machine.watch import Deadlines, Progress, Tail


class Run:
    """A run folder and a clock that the test sets."""

    def __init__(self, folder, **deadlines):
        self.folder, self.now = folder, 1000.0
        self.progress = Progress(Deadlines(**deadlines), self.now)
        self.progress.follow(folder, set())

    def write(self, name, **row):
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.progress.look(self.now)

    def event(self, kind, **fields):
        self.write("events-trainer-1.jsonl", event=kind, **fields)

    def row(self, step):
        self.write("metrics-1.jsonl", step=step, tokens=10 * step)

    def later(self, seconds):
        self.now += seconds
        self.progress.look(self.now)
        return self.progress.overdue(self.now)


def test_the_start_may_take_its_time_and_no_more(tmp_path):
    run = Run(tmp_path, start=100)
    run.event("start")
    assert run.later(99) is None
    assert run.later(2) == "start: silent for 101 s before the first row; 100 s are allowed"


def test_a_step_has_a_floor_and_ten_times_the_usual(tmp_path):
    run = Run(tmp_path, step=60)
    run.event("start")
    for step in range(1, 6):
        run.now += 2
        run.row(step)
    assert run.progress.allowed("step") == 60  # ten times 2 is less
    assert run.later(59) is None and run.later(2).startswith("step: silent for 61 s after step 5")
    for step in range(6, 20):
        run.now += 20
        run.row(step)
    assert run.progress.allowed("step") == 200
    assert run.later(150) is None and run.later(51) is not None


def test_a_save_holds_a_step_up_and_has_its_own_deadline(tmp_path):
    run = Run(tmp_path, step=10, save=100)
    run.event("start")
    run.row(1)
    saving = tmp_path / "checkpoints" / "tmp-step-00000001"
    saving.mkdir(parents=True)
    assert run.later(50) is None
    saving.rmdir()
    run.event("checkpoint", step=1, seconds=50.0)
    assert run.progress.saved == 1 and run.progress.allowed("save") == 150  # three times the last one
    saving.mkdir()
    run.row(2)
    assert run.later(5) is None  # first seen now
    for _ in range(40):
        run.now += 5
        run.row(3)  # training goes on, the thread that saves does not
    assert run.progress.overdue(run.now).startswith("save: tmp-step-00000001 is not done after")


def test_a_scoring_follows_a_save(tmp_path):
    run = Run(tmp_path, step=10, evaluation=500)
    run.event("start")
    run.row(0)
    run.row(1)
    run.event("checkpoint", step=1, seconds=1.0)
    assert run.later(499) is None and run.later(2).startswith("evaluation: silent for 501 s")
    run.event("score", seconds=400.0)
    assert run.later(11).startswith("step:")
    assert run.progress.allowed("evaluation") == 1200


def test_rows_may_be_far_apart_before_it_is_known_how_far(tmp_path):
    run = Run(tmp_path, start=100, step=60)
    run.event("start")
    run.row(1)
    assert run.later(90) is None  # ten steps of nine seconds
    run.event("skip", step=2)  # told right before the row: no short interval
    run.row(2)
    assert run.progress.allowed("step") == 900
    assert run.later(900) is None and run.later(1).startswith("step: silent for 901 s after step 2")


def test_a_first_row_that_is_the_last_is_a_hang_after_the_time_of_a_start(tmp_path):
    run = Run(tmp_path, start=100, step=60)
    run.event("start")
    run.row(1)
    assert run.later(100) is None and run.later(1).startswith("step: silent for 101 s after step 1; 100 s are allowed")


def test_a_new_context_may_compile_as_long_as_a_start(tmp_path):
    run = Run(tmp_path, start=300, step=10, evaluation=20)
    run.event("start")
    for step in range(1, 4):
        run.now += 1
        run.row(step)
    run.event("checkpoint", step=3, seconds=0.1)
    run.event("score", step=3, seconds=1.0)
    run.event("rung", step=3, context=512)
    assert run.later(200) is None
    run.event("checkpoint", step=3, seconds=0.1)  # of a save that went on beside it
    assert run.later(299) is None
    run.row(4)
    assert run.progress.allowed("step") == 10  # what compiled is no usual interval
    assert run.later(9) is None and run.later(2).startswith("step:")
    run.row(5)
    run.event("rung", step=5, context=1024)
    assert run.later(300) is None and run.later(1).startswith("start: silent for 301 s after step 5")


@pytest.mark.parametrize(
    "event", [{"event": "checkpoint", "seconds": 0.1}, {"event": "rung"}, {"event": "rollback"}, {"event": "score"}]
)
def test_an_interval_that_holds_more_than_steps_is_not_a_usual_one(tmp_path, event):
    run = Run(tmp_path, start=1000, step=10)
    run.event("start")
    run.row(1)
    run.now += 200
    run.write("events-trainer-1.jsonl", **event)
    run.now += 100
    run.row(2)
    assert run.progress.allowed("step") == 1000
    run.now += 2
    run.row(3)
    assert run.progress.allowed("step") == 20


def test_what_is_seen_at_once_is_taken_in_the_order_in_which_it_was_written(tmp_path):
    run = Run(tmp_path, start=300, step=10, evaluation=500)
    run.event("start", mono=1.0)
    for step in range(1, 4):
        run.now += 1
        run.row(step)
    for begun, limit in (({"event": "rung"}, 300), ({"event": "checkpoint"}, 500)):
        for name, row in (
            ("metrics-1.jsonl", {"step": 4, "tokens": 40, "mono": 5.0}),
            ("events-trainer-1.jsonl", {**begun, "mono": 5.001}),
        ):
            with (tmp_path / name).open("a") as file:
                file.write(json.dumps(row) + "\n")
        assert run.later(1) is None and run.later(limit) is None and run.later(1) is not None


def test_after_its_last_word_it_must_go(tmp_path):
    run = Run(tmp_path, save=30)
    run.event("start")
    run.row(1)
    run.event("done", step=1)
    assert run.later(29) is None and run.later(2).startswith("end: silent for 31 s")


def test_files_of_earlier_attempts_are_not_read_and_new_ones_are(tmp_path):
    (tmp_path / "events-trainer-1.jsonl").write_text('{"event": "failed"}\n')
    progress = Progress(Deadlines(), 0.0)
    progress.follow(tmp_path, {"events-trainer-1.jsonl"})
    progress.look(1.0)
    assert progress.last is None
    (tmp_path / "events-trainer-2.jsonl").write_text('{"event": "resume", "step": 4}\n')
    progress.look(2.0)
    assert progress.last == {"event": "resume", "step": 4}
    (tmp_path / "events-trainer-3.jsonl").write_text('{"event": "resume", "step": 2}\n')  # went back by itself
    (tmp_path / "metrics-3.jsonl").write_text('{"step": 3, "tokens": 30}\n')
    progress.look(3.0)
    assert progress.last["step"] == 2 and (progress.step, progress.tokens, progress.rows) == (3, 30, 1)


def test_a_line_counts_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "rows"
    tail = Tail(path)
    assert list(tail) == []
    path.write_text('{"a": 1}\n{"a"')
    assert list(tail) == [{"a": 1}] and list(tail) == []
    with path.open("a") as file:
        file.write(': 2}\nnot json\n[3]\n{"a": 4}\n')
    assert list(tail) == [{"a": 2}, {"a": 4}]


@pytest.mark.parametrize("name", ["start", "step", "save", "evaluation", "step_factor", "save_factor"])
def test_a_deadline_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"deadline {name}=0"):
        Deadlines(**{name: 0})
