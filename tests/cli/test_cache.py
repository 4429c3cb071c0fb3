"""`dwslm cache`, and the cache that a training process is given."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dwslm.cli import cache, child
from dwslm.cli.errors import make_console
from dwslm.cli.find import REPOSITORY
from dwslm.machine.boot import boot_id, started
from dwslm.machine.compiler_cache import MARKERS


@pytest.fixture
def key(tmp_path, monkeypatch):
    """A user's cache with one key that holds two entries; nothing else on the machine is looked at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "common_caches", lambda: [])
    folder = child.cache_root() / "torch-2.13.0_triton-3.6.0"
    for name in ("inductor/ab/cab.py", "inductor/cd/ccd.py", "triton/HASH/kernel.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def run(function, *folders):
    function(argparse.Namespace(folder=list(folders)))


def test_check_heal_check(key, capsys):
    run(cache.run_check)
    assert "damaged" in capsys.readouterr().out
    (key / "inductor/ab/cab.py").write_text("")
    (key / "triton/HASH/kernel.json").write_text('{"cut')
    with pytest.raises(SystemExit) as left:
        run(cache.run_check)
    said = capsys.readouterr().out
    assert left.value.code == 1 and "cab.py: empty" in said and "kernel.json: not JSON" in said
    run(cache.run_heal)
    assert "2 parts moved aside" in capsys.readouterr().out
    assert not (key / "inductor/ab").exists() and (key / "inductor/cd/ccd.py").exists()
    run(cache.run_check)
    run(cache.run_heal)
    assert "nothing is damaged" in capsys.readouterr().out


def test_clear_takes_caches_and_quarantines_and_not_what_is_in_use(key, capsys):
    (key / "inductor/ab/cab.py").write_text("")
    run(cache.run_heal)
    user = key / MARKERS / f"{boot_id()}.{os.getpid()}.{started(os.getpid())}"
    user.parent.mkdir()
    user.touch()
    with pytest.raises(ValueError, match="in use by 1 running processes"):
        run(cache.run_clear)
    user.unlink()
    run(cache.run_clear)
    assert "3 folders deleted: 3 files" in capsys.readouterr().out
    assert [path.name for path in key.iterdir()] == [MARKERS]


def test_a_folder_by_name(key, tmp_path, capsys):
    run(cache.run_check, str(key / "inductor"))
    assert "triton" not in capsys.readouterr().out.replace(key.name, "").replace("triton-3.6.0", "")
    with pytest.raises(ValueError, match="no such folder"):
        run(cache.run_check, str(tmp_path / "nosuch"))


# ---- what a training process does -----------------------------------------------------------------------

BEGIN = "from dwslm.cli import child; from rich.console import Console; child.begin_cache(Console())"


@pytest.fixture
def begin(tmp_path, monkeypatch, capsys):
    """What a training process does at its start, here and now; returns its two folders and what it said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(child.atexit, "register", lambda *_: None)

    def once(**environment):
        for name in (child.INDUCTOR, child.TRITON):
            monkeypatch.setenv(name, environment.get(name, ""))  # empty is as good as not there
        child.begin_cache(make_console())
        return Path(os.environ[child.INDUCTOR]), Path(os.environ[child.TRITON]), capsys.readouterr().out

    return once


def test_caches_are_apart_for_each_set_of_versions_and_healed_at_the_start(tmp_path, begin):
    inductor, triton, said = begin()
    key = inductor.parent
    assert key == triton.parent and key.parent == tmp_path / "dwslm" / "compiled" and not said
    version = re.escape(child.installed("torch"))
    assert re.fullmatch(rf"torch-{version}_triton-[^_]+_.+_python-3\.\d+\.\d+", key.name)
    damaged = inductor / "ab" / "cab.py"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("")
    assert "damaged compiler cache: moved" in begin()[2] and not damaged.exists()
    # Zeros in a file are looked for only after an end that was not clean.
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"\0" * 100)
    assert "moved" not in begin()[2] and damaged.exists()
    (key / MARKERS / "an-earlier-boot.1.1").touch()
    assert "moved" in begin()[2] and not damaged.exists()


def test_a_process_that_ends_takes_its_mark_away(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", BEGIN], env=environment, check=True)
    (marks,) = tmp_path.glob(f"dwslm/compiled/*/{MARKERS}")
    assert not list(marks.iterdir())


def test_a_folder_that_the_user_has_named_stays(tmp_path, begin):
    assert begin(**{child.INDUCTOR: str(tmp_path / "mine")})[0] == tmp_path / "mine"


def test_network_disks_are_avoided_for_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert child.cache_root() == tmp_path / "dwslm" / "compiled"
    monkeypatch.setattr(child, "file_system", lambda path: "lustre")
    assert child.cache_root().name == "compiled" and tmp_path not in child.cache_root().parents
    monkeypatch.undo()
    assert child.file_system(Path("/proc/self")) == "proc"


def test_the_run_folder_is_announced_whole(monkeypatch, tmp_path):
    child.announce(tmp_path)  # nobody asks
    monkeypatch.setenv(child.ANNOUNCE, str(tmp_path / "place"))
    child.announce(tmp_path / "runs")
    assert (tmp_path / "place").read_text() == str(tmp_path / "runs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place"]
