"""What a logged row costs a step, with trackers that behave and that don't: `python tests/runs/measure_cost.py SECONDS`.

No test: it prints figures of the machine that it runs on. A step here is a matrix product of about 5 ms, and each logs a row.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dwslm.runs.folder import create_run  # noqa: E402
from dwslm.runs.reader import metrics  # noqa: E402
from dwslm.runs.track import Trackers, TrackSettings  # noqa: E402
from dwslm.runs.writer import RunWriter  # noqa: E402

FAKE = """
import os, time
class Settings:
    def __init__(self, **given): pass
class Run:
    def define_metric(self, *a, **k): pass
    def log(self, row): {log}
    def finish(self, exit_code): pass
def init(**given): return Run()
"""
NOTHING = "no row at all"
"""What the clocks themselves cost, and how often a busy machine takes the core away between two looks at them."""
SINKS = {
    NOTHING: None,
    "no tracker": None,
    "a tracker": "pass",
    "a tracker that blocks for 60 s at a row": "time.sleep(60)",
    "a tracker that raises at a row": "raise RuntimeError('no')",
    "a tracker that is killed half-way": "pass",
}
ROW = {
    "loss": 3.1234567, "grad_norm": 0.51234, "lr": 0.0037, "skipped": 0, "scored": 524000, "segments": 812,
    "text_share": 0.98765, "tokens_per_second": 182345.678, "mfu": 0.4123, "peak_memory": 1234567890,
} | {f"part_{i}": 0.1234567 * i for i in range(10)}  # fmt: skip


def measure(root: Path, name: str, log: str | None, seconds: float) -> None:
    run = create_run(root, name, {"config": {}})
    if log is not None:
        place = root / name.replace(" ", "-")
        place.mkdir()
        (place / "wandb.py").write_text(FAKE.format(log=log))
        os.environ["PYTHONPATH"] = str(place)
        sys.path.insert(0, str(place))
    settings = TrackSettings(wandb="off" if log is None else "offline", finish_seconds=1.0)
    a = np.random.default_rng(0).standard_normal((600, 600), dtype=np.float32)
    cost, cpu, steps = [], [], []
    with RunWriter(run, 1) as writer, Trackers(settings, run, 1, lambda told: None) as trackers:
        time.sleep(2)  # trackers start
        end = time.perf_counter() + seconds
        killed = False
        while (begun := time.perf_counter()) < end:
            a @ a
            logged, used = time.perf_counter(), time.thread_time()
            if name != NOTHING:
                writer.metrics({"step": len(steps) + 1, "tokens": len(steps) + 1, **ROW})
            cpu.append(time.thread_time() - used)
            now = time.perf_counter()
            cost.append(now - logged)
            steps.append(now - begun)
            if "killed" in name and not killed and now > end - seconds / 2:
                os.kill(trackers.processes["wandb"].pid, signal.SIGKILL)
                killed = True
    rows = [row["step"] for row in metrics(run)]
    assert name == NOTHING or rows == list(range(1, len(steps) + 1)), f"{name}: rows are missing"
    cost.sort()
    print(
        f"{name:42} {len(steps):6,} steps, {len(rows):,} rows, none missing; step {1e3 * median(steps):.3f} ms; row "
        f"{1e6 * median(cost):.1f} us median, {1e6 * fmean(cost):.1f} mean, {1e6 * cost[len(cost) * 99 // 100]:.1f} p99; "
        f"{1e6 * fmean(cpu):.1f} us of the thread's CPU",
        flush=True,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, log in SINKS.items():
            measure(Path(folder), name, log, float(sys.argv[1]))
