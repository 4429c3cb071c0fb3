"""One line for every run, and a cache that never says anything else than the files."""

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest

from dwslm.runs import reader
from dwslm.runs import summary as module
from dwslm.runs.summary import CACHE, summaries, summary
from dwslm.runs.writer import Clock, RunWriter
from tests.runs.made import make_run


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    losses = [5.0 - step / 10 for step in range(1, 31)]
    run = make_run(
        tmp_path, "a [b]", losses=losses, scores={10: 1.5, 30: 1.25},
        settings={"proxy": {"test": "lr", "arm": "half"}}, seed=3,
    )  # fmt: skip
    (found,) = summaries(tmp_path)
    assert found.path == run.path and (found.id, found.name, found.test, found.arm) == (run.id, "a [b]", "lr", "half")
    assert (found.state, found.step, found.tokens, found.planned_tokens) == ("done", 30, 3000, 3000)
    assert found.loss == pytest.approx(fmean(losses[-20:])) and found.tokens_per_second == 1000.0
    assert (found.bits_per_byte, found.scored_step, found.mfu) == (1.25, 30, None)
    assert (found.finish, found.heard) == (1030.0, 1030.0)  # the time of `done`
    assert (found.attempts, found.seed, found.config_hash, found.tags) == (1, 3, "abc", ())


def test_what_is_expected_of_a_run_under_way(tmp_path: Path) -> None:
    make_run(tmp_path, losses=[3.0] * 10, planned_tokens=61_000, end=None)
    (found,) = summaries(tmp_path, now=1020.0)
    assert (found.state, found.finish) == ("running", 1020.0 + 60.0)  # 60,000 tokens at 1,000 a second
    (found,) = summaries(tmp_path, now=1010.0 + 700)
    assert (found.state, found.finish) == ("stale", None)


@pytest.mark.parametrize("end", ["paused", "preempted"])
def test_a_paused_run_has_no_finish(tmp_path: Path, end: str) -> None:
    make_run(tmp_path, losses=[3.0], end=end)
    assert [(found.state, found.finish) for found in summaries(tmp_path)] == [("paused", None)]


def test_zero_runs_and_runs_without_a_word(tmp_path: Path) -> None:
    assert summaries(tmp_path) == [] and summaries(tmp_path / "absent") == []
    make_run(tmp_path, end=None)
    for file in tmp_path.glob("*/events*"):
        file.unlink()
    (found,) = summaries(tmp_path)
    assert (found.state, found.step, found.loss, found.bits_per_byte, found.heard) == ("queued", None, None, None, None)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, losses=[2.0, 3.0])
    with RunWriter(run, 2) as writer:
        writer.metrics({"step": 3, "tokens": 300, "loss": math.nan, "tokens_per_second": math.inf})
    for _ in range(2):  # read, and from the cache
        (found,) = summaries(tmp_path)
        assert found.loss is not None and math.isnan(found.loss) and found.tokens_per_second == math.inf
    with RunWriter(run, 3) as writer:
        writer.metrics({"step": 4, "tokens": 400, "loss": 1.0, "tokens_per_second": -math.inf})
    (found,) = summaries(tmp_path)
    assert found.tokens_per_second is not None and math.isnan(found.tokens_per_second)  # both infinities have no mean


