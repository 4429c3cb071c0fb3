"""What a page knows of a run: checkpoints and why they are kept, health, comparisons."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from dwslm.page import compare as compare_module
from dwslm.page.compare import brief, compare, siblings, stored_brief, verdict_words
from dwslm.page.curves import Line, curves, ticks
from dwslm.page.run_charts import plain, plots
from dwslm.page.run_data import RunReader
from dwslm.page.run_page import article
from dwslm.page.run_words import cells, event_rows, latest_scores, slice_key
from dwslm.page.site import draw_run, finish, folder_of, mark
from dwslm.page.watch import Watch, overview
from dwslm.runs.summary import summaries
from dwslm.runs.writer import Clock, RunWriter
from tests.page.run_folders import BEGAN, add_scores, append, make_run, report


def read(run):
    return RunReader(run).read()[1]


def test_checkpoints_say_why_they_are_kept(tmp_path):
    run = make_run(tmp_path, losses=[3.0])
    with RunWriter(run, 2) as writer:
        for step in (10, 20, 30, 40, 50):
            writer.event("checkpoint", step=step, tokens=step * 8, path=f"step-{step:08d}", seconds=1.5)
        writer.event("checkpoint_deleted", path="step-00000010")
    for step in (20, 30, 40, 50, 60):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"step-{step:08d}" / "manifest.json").touch()
    (run.checkpoints / "step-00000060" / "manifest.json").unlink()  # half deleted: none
    (run.checkpoints / "step-00000020.pin-at-75-percent").touch()
    (run.checkpoints / "step-00000020.pin-best").touch()
    saved = {one.step: one for one in read(run).saved}
    assert list(saved) == [50, 40, 30, 20, 10]
    assert saved[20].kept == ("at 75 percent", "best")
    assert saved[50].kept == saved[40].kept == saved[30].kept == ("one of the last 3",)
    assert saved[10].deleted and not saved[10].kept
    assert (saved[50].tokens, saved[50].seconds) == (400, 1.5)


def test_health_keeps_dips_and_peaks_over_hosts(tmp_path):
    run = make_run(tmp_path, losses=[3.0])
    with RunWriter(run, 1, writer="supervisor") as writer:
        writer.event("supervised", clock_cap_mhz=2400)
    for host in ("a", "b"):
        with open(run.path / f"health-{host}.jsonl", "w") as file:
            for i in range(5000):
                dip, peak = (900, 2500) if host == "b" and i == 3210 else (2390, 2400)
                row = {"time": BEGAN + i, "gpu": "x", "power_w": {"min": 1, "mean": 300.0, "max": 400.0},
                       "sm_mhz": {"min": dip, "mean": 2395, "max": peak}, "temperature_c": None, "memory_used": 5e9}  # fmt: skip
                file.write(json.dumps(row) + "\n")
    data = read(run)
    health = data.health
    assert len(health["hours"]) <= 500
    assert health["clock_low"].min() == 900 and health["clock"].max() == 2500
    at = health["clock_low"].argmin()
    assert math.isclose(health["hours"][at], 3210 / 3600, abs_tol=10 / 3600)
    np.testing.assert_allclose(health["power"], 300)
    assert data.clock_cap == 2400
    drawn = plots(data)
    assert {"power", "clock", "memory"} <= {figure.name for figure in drawn.figures}
    assert "temperature" not in {figure.name for figure in drawn.figures}  # nothing was told of it
    assert drawn.sets["health"]["cap"].tolist() == [2400.0] * len(health["hours"])


def test_runs_of_a_test_are_compared_by_tokens_and_by_hours(tmp_path):
    """Arm `fast` is worse at every token and takes half the time; by the clock it is ahead."""
    slow = [5 - 0.02 * i for i in range(60)]
    make_run(tmp_path, "slow", losses=slow, test="t", arm="slow", seconds=20)
    make_run(tmp_path, "fast", losses=[loss + 0.1 for loss in slow], test="t", arm="fast", seconds=10, began=BEGAN + 1)
    make_run(tmp_path, "other", losses=slow, test="u")
    runs = {run.name: run for run in summaries(tmp_path, BEGAN)}
    others = siblings(runs["slow"], list(runs.values()))
    assert [one.name for one in others] == ["fast"]
    briefs = {run.path.name: brief(read(folder_of(run))) for run in runs.values()}
    plot, table = compare(runs["slow"], others, briefs)
    tokens, hours = table.rows[1][4].value, table.rows[1][5].value
    assert math.isclose(tokens, 0.1, abs_tol=1e-9)
    # At the fast arm's end, 600 s: the slow one is at step 30, mean of steps 11 to 30; the fast one's is of 41 to 60.
    assert math.isclose(hours, 0.1 - 0.02 * 30, abs_tol=1e-6)
    assert [chart.over for chart in plot.figures[0].charts] == ["tokens", "hours"]
    assert table.verdicts[0].startswith("Verdict: no arm can be called better: no arm has two seeds")


def test_a_verdict_is_left_to_the_command_where_it_would_take_long(tmp_path, monkeypatch):
    for i in range(4):
        make_run(tmp_path, f"r{i}", losses=[4 - i] * 30, test="a test", arm=str(i // 2), seed=i % 2, began=BEGAN + i)
    runs = summaries(tmp_path, BEGAN)
    assert not verdict_words(runs).startswith("The verdict")
    assert verdict_words([*runs[:1], *[replace(one, step=None) for one in runs[1:]]]).startswith(
        "Verdict: none, fewer than two"
    )
    monkeypatch.setattr(compare_module, "VERDICT_BYTES", 1000)
    assert verdict_words(runs).endswith("dwslm results verdict 'a test'")


def test_a_stored_brief_is_the_brief(tmp_path):
    data = read(make_run(tmp_path, losses=[4.0, 3.0, math.nan, 2.0]))
    made, stored = brief(data), stored_brief(json.loads(json.dumps({"own": plots(data).to_dict()})))
    for name in ("tokens", "hours", "loss"):
        np.testing.assert_array_equal(getattr(made, name), getattr(stored, name))


def test_scores_compare_with_the_scoring_before_of_the_same_text(tmp_path):
    run = make_run(tmp_path, losses=[4.0] * 20)
    add_scores(run, 10, 2.0, wiki=1.5, code=2.5)
    add_scores(run, 20, 1.8, wiki=1.4, code=2.2)
    rows, before = latest_scores(read(run).evals)
    assert [row["bits_per_byte"] for row in rows] == [1.4, 2.2, 1.8]
    assert [before[slice_key(row)] for row in rows] == [1.5, 2.5, 2.0]


def test_events_are_told_newest_first_without_their_bookkeeping(tmp_path):
    run = make_run(tmp_path, losses=[4.0], end=None)
    with RunWriter(run, 2, clock=Clock(wall=lambda: BEGAN + 100, mono=lambda: 0.0)) as writer:
        writer.event("skip", step=7, tokens=1, reason="loss not finite", loss=math.nan, rows=[1, 2], empty=None)
    (when, kind, step, what), first = event_rows(read(run).events)
    assert (when, kind, step) == ("2026-11-29 19:21", "skip", "7")
    assert what == "reason loss not finite; loss nan; rows 1, 2"
    assert first[1] == "start"


def test_a_page_is_made_anew_only_when_it_would_differ(tmp_path):
    run = make_run(tmp_path, losses=[4.0], end=None)

    def marked(now):
        seen = overview(tmp_path, now)
        return mark(seen.runs[0], seen)

    with run.lock():
        now = BEGAN + 60
        before = marked(now)
        assert marked(now + 5) == before
        assert marked(now + 700) != before  # stale by now
        append(run, [report(2, 3.0)], now)
        assert marked(now) != before


def test_the_next_look_sees_what_the_first_would(tmp_path):
    """Whatever happens to the folder, a watch that looks again gives what a fresh look gives."""
    watch = Watch(tmp_path)
    run = make_run(tmp_path, "a", losses=[4.0], end=None)
    done = make_run(tmp_path, "b", losses=[4.0], began=BEGAN + 1)

    def same(now):
        again, fresh = watch.look(now), overview(tmp_path, now)
        # How long a lost run has been silent may be told a minute late.
        assert [replace(one, reason="") for one in again.runs] == [replace(one, reason="") for one in fresh.runs]
        assert [path for path, _ in again.unreadable] == [path for path, _ in fresh.unreadable]
        return {one.name: one.state for one in again.runs}

    with run.lock():
        assert same(BEGAN + 20) == {"a": "running", "b": "done"}
        assert same(BEGAN + 700) == {"a": "stale", "b": "done"}
        append(run, [report(2, 3.0)], BEGAN + 700)
        assert same(BEGAN + 701)["a"] == "running"
    assert same(BEGAN + 702)["a"] == "lost"
    with done.lock():  # goes on after its end
        assert same(BEGAN + 703)["b"] == "running"
    assert same(BEGAN + 704)["b"] == "done"
    make_run(tmp_path, "c", began=BEGAN + 2)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    assert list(same(BEGAN + 705)) == ["c", "b", "a"]
    done.path.rename(tmp_path / ".gone")
    assert list(same(BEGAN + 706)) == ["c", "a"]


def test_runs_with_nothing_but_a_record_can_be_shown(tmp_path):
    run = make_run(tmp_path, end=None, config=None, seed=None, planned_tokens=None)
    (run.path / "events-trainer-1.jsonl").unlink()
    data = read(run)
    summary = summaries(tmp_path, BEGAN)[0]
    assert "No reports yet" in article(summary, data, plots(data))
    assert cells(summary)[1].text == "queued"


def test_rows_that_are_not_finite_leave_gaps(tmp_path):
    losses = [4.0, math.nan, math.inf, 3.0]
    data = read(make_run(tmp_path, losses=losses))
    content = plots(data).to_dict()
    assert content["sets"]["reports"]["loss"] == [4.0, None, None, 3.0]
    assert "NaN" not in json.dumps(content, allow_nan=False)
    assert "2 of the points are not finite" in article(summaries(tmp_path, BEGAN)[0], data, plots(data))


def test_paths_break_where_a_value_is_missing():
    line = Line(np.arange(5.0), np.array([0, 1, np.nan, 1, 0.0]), "s0")
    svg = curves("n", "T<", "D&", [line], x_text=str, y_text=str)
    path = svg.split(' d="')[1].split('"')[0]
    assert path.count("M") == 2 and path.startswith("M0.0 ")
    assert "T&lt;" in svg and "D&amp;" in svg
    alone = curves("n", "t", "d", [Line(np.array([1.0]), np.array([1.0]), "s0")], x_text=str, y_text=str)
    assert "h0" in alone
    assert "<path" in curves("n", "t", "d", [Line(np.empty(0), np.empty(0), "s0")], x_text=str, y_text=str)


@pytest.mark.parametrize(
    ("low", "high", "log", "wanted"),
    [(0, 10, False, [0, 5, 10]), (0, 1, False, [0, 0.5, 1]), (2.5, 3.1, False, [2.6, 2.8, 3.0]),
     (1, 1000, True, [1, 10, 100, 1000]), (5, 5, False, [5])],
)  # fmt: skip
def test_ticks_are_round(low, high, log, wanted):
    np.testing.assert_allclose(ticks(low, high, log), wanted)


def test_plain_numbers_keep_every_digit():
    values = np.array([0.1, 10.515299797058105, 1 / 3])
    assert plain(values) == values.tolist()
    assert json.dumps(plain(np.array([1.0, 2.0**40]))) == "[1, 1099511627776]"


def test_a_run_whose_files_cannot_be_read_is_shown_as_such(tmp_path):
    run = make_run(tmp_path, "torn", losses=[4.0], test="t")
    make_run(tmp_path, "mate", losses=[4.0], test="t", began=BEGAN + 1)
    torn, mate = sorted(summaries(tmp_path, BEGAN), key=lambda one: one.name != "torn")
    (run.path / "metrics-1.jsonl").unlink()
    (run.path / "metrics-1.jsonl").mkdir()  # opening it is an error, to root too
    drawn = draw_run(torn, RunReader(run))
    html, numbers = finish(torn, drawn, [mate], {mate.path.name: brief(read(folder_of(mate)))}, "m")
    assert "The files of this run cannot be read" in html and "Runs of t" in html
    assert set(json.loads(numbers)["test"]["charts"]) == {"test-tokens", "test-hours"}
