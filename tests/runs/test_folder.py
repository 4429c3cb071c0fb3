"""Run folders: names, the record, finding a run again, and the lock."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dwslm.runs.folder import create_run, list_runs, open_run, slug
from dwslm.runs.writer import RunWriter

ROOT = Path(__file__).resolve().parents[2]

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_is_made_whole(tmp_path: Path) -> None:
    run = create_run(tmp_path, "Demo run", {"seed": 7, "cap": float("inf")}, clock=lambda: 0.0)
    assert re.fullmatch(r"19700101-000000-demo-run-[0-9a-f]{6}", run.path.name)
    assert run.path.name.endswith(run.id)
    assert os.listdir(tmp_path) == [run.path.name]  # nothing temporary is left
    assert os.listdir(run.path) == ["run.json"]
    text = (run.path / "run.json").read_text()
    assert json.loads(text)["cap"] == "Infinity"  # strict JSON: a browser can read it
    again = open_run(run.path, tmp_path)
    assert again.record == run.record
    assert again.record["seed"] == 7 and again.record["cap"] == float("inf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("main", "main"),
        ("KDA vs. GDN (8 layers)", "kda-vs.-gdn-8-layers"),
        ("../../etc/passwd", "etc-passwd"),
        ("<script>alert(1)</script>", "script-alert-1-script"),
        ("Zürich", "zurich"),
        ("計画", "run"),
        ("", "run"),
        ("a" * 10_000, "a" * 48),
    ],
)
def test_names_become_safe_folder_names(tmp_path: Path, name: str, expected: str) -> None:
    assert slug(name) == expected
    run = create_run(tmp_path, name, {})
    assert run.path.parent == tmp_path
    assert open_run(run.id, tmp_path).name == name  # the record keeps the name as given


def test_a_record_that_is_not_plain_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run record cannot be written as JSON: .*PosixPath"):
        create_run(tmp_path, "x", {"data": tmp_path})
    with pytest.raises(ValueError, match="may not hold id"):
        create_run(tmp_path, "x", {"id": "mine"})
    assert os.listdir(tmp_path) == []


def test_a_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(OSError, match="cannot create run folder .*/runs/.*: Not a directory") as caught:
        create_run(tmp_path / "runs", "x", {})
    assert "\n" not in str(caught.value)


def test_a_run_is_found_by_path_name_id_and_ending(tmp_path: Path) -> None:
    one = create_run(tmp_path, "Main Run", {}, clock=lambda: 1e9)
    create_run(tmp_path, "proxy", {}, clock=lambda: 2e9)
    create_run(tmp_path, "proxy", {}, clock=lambda: 3e9)
    for which in (one.path, one.path.name, one.id, one.id[2:], "Main Run", "main-run", f"run-{one.id}"):
        assert open_run(which, tmp_path).path == one.path
    assert open_run(one.path, "/nowhere").path == one.path
    assert open_run("latest", tmp_path).record["created"] == 3e9


def test_an_ambiguous_or_missing_run_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run 'main' in .* which holds no runs"):
        open_run("main", tmp_path)
    with pytest.raises(ValueError, match="no run 'x' in .*/absent, which holds no runs"):
        open_run("x", tmp_path / "absent")
    runs = [create_run(tmp_path, "proxy", {}) for _ in range(12)]
    with pytest.raises(ValueError, match="run 'proxy' is ambiguous: .*and 2 older; give the whole") as caught:
        open_run("proxy", tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no run 'main' in") as caught:
        open_run("main", tmp_path)
    assert sum(run.path.name in str(caught.value) for run in runs) == 10
    with pytest.raises(ValueError, match="no run '' in"):
        open_run("", tmp_path)
    (tmp_path / "mine").mkdir()
    for which in ("mine", str(tmp_path / "mine")):
        with pytest.raises(ValueError, match="/mine is no run: it has no run.json; .* holds .*proxy"):
            open_run(which, tmp_path)


def test_auto_is_the_newest_run_that_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no unfinished run in .* which holds no runs: start one first"):
        open_run("auto", tmp_path)
    runs = [create_run(tmp_path, f"r{n}", {}, clock=lambda n=n: 1e9 + n) for n in range(4)]  # type: ignore[misc]

    def log(run: int, *kinds: str) -> None:
        with RunWriter(runs[run], runs[run].next_attempt()) as writer:
            for kind in kinds:
                writer.event(kind, step=0, tokens=0)

    assert open_run("auto", tmp_path).path == runs[3].path  # it never started
    log(3, "start", "done")
    log(2, "start", "stopped", "checkpoint_deleted")  # what is no lifecycle event changes nothing
    log(1, "start", "failed")
    log(0, "start")
    assert open_run("auto", tmp_path).path == runs[1].path  # a failed run is unfinished work
    log(3, "resume")  # with a longer plan
    assert open_run("auto", tmp_path).path == runs[3].path
    for run in (3, 1, 0):
        log(run, "done")
    with pytest.raises(ValueError, match="no unfinished run in .*r3.*r0"):
        open_run("auto", tmp_path)


def test_an_unreadable_record_is_told_and_never_stepped_over(tmp_path: Path) -> None:
    good = create_run(tmp_path, "good", {}, clock=lambda: 1e9)
    bad = create_run(tmp_path, "bad", {}, clock=lambda: 2e9)
    (tmp_path / "notes").mkdir()  # somebody's own folder is no run
    (bad.path / "run.json").write_text('{"format_version": 1, "na')
    runs, unreadable = list_runs(tmp_path)
    assert [run.path for run in runs] == [good.path]
    assert [path for path, _ in unreadable] == [bad.path]
    for which in ("auto", "latest", bad.id, bad.path, "bad"):
        with pytest.raises(ValueError, match=f"{bad.path.name}/run.json cannot be read"):
            open_run(which, tmp_path)
    assert open_run("good", tmp_path).path == good.path
    (bad.path / "run.json").write_text('{"format_version": 99}')
    with pytest.raises(ValueError, match="format version 99, this program reads 1"):
        open_run(bad.id, tmp_path)
    (bad.path / "run.json").write_text('{"format_version": 1}')
    with pytest.raises(ValueError, match="is not a run record: KeyError"):
        open_run(bad.id, tmp_path)


def test_attempts_count_the_files_of_both_kinds(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x", {})
    assert run.next_attempt() == 1
    (run.path / "events-trainer-9.jsonl").touch()
    assert run.next_attempt() == 10  # a number, not a text: 10 comes after 9
    (run.path / "metrics-10.jsonl").touch()
    assert run.next_attempt() == 11
    (run.path / "events-supervisor-40.jsonl").touch()  # other writers count their own
    assert run.next_attempt() == 11
    assert run.next_attempt("supervisor") == 41


def test_runs_imports_no_torch() -> None:
    code = "import sys, dwslm.runs.folder, dwslm.runs.writer, dwslm.runs.reader; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "False"


HOLDER = """
import sys
from dwslm.runs.folder import open_run
run = open_run(sys.argv[1], ".")
with run.lock():
    print("held", flush=True)
    sys.stdin.readline()
print("free", flush=True)
sys.stdin.readline()
"""


def hold(run: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout and child.stdout.readline() == "held\n"
    return child


def test_a_run_is_started_by_one_process_only(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x", {})
    child = hold(run.path)
    try:
        with pytest.raises(ValueError, match=rf"{run.path.name} is in use by pid {child.pid} on \S+; stop"):
            run.lock()
        assert child.stdin and child.stdout
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "free\n"
        with run.lock(), pytest.raises(ValueError, match=f"in use by pid {os.getpid()} on"):
            run.lock()  # the same process counts too
        run.lock().release()
    finally:
        child.kill()
        child.communicate()


def test_kill_nine_frees_the_lock(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x", {})
    child = hold(run.path)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    run.lock().release()
