"""A stand-in for train.py: makes a run folder, writes events and rows, and ends as it is told to.

python fake_run.py ROOT PLAN...

One word of PLAN for each attempt, the last one again after that. An earlier attempt's folder is used again.
"""

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path


def write(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **row}) + "\n")


def main() -> None:
    root, plan = Path(sys.argv[1]), [word for word in sys.argv[2:] if word != "resumed"]
    folder = root / "run"
    folder.mkdir(exist_ok=True)
    attempt = 1 + len(list(folder.glob("events-trainer-*.jsonl")))
    end = plan[min(attempt, len(plan)) - 1]
    if end == "configuration":
        print("error: train.tokens=0 must be 1 or more", file=sys.stderr)
        sys.exit(1)
    if end == "silent":
        time.sleep(600)
    events, metrics = folder / f"events-trainer-{attempt}.jsonl", folder / f"metrics-{attempt}.jsonl"
    write(events, {"event": "start" if attempt == 1 else "resume"})
    target = Path(os.environ["ANNOUNCE"])
    target.with_suffix(".new").write_text(str(folder))
    target.with_suffix(".new").replace(target)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    left = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: left.set())
    for step in range(1, 4):
        write(metrics, {"step": step, "tokens": 100 * step, "loss": 1.0})
        time.sleep(0.05)
    if end.startswith("saved-"):
        write(events, {"event": "checkpoint", "step": 3, "seconds": 0.1})
        end = end.removeprefix("saved-")
    if end == "done":
        write(events, {"event": "done", "step": 3})
    elif end == "wait":
        while not left.wait(0.02):
            write(metrics, {"step": 4, "tokens": 400, "loss": 1.0})
        write(events, {"event": "preempted", "reason": "signal"})
        sys.exit(75)
    elif end == "hang":
        hang_here()
    elif end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "save-hangs":
        (folder / "checkpoints" / "tmp-step-3").mkdir(parents=True)
        for _ in range(3000):
            write(metrics, {"step": 5, "tokens": 500, "loss": 1.0})
            time.sleep(0.05)
    elif end == "cuda":
        write(
            events, {"event": "failed", "error": "AcceleratorError", "reason": "CUDA error: unspecified launch failure"}
        )
        sys.exit(1)
    elif end == "nan":
        write(events, {"event": "failed", "error": "FloatingPointError", "reason": "the loss is nan"})
        sys.exit(1)
    elif end == "cache":
        print("ImportError: /x/inductor/hm/c.main.so: file too short", file=sys.stderr)
        sys.exit(1)
    elif end == "crash":
        raise RuntimeError("something broke")


def hang_here() -> None:
    re.match("(a+)+$", "a" * 60 + "b")  # for years, with the interpreter's lock held: no Python code can run beside it


main()
