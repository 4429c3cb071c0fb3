"""The supervisor with stand-ins for training: short scripts that end, hang and crash as they are told to."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dwslm.machine.boot import below
from dwslm.machine.health import Sample
from dwslm.machine.health_log import HealthLog
from dwslm.machine.lease import Lease, Taken
from dwslm.machine.supervisor import Job, Supervisor, SupervisorSettings, what_happened
from dwslm.machine.watch import Deadlines

FAKE = Path(__file__).with_name("fake_run.py")
ROOT = Path(__file__).resolve().parents[2]


class Log:
    """Events in memory."""

    def __init__(self):
        self.events = []

    def event(self, kind, /, **fields):
        self.events.append({"event": kind, **fields})

    def close(self):
        pass

    def kinds(self):
        return [event["event"] for event in self.events]

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]


def supervise(tmp_path, *plan, deadlines=None, job=None, gpus=None, **settings):
    """Runs a plan to its end. Returns exit code, events, and what was said."""
    command = [sys.executable, str(FAKE), str(tmp_path), *plan]
    log, said = Log(), []
    job = Job(
        command, lambda folder: [*command, "resumed"], dict(os.environ), "ANNOUNCE", lambda folder: log, **job or {}
    )
    chosen = SupervisorSettings(deadlines=deadlines or Deadlines(), back_off=lambda n: 0.01, poll_s=0.02, **settings)
    code = Supervisor(job, chosen, gpus=gpus, say=said.append, stderr=io.BytesIO()).run()
    return code, log, "\n".join(said)


def ends(log):
    return [event["kind"] for event in log.of("attempt_ended")]


def test_a_run_that_ends_is_left_alone(tmp_path):
    code, log, said = supervise(tmp_path, "done")
    assert code == 0 and ends(log) == ["done"]
    assert log.kinds() == ["supervised", "attempt", "attempt_ended", "supervisor_ended"]
    assert "no GPU here" in said and not list((tmp_path / "run").glob("health-*"))


def test_a_kill_is_resumed(tmp_path):
    code, log, _ = supervise(tmp_path, "kill", "done")
    assert code == 0 and ends(log) == ["killed", "done"]
    assert log.of("attempt_ended")[0]["code"] == -signal.SIGKILL
    assert log.of("attempt")[1]["command"][-1] == "resumed"


def test_without_a_new_checkpoint_it_gives_up_and_says_so(tmp_path):
    code, log, said = supervise(tmp_path, "kill")
    assert code == 128 + signal.SIGKILL and ends(log) == ["killed"] * 3
    assert log.of("failed")[0]["error"] == "killed" and "giving up" in said


def test_progress_between_failures_gives_new_tries(tmp_path):
    code, log, _ = supervise(tmp_path, *["saved-kill"] * 4, "done")
    assert code == 0 and ends(log) == ["killed"] * 4 + ["done"]


def test_tries_are_bounded_in_all(tmp_path):
    code, log, _ = supervise(tmp_path, "saved-kill", retries=1)
    assert code != 0 and ends(log) == ["killed"] * 2


@pytest.mark.parametrize(
    ("plan", "kind", "tries"),
    [
        ("configuration", "bad_configuration", 1),
        ("nan", "non_finite", 1),
        ("cuda", "cuda_error", 3),
        ("crash", "crash", 2),
    ],
)
def test_each_kind_of_failure_has_its_own_number_of_tries(tmp_path, plan, kind, tries):
    code, log, said = supervise(tmp_path, plan)
    assert code == 1
    assert f"{kind}: " in said
    if plan != "configuration":  # which never had a folder for events
        assert ends(log) == [kind] * tries


def test_a_damaged_cache_is_healed_once(tmp_path):
    healed = []
    code, log, _ = supervise(tmp_path, "cache", "done", job={"heal_caches": lambda: len(healed.append(1) or healed)})
    assert code == 0 and ends(log) == ["damaged_cache", "done"] and healed == [1]
    assert log.of("cache_healed")[0]["parts"] == 1
    again = tmp_path / "again"
    again.mkdir()
    code, log, _ = supervise(again, "cache", job={"heal_caches": lambda: len(healed.append(1) or healed)})
    assert code == 1 and ends(log) == ["damaged_cache"] * 2 and healed == [1, 1]


def test_a_hang_leaves_its_stacks_and_is_resumed(tmp_path):
    code, log, said = supervise(tmp_path, "hang", "done", deadlines=Deadlines(step=0.8, step_factor=1.0))
    assert code == 0 and ends(log) == ["hang", "done"]
    stall = log.of("stall")[0]
    assert stall["reason"].startswith("step: silent for") and "after step 3" in stall["reason"]
    stacks = (tmp_path / "run" / stall["stacks"]).read_text()
    assert "hang_here" in stacks and "fake_run.py" in stacks


def test_a_hang_before_the_first_row_and_one_in_a_save(tmp_path):
    code, log, said = supervise(tmp_path, "silent", deadlines=Deadlines(start=0.5), retries=0)
    assert code == 137 and "start: silent for" in said and "before the first row" in said
    again = tmp_path / "again"
    again.mkdir()
    code, log, _ = supervise(again, "save-hangs", deadlines=Deadlines(save=0.6), retries=0)
    assert ends(log) == ["hang"] and log.of("stall")[0]["reason"].startswith("save: tmp-step-3 is not done after")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_and_end_it(tmp_path, number):
    def send():
        while not list((tmp_path / "run").glob("metrics-*")):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    code, log, _ = supervise(tmp_path, "wait")
    thread.join()
    assert code == 75 and ends(log) == ["preempted"]
    assert log.kinds()[-1] == "supervisor_ended"


def test_the_command_of_the_user_hears_of_failure_stall_and_end(tmp_path):
    heard = tmp_path / "heard"
    script = tmp_path / "hear.py"
    script.write_text(f"import sys; open({str(heard)!r}, 'a').write(sys.argv[1] + '|' + sys.stdin.read() + '\\n')")
    words = [sys.executable, str(script), "{event}"]
    supervise(tmp_path, "hang", "kill", "done", deadlines=Deadlines(step=0.5, step_factor=1.0), notify=words)
    lines = [line.split("|", 1) for line in heard.read_text().splitlines()]
    assert [name for name, _ in lines] == ["stall", "failure", "failure", "end"]
    told = [json.loads(text) for _, text in lines]
    assert [t["event"] for t in told] == ["stall", "failure", "failure", "end"]
    assert told[1]["run"] == "run" and told[2]["kind"] == "killed" and told[3]["step"] == 3


def test_a_notification_that_fails_ends_nothing(tmp_path):
    code, log, said = supervise(tmp_path, "done", notify=["/nosuch/program"])
    assert code == 0 and "/nosuch/program: No such file" in said and log.of("notify_failed")


def test_caches_are_brought_to_disk_once_after_the_first_row(tmp_path):
    synced = []
    supervise(tmp_path, "kill", "done", job={"sync_caches": lambda: synced.append(1)})
    assert synced == [1]


class FakeGpu:
    """Draws 200 J a look, and tells what the test gives it."""

    def __init__(self, clock=1500, codes=()):
        self.clock, self.codes, self.joules = clock, list(codes), 0.0

    def sample(self):
        return Sample(time.monotonic(), 600.0, self.clock, 60, 0x4)

    def energy_j(self):
        self.joules += 200.0
        return self.joules

    def ecc_errors(self):
        return {"corrected": 0, "uncorrected": 0}

    def remapped_rows(self):
        return None

    def new_xid(self):
        codes, self.codes = self.codes, []
        return codes


@pytest.fixture
def quick_health(monkeypatch):
    monkeypatch.setattr("dwslm.machine.supervisor.HealthLog", functools.partial(HealthLog, hz=200, row_s=0.02))


def test_health_energy_and_a_broken_cap(tmp_path, quick_health):
    code, log, said = supervise(tmp_path, "done", gpus={"GPU-1": FakeGpu(clock=1980)}, clock_cap_mhz=1800)
    assert code == 0
    (file,) = (tmp_path / "run").glob("health-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows and rows[0]["gpu"] == "GPU-1" and rows[0]["power_w"]["mean"] == 600.0
    assert log.of("clock_cap") == [log.of("clock_cap")[0]] and log.of("clock_cap")[0]["seen_mhz"] == 1980
    assert "above the cap of 1800 MHz" in said and "nvidia-smi -lgc 0,1800" in said and "[Service]" in said
    assert log.of("attempt_ended")[0]["joules_per_token"] > 0
    again = tmp_path / "again"
    again.mkdir()
    _, log, _ = supervise(again, "done", gpus={"GPU-1": FakeGpu(clock=1800)}, clock_cap_mhz=1800)
    assert not log.of("clock_cap")


def test_a_driver_error_that_needs_a_reboot_ends_the_trying(tmp_path, quick_health):
    code, log, said = supervise(tmp_path, "cuda", gpus={"GPU-1": FakeGpu(codes=[79])})
    assert code == 1 and ends(log) == ["hardware"]
    assert log.of("xid")[0]["code"] == 79 and log.of("xid")[0]["action"] == "reboot"
    assert log.of("failed")[0]["reason"].startswith("Xid 79: GPU has fallen off the bus; reboot")


# ---- a supervisor that is killed ------------------------------------------------------------------------

SUPERVISOR = """
import os, sys
from pathlib import Path
from dwslm.machine.lease import Lease
from dwslm.machine.supervisor import Job, Supervisor, SupervisorSettings
sys.path.insert(0, {tests!r})
from test_supervisor import Log
lease = Lease("GPU-1", folder=Path({folder!r}))
job = Job({command!r}, lambda folder: [], dict(os.environ), "ANNOUNCE", lambda folder: Log())
Supervisor(job, SupervisorSettings(), leases=[lease]).run()
"""

# Two levels, the lower one in a session of its own and deaf to everything that can be ignored.
STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "time.sleep(600)\n"
)


def wait_for(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def lease_is_free(folder):
    try:
        Lease("GPU-1", folder=folder).release()
    except Taken:
        return False
    return True


def test_a_killed_supervisor_leaves_nothing_behind_and_the_lease_is_free(tmp_path):
    code = SUPERVISOR.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path), command=[sys.executable, "-c", STUBBORN]
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    children = wait_for(lambda: pids if len(pids := below(process.pid)) == 3 else None)  # leash, command, its child
    with pytest.raises(Taken, match=f"GPU GPU-1 is in use by pid {process.pid}"):
        Lease("GPU-1", folder=tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in children), 5.0)
    wait_for(lambda: lease_is_free(tmp_path), 5.0)  # whatever else it had just started goes with it, a moment later


def test_a_killed_leash_takes_its_command_along(tmp_path):
    code = SUPERVISOR.format(tests=str(Path(__file__).parent), folder=str(tmp_path), command=["sleep", "600"])
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    leash, command = wait_for(lambda: pids if len(pids := below(process.pid)) == 2 else None)
    os.kill(leash, signal.SIGKILL)
    wait_for(lambda: not alive(command), 5.0)
    process.kill()
    process.wait()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- what became of the last one ------------------------------------------------------------------------


def begun(**fields):
    return {"event": "supervised", "host": os.uname().nodename, "boot_id": "boot-1", "time": 0.0, **fields}


def test_a_reset_of_the_machine_is_told_from_a_kill():
    kill = what_happened([begun(), {"event": "attempt", "time": 86400.0}], "boot-1")
    assert kill[0] == "supervisor_lost" and "1970-01-02 00:00:00" in kill[1]
    assert what_happened([begun()], "boot-2")[0] == "machine_reset"
    assert what_happened([begun(host="elsewhere")], "boot-2")[0] == "supervisor_lost"
    assert what_happened([begun(), {"event": "supervisor_ended", "time": 1.0}], "boot-2") is None
    assert what_happened([], "boot-1") is None


def test_the_next_supervisor_says_it(tmp_path):
    (tmp_path / "run").mkdir()
    job = {"run": tmp_path / "run", "history": [begun(boot_id="earlier")]}
    code, log, said = supervise(tmp_path, "done", job=job)
    assert code == 0 and log.of("machine_reset") and "started anew" in said
