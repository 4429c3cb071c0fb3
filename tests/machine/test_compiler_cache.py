import os
import time

from dwslm.machine.compiler_cache import empty_files, move_aside


def make(path, text="", age=3600.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_an_entry_with_an_empty_file_goes_as_a_whole_and_the_rest_stays(tmp_path):
    cache = tmp_path / "cache"
    broken = make(cache / "ABC" / "kernel.cubin")
    make(cache / "ABC" / "kernel.json", "{}")
    make(cache / "DEF" / "kernel.cubin", "x")
    top = make(cache / "top.bin")
    assert empty_files(cache) == [broken, top]
    moved = move_aside([cache])
    assert [(m.source, m.empty) for m in moved] == [(cache / "ABC", ["kernel.cubin"]), (top, ["top.bin"])]
    assert not (cache / "ABC").exists() and not top.exists()
    assert (cache / "DEF" / "kernel.cubin").read_text() == "x"
    assert {p.name for p in moved[0].target.iterdir()} == {"kernel.cubin", "kernel.json"}
    assert moved[0].target.parent.parent == tmp_path  # beside the cache, not in it
    assert move_aside([cache]) == []


def test_what_is_empty_by_nature_or_just_being_written_stays(tmp_path):
    make(tmp_path / "a" / "x.lock")
    make(tmp_path / "a" / "__init__.py")
    make(tmp_path / "b" / "kernel.cubin", age=1.0)
    os.symlink(make(tmp_path / "elsewhere"), tmp_path / "a" / "link")
    assert empty_files(tmp_path / "a") == [] and empty_files(tmp_path / "b") == []
    assert empty_files(tmp_path / "b", recent_s=0.5) == [tmp_path / "b" / "kernel.cubin"]


def test_nested_entries_and_folders_that_are_not_there(tmp_path):
    cache = tmp_path / "cache"
    make(cache / "a" / "one")
    make(cache / "a" / "b" / "two")
    moved = move_aside([tmp_path / "none", cache])
    assert [m.source for m in moved] == [cache / "a"]  # what lay deeper went with it
    assert empty_files(cache) == []
