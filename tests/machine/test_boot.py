import os
import signal
import subprocess
import sys

from dwslm.machine.boot import alive, below, boot_id, catches, identity, oom_kills, started


def test_this_process_lives_and_no_other_is_taken_for_it():
    me = identity()
    assert alive(me) and me.startswith(f"{boot_id()}.{os.getpid()}.")
    boot, pid, start = me.rsplit(".", 2)
    assert not alive(f"{boot}.{pid}.{int(start) - 1}")  # the number was used before
    assert not alive(f"another-boot.{pid}.{start}")
    assert not alive("nonsense")


def test_a_zombie_does_not_live():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started(child.pid) is None
    child.wait()


def test_descendants_and_their_handlers():
    code = "import signal, sys; signal.signal(signal.SIGUSR2, lambda *_: None); print('ready', flush=True); sys.stdin.read()"
    shell = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "{code}"; true'], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert shell.stdout.readline() == b"ready\n"
    (child,) = below(shell.pid)
    assert shell.pid in below(os.getpid()) and child in below(os.getpid())
    assert catches(child, signal.SIGUSR2) and not catches(child, signal.SIGUSR1)
    shell.stdin.close()
    shell.wait()
    assert below(shell.pid) == [] and not catches(shell.pid, signal.SIGUSR2)


def test_the_kernels_count_of_kills_is_a_number():
    assert oom_kills() >= 0
