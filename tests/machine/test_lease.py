import os
import subprocess
import sys
from pathlib import Path

import pytest

from dwslm.machine.lease import Lease, Taken, take

ROOT = Path(__file__).resolve().parents[2]
HOLD = (
    "import sys, time; from pathlib import Path; from dwslm.machine.lease import Lease\n"
    "lease = Lease('GPU-1', 'another run', Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
)


def test_one_holder_at_a_time_and_free_again(tmp_path):
    lease = Lease("GPU-1", "first", tmp_path)
    with pytest.raises(Taken, match=rf"GPU GPU-1 is in use by pid {os.getpid()} on .* \(first\)"):
        Lease("GPU-1", folder=tmp_path)
    Lease("GPU-2", folder=tmp_path).release()  # another GPU is another lease
    lease.release()
    with Lease("GPU-1", folder=tmp_path):
        pass
    Lease("GPU-1", folder=tmp_path).release()


def test_the_kernel_frees_it_when_the_holder_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(Taken, match=f"pid {process.pid} on .*another run"):
        Lease("GPU-1", folder=tmp_path)
    process.kill()
    process.wait()
    Lease("GPU-1", folder=tmp_path).release()


def test_a_child_that_was_given_it_keeps_it(tmp_path):
    lease = Lease("GPU-1", folder=tmp_path)
    child = subprocess.Popen(["sleep", "600"], pass_fds=[lease.fileno()])
    lease.release()
    with pytest.raises(Taken):
        Lease("GPU-1", folder=tmp_path)
    child.kill()
    child.wait()
    Lease("GPU-1", folder=tmp_path).release()


def test_the_first_free_ones_or_none(tmp_path):
    held = Lease("a", folder=tmp_path)
    leases = take(["a", "b", "c"], 2, folder=tmp_path)
    assert [lease.gpu for lease in leases] == ["b", "c"]
    for lease in leases:
        lease.release()
    with pytest.raises(Taken, match="2 GPUs wanted, 1 free; GPU a is in use"):
        take(["a", "b"], 2, folder=tmp_path)
    Lease("b", folder=tmp_path).release()  # was let go again
    held.release()


def test_a_name_cannot_leave_the_folder_and_a_link_is_not_followed(tmp_path):
    with Lease("../../etc/x", folder=tmp_path / "leases") as lease:
        assert lease.path.parent == tmp_path / "leases" and lease.path.is_file()
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "leases" / "GPU-9.lock").symlink_to(target)
    with pytest.raises(OSError):
        Lease("GPU-9", folder=tmp_path / "leases")
    assert target.read_text() == "content"


def test_what_stands_in_the_file_decides_nothing(tmp_path):
    (tmp_path / "GPU-1.lock").write_text("not JSON at all")
    Lease("GPU-1", folder=tmp_path).release()
