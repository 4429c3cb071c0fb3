import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from dwslm.machine.boot import started
from dwslm.machine.classify import Evidence, classify
from dwslm.machine.compiler_cache import (
    INDEXES,
    begin,
    empty_files,
    end,
    move_all,
    move_aside,
    scan,
    size,
    sync_filesystem,
    users,
)

ROOT = Path(__file__).resolve().parents[2]


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


def binary(tail=b"\1" * 64):
    """The smallest ELF file with a table of two sections."""
    head = bytearray(b"\x7fELF\2\1".ljust(64, b"\0"))
    head[40:48], head[58:60], head[60:62] = (64).to_bytes(8, "little"), b"\x40\0", b"\2\0"
    return bytes(head) + bytes(64) + tail


def test_binaries_that_are_cut_or_partly_zeros(tmp_path):
    whole = tmp_path / "kernel.cubin"
    for content, why in (
        (binary(), None),
        (binary()[:-1], "cut"),
        (binary(bytes(64)), "zeros in a binary"),
        (b"\x7fELF", "cut"),
    ):
        whole.write_bytes(content)
        assert [damage.why for damage in scan(tmp_path, deep=True, recent_s=0.0)] == ([why] if why else [])
    own = next(Path(numpy.__file__).parent.rglob("*.so"))  # what a real linker made
    shutil.copy(own, tmp_path / "real.so")
    assert [damage.path for damage in scan(tmp_path, deep=True, recent_s=0.0)] == [whole]
    os.truncate(tmp_path / "real.so", own.stat().st_size // 2)
    assert len(scan(tmp_path, deep=True, recent_s=0.0)) == 2


def test_python_that_is_cut(tmp_path):
    make(tmp_path / "ab" / "cab.py", "def call(args):\n    return (args")
    make(tmp_path / "cd" / "ccd.py", "def call(args):\n    return args\n")
    assert [(damage.path.name, damage.why) for damage in scan(tmp_path, deep=True)] == [("cab.py", "not Python")]


def triton_cache(folder):
    """What Triton 3.6 leaves for two kernels."""
    for name in ("HASHONE", "HASHTWO"):
        make(folder / name / "kernel.cubin").write_bytes(binary())
        os.utime(folder / name / "kernel.cubin", (0, 0))
        make(folder / name / "kernel.json", '{"num_warps": 4}')
        make(folder / name / "kernel.ptx", ".version 8.7")
        make(folder / name / "kernel.ttir", "module {}")
        make(folder / name / "__grp__kernel.json", '{"child_paths": {}}')
    make(folder / "LOCK" / "kernel.lock")
    return folder


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.json", "kernel.ptx", "kernel.ttir", "__grp__kernel.json"])
@pytest.mark.parametrize("content", ["", "\0" * 100])
def test_a_damaged_file_of_each_kind_of_tritons_takes_its_kernel_along_and_no_other(tmp_path, name, content):
    cache = triton_cache(tmp_path / "triton")
    make(cache / "HASHTWO" / name, content)
    assert [damage.path for damage in scan(cache, deep=True)] == [cache / "HASHTWO" / name]
    assert [m.source for m in move_aside([cache], deep=True)] == [cache / "HASHTWO"]
    assert sorted(p.name for p in cache.iterdir()) == ["HASHONE", "LOCK"] and scan(cache, deep=True) == []


def test_only_a_deep_look_reads(tmp_path):
    cache = triton_cache(tmp_path / "triton")
    make(cache / "HASHONE" / "kernel.json", '{"num_warps": ')
    make(cache / "HASHTWO" / "kernel.cubin", "cut")
    assert scan(cache) == []
    assert [(d.path.name, d.why) for d in scan(cache, deep=True)] == [
        ("kernel.json", "not JSON"),
        ("kernel.cubin", "not a binary"),
    ]
    os.chmod(cache / "HASHONE" / "kernel.json", 0)
    if os.geteuid():  # root reads everything
        assert scan(cache, deep=True)[0].why.startswith("unreadable")


def test_inductors_indexes_go_with_what_they_name(tmp_path):
    cache = tmp_path / "inductor"
    make(cache / "ab" / "cab.py")
    make(cache / "cd" / "ccd.so", "not looked into here")
    index = make(cache / "fxgraph" / "2i" / "f2i" / "entry", "pickled")
    make(cache / "aotautograd" / "key" / "entry", "pickled")
    make(cache / "locks" / "x.lock")
    moved = move_aside([cache])
    assert {m.source.name for m in moved} == {"ab", "fxgraph", "aotautograd"}
    assert sorted(p.name for p in cache.iterdir()) == ["cd", "locks"]
    # A damaged index entry alone is no reason to forget the rest.
    make(index)
    make(cache / "fxgraph" / "3k" / "f3k" / "entry", "pickled")
    assert [m.source.name for m in move_aside([cache])] == ["f2i"]
    assert (cache / "fxgraph" / "3k").exists() and (cache / "cd").exists()


def test_a_whole_cache_goes_aside_and_its_marks_stay(tmp_path):
    cache = triton_cache(tmp_path / "triton")
    make(cache / "in-use" / "someone", "")
    moved = move_all([cache, tmp_path / "none"])
    assert {m.source.name for m in moved} == {"HASHONE", "HASHTWO", "LOCK"} and [p.name for p in cache.iterdir()] == [
        "in-use"
    ]
    assert len({m.target.parent for m in moved}) == 1
    triton_cache(cache)
    assert move_all([cache])[0].target.parent != moved[0].target.parent  # a second time in the same second


def test_a_mark_tells_a_clean_end_from_a_kill(tmp_path):
    mark, unclean, others = begin(tmp_path)
    assert (unclean, others) == (False, False) and users(tmp_path) == 1
    assert begin(tmp_path) == (mark, False, False)  # the same process once more
    end(mark)
    assert users(tmp_path) == 0 and begin(tmp_path)[1:] == (False, False)
    code = "import sys, time; from pathlib import Path; from dwslm.machine.compiler_cache import begin\n"
    code += "print(begin(Path(sys.argv[1]))[1:], flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert other.stdout.readline() == b"(False, True)\n"
    assert begin(tmp_path)[1:] == (False, True) and users(tmp_path) == 2
    other.kill()
    other.wait()
    assert begin(tmp_path)[1:] == (True, False)
    assert begin(tmp_path)[1:] == (False, False)  # told once


def test_a_mark_of_an_earlier_boot_is_a_reset(tmp_path):
    make(tmp_path / "in-use" / f"an-earlier-boot.{os.getpid()}.{started(os.getpid())}", "")
    assert begin(tmp_path)[1:] == (True, False)


def test_a_sync_and_a_size(tmp_path):
    make(tmp_path / "a" / "b", "12345")
    assert sync_filesystem(tmp_path) is True and sync_filesystem(tmp_path / "none") is False
    assert size(tmp_path) == (1, 5)


# ---- with a real compiler -------------------------------------------------------------------------------

# A program in a process of its own for each line that is read: two files for what it says. The compiler is imported once,
# which takes ten times as long as the program does with a warm cache.
PROGRAMS = """
import os, sys, traceback
import torch
import torch._inductor.compile_fx

@torch.compile
def f(x, y):
    return torch.nn.functional.relu(x + y).pow(2).sum(-1)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        for number, name in enumerate(line.split(), start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        try:
            x = torch.arange(4096.0).view(64, 64).div(4096)
            print("sum", round(float(f(x, -x.T).sum()), 3))
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def kind_of(path):
    """fxgraph, aotautograd, or the endings: .py, .cpp, .so, .main.cpp, .main.so."""
    return next((part for part in path.parts if part in INDEXES), "".join(path.suffixes))


@pytest.fixture
def programs(tmp_path):
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else a pool of processes is started before the fork
        "OMP_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAMS], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as child:
        yield child
        child.stdin.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_emptying_any_kind_of_file_of_a_warm_cache_never_stops_the_next_run(tmp_path, programs):
    cache, warm = tmp_path / "cache", tmp_path / "warm"

    def program():
        print(tmp_path / "out", tmp_path / "err", file=programs.stdin, flush=True)
        code = int(programs.stdout.readline())
        return subprocess.CompletedProcess("f", code, *((tmp_path / name).read_text() for name in ("out", "err")))

    expected = program().stdout
    assert expected.startswith("sum")
    cache.rename(warm)
    kinds = {}
    for path in warm.rglob("*"):
        if path.is_file() and path.stat().st_size:
            kinds.setdefault(kind_of(path), []).append(path.relative_to(warm))
    assert {".py", ".cpp", ".so", ".main.cpp", ".main.so", "fxgraph", "aotautograd"} <= set(kinds)
    broken = set()
    for kind, paths in kinds.items():
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(warm, cache)
        for path in paths:
            (cache / path).write_text("")
        if kind in (".so", ".main.so", ".py"):
            done = program()
            broken |= {kind} if done.returncode else set()
            # What the supervisor goes by, where nobody scanned before.
            assert done.returncode == 0 or classify(Evidence(done.returncode, text=done.stderr)).kind == "damaged_cache"
        assert move_aside([cache], recent_s=0.0)
        done = program()
        assert (done.returncode, done.stdout) == (0, expected), f"{kind}: {done.stderr[-2000:]}"
    assert broken  # else there would be nothing to heal
