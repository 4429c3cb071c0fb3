"""Reading and joining benchmark JSON: one line for what is wrong, tolerance for what is left out."""

import json

import pytest

from dwslm.page.bench_file import Measured, join, read
from tests.page.bench_json import find, report, row, save


def test_what_the_file_says_is_what_is_read(tmp_path):
    data = report()
    piece = read(save(tmp_path, data))
    assert len(piece.rows) == len(data["rows"])
    flash = find(data, "attention", "global", "flash", 4096)
    read_row = next(r for r in piece.rows if r.key == ("attention", "global", "flash", 16384, 4096, 8))
    assert read_row.both == Measured(**flash["forward_backward_ms"])
    assert read_row.errors["dq"] == (0.004, 0.01)
    assert read_row.record and read_row.record.identical is True
    assert piece.ceilings["bf16_tflops"].median == 650.0
    assert (piece.device, piece.clock_cap, piece.complete) == ("Made-Up GPU", "no clock cap stated", True)


def test_the_worse_of_two_gates_is_kept(tmp_path):
    data = report()
    find(data, "attention", "global", "flash", 4096)["gate"]["size"] = {
        "errors": {"o": {"value": 0.001, "bound": 0.01}, "dq": {"value": 0.009, "bound": 0.01}}
    }
    flash = next(
        r for r in read(save(tmp_path, data)).rows if r.key == ("attention", "global", "flash", 16384, 4096, 8)
    )
    assert flash.errors == {"o": (0.004, 0.01), "dq": (0.009, 0.01)}


def test_a_bare_number_is_a_median_without_spread(tmp_path):
    data = report()
    cudnn = next(r for r in read(save(tmp_path, data)).rows if r.engine == "cudnn" and r.extra)
    assert cudnn.extra["graph"] == Measured(44.0, 0.0)


def test_almost_everything_may_be_left_out(tmp_path):
    bare = {"format": 1, "rows": [{"op": "norm", "engine": "eager", "status": "ok", "forward_backward_ms": 0.5}]}
    piece = read(save(tmp_path, bare))
    assert piece.rows[0].both == Measured(0.5)
    assert piece.device == "unknown device"


WRONG = [
    ("{", "not whole JSON"),
    ('{"format": 1, "rows": [{"op"', "not whole JSON"),
    ("[1, 2]", "not a report of `dwslm bench`"),
    ('{"loss": 1}', "not a report of `dwslm bench`"),
    ('{"format": 1, "kind": "step", "builds": []}', "takes reports of `dwslm bench` on kernels only"),
    ('{"format": 2, "rows": []}', "is of format 2, and this version reads format 1"),
    ('{"format": 1, "rows": {}}', "rows: expected a list"),
    ('{"format": 1, "rows": [3]}', "rows[0]: expected an object, got 3"),
    ('{"format": 1, "rows": [{"op": "norm", "status": "ok"}]}', "rows[0].engine: expected text, got None"),
    (
        '{"format": 1, "rows": [{"op": "a", "engine": "b", "status": "fine"}]}',
        "rows[0].status: 'fine' is none of ok, failed",
    ),
    (
        '{"format": 1, "rows": [{"op": "a", "engine": "b", "status": "ok", "forward_ms": {"median": "fast"}}]}',
        "rows[0].forward_ms.median: expected a number, got 'fast'",
    ),
    ('{"format": 1, "rows": [], "machine": "H200"}', "machine: expected an object"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_what_is_wrong_is_one_line_that_names_the_file(text, expected, tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = json.dumps(report())
    path = tmp_path / "torn.json"
    for length in range(0, len(whole) - 1, 997):
        path.write_text(whole[:length])
        with pytest.raises(ValueError, match=r"torn.json: not whole JSON"):
            read(path)


def test_pieces_of_one_device_are_joined_and_the_later_row_stands(tmp_path):
    early = report(rows=[row("norm", "", "eager", ms=1.0), row("rope", "", "eager")], started="2026-01-01T00:00:00")
    late = report(rows=[row("norm", "", "eager", ms=2.0)], started="2026-01-02T00:00:00")
    # The order of the arguments is not the order of time.
    bench = join([save(tmp_path, late, "late.json"), save(tmp_path, early, "early.json")])
    assert {r.op: r.both.median for r in bench.rows} == {"norm": 2.0, "rope": 1.0}
    assert any("1 rows stand in more than one piece" in note for note in bench.notes)


def test_devices_and_clock_caps_are_not_mixed(tmp_path):
    here = save(tmp_path, report(), "here.json")
    other = report(machine={"device": "Another GPU"})
    with pytest.raises(ValueError, match="other.json: measured on Another GPU, but .*here.json on Made-Up GPU"):
        join([here, save(tmp_path, other, "other.json")])
    capped = report(machine={"device": "Made-Up GPU", "clock_cap_mhz": 1500})
    with pytest.raises(ValueError, match="clock cap 1,500 MHz, but .*no clock cap stated"):
        join([here, save(tmp_path, capped, "capped.json")])


def test_other_commits_versions_and_unfinished_runs_are_said(tmp_path):
    other = report(commit="f" * 40, versions={"torch": "2.12.0"}, complete=False)
    bench = join([save(tmp_path, report(), "a.json"), save(tmp_path, other, "b.json")])
    notes = " ".join(bench.notes)
    assert "different commits: 0123456789abcdef" in notes
    assert "different versions" in notes
    assert "b.json ended before its time" in notes
    assert "commit 0123456789ab, ffffffffffff" in bench.source


def test_differs_asks_for_more_than_either_spread():
    assert Measured(1.0, 0.1).differs(Measured(1.2, 0.05))
    assert not Measured(1.0, 0.1).differs(Measured(1.05, 0.01))
    assert not Measured(1.0, 0.01).differs(Measured(1.05, 0.1))