def test_newest_first_and_damaged_folders_left_out(tmp_path: Path) -> None:
    for number in (2, 3, 1):
        make_run(tmp_path, f"run {number}", created=1000.0 * number)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert [found.name for found in summaries(tmp_path)] == ["run 3", "run 2", "run 1"]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which parts of runs are read."""
    read: list[str] = []
    for name in ("_events", "_metrics", "_evals"):
        real = getattr(module, name)

        def note(run: object, real: object = real, name: str = name) -> object:
            read.append(name)
            return real(run)  # type: ignore[operator]

        monkeypatch.setattr(module, name, note)
    return read


def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path, f"run {number}", losses=[3.0, 2.0], scores={2: 1.0}) for number in range(3)]
    read = counted(monkeypatch)
    first = summaries(tmp_path, now=5000.0)
    assert len(read) == 9
    read.clear()
    assert summaries(tmp_path, now=5000.0) == first and read == []
    with RunWriter(runs[0], 1, writer="person") as writer:
        writer.event("tag", add=["keep"])
    assert {found.path: found.tags for found in summaries(tmp_path)}[runs[0].path] == ("keep",)
    with open(runs[1].path / "metrics-1.jsonl", "a") as file:
        file.write(json.dumps({"attempt": 1, "step": 3, "tokens": 300, "loss": 1.0, "time": 1.0, "mono": 1.0}) + "\n")
    read.clear()
    found = {one.path: one for one in summaries(tmp_path)}[runs[1].path]
    assert found.step == 3 and found.loss == 2.0 and sorted(read) == ["_events", "_metrics"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 0, "runs": {}}', '{"version": 1, "runs": {"x": 3}}'])
def test_a_cache_of_any_kind_changes_nothing(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path, losses=[3.0], scores={1: 1.0})
    first = summaries(tmp_path, now=5000.0)
    (tmp_path / CACHE).write_text(damage.replace('"x"', json.dumps(run.path.name)))
    assert summaries(tmp_path, now=5000.0) == first
    stored = json.loads((tmp_path / CACHE).read_text())
    stored["runs"][run.path.name]["events"]["figures"] = {"facts": {"colour": "red"}}
    (tmp_path / CACHE).write_text(json.dumps(stored))
    assert summaries(tmp_path, now=5000.0) == first
    (tmp_path / CACHE).unlink()
    assert summaries(tmp_path, now=5000.0) == first and (tmp_path / CACHE).is_file()
    assert [asdict(summary(run, now=5000.0))] == [asdict(one) for one in first]


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, losses=[3.0])

    def refused(self: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refused)
    assert len(summaries(tmp_path)) == 1 and os.listdir(tmp_path) != [CACHE]


def test_tags_come_and_go(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt, add, remove in ((1, ["a", "b"], []), (2, ["c", "a"], ["b"]), (3, "junk", None)):
        with RunWriter(run, attempt, writer="person", clock=Clock(lambda: 5000.0)) as writer:
            writer.event("tag", add=add, remove=remove)
    assert summaries(tmp_path)[0].tags == ("a", "c")


@pytest.mark.slow
def test_two_hundred_runs_of_44_000_rows(tmp_path: Path) -> None:
    """Rows are read from the ends of files, so that the length of a run does not matter; the bytes read are counted."""
    row = {
        "schema": 1,
        "attempt": 1,
        "loss": 2.5,
        "grad_norm": 0.5,
        "tokens_per_second": 182345.678,
        "text_share": 0.98,
    }
    text = "".join(
        json.dumps(row | {"step": step, "tokens": step * 524288, "time": 1e9 + step, "mono": float(step)}) + "\n"
        for step in range(1, 44_001)
    )
    first = make_run(tmp_path, "0", scores={44_000: 1.0})
    (first.path / "metrics-1.jsonl").write_text(text)
    for number in range(1, 200):
        run = make_run(tmp_path, str(number), scores={44_000: 1.0})
        os.link(first.path / "metrics-1.jsonl", run.path / "metrics-1.jsonl")  # 200 times 8 MB without the disk
    started = time.perf_counter()
    found = summaries(tmp_path)
    cold = time.perf_counter() - started
    started = time.perf_counter()
    assert len(summaries(tmp_path)) == 200
    warm = time.perf_counter() - started
    assert len(found) == 200 and {one.step for one in found} == {44_000}
    print(f"cold {cold:.2f} s, warm {warm:.3f} s, of {200 * len(text) / 1e9:.1f} GB")
    assert len(reader.last_metrics(first, 20)) == 20
