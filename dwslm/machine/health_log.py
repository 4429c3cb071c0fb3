"""GPU health beside a run: ten samples a second become a row a second in `health-<host>.jsonl`."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from dwslm.machine.health import HZ, REASONS, Sample

SCHEMA = 1
ROW_S = 1.0
KEPT_ROWS = 3600
"""Rows held back in memory while the run has no folder yet; older ones go."""
SPREAD = ("power_w", "sm_mhz", "memory_mhz", "temperature_c")
"""Written as min, mean and max of the second."""


class Watched(Protocol):
    """What is sampled: `Gpu`, or anything like it."""

    def sample(self) -> Sample: ...
    def energy_j(self) -> float | None: ...
    def ecc_errors(self) -> dict[str, int | None]: ...
    def remapped_rows(self) -> dict[str, int | bool] | None: ...
    def new_xid(self) -> list[int]: ...


def health_row(gpu: str, samples: Sequence[Sample], watched: Watched) -> dict[str, Any]:
    """One row: what the samples of a second say, and the counters at its end.

    Energy is the driver's own counter in joules since it was loaded; sampled power misses what happens between samples.
    """
    row: dict[str, Any] = {
        "schema": SCHEMA,
        "time": time.time(),
        "mono": time.monotonic(),
        "gpu": gpu,
        "samples": len(samples),
    }
    for name in SPREAD:
        told = [value for sample in samples if (value := getattr(sample, name)) is not None]
        row[name] = {"min": min(told), "mean": round(fmean(told), 2), "max": max(told)} if told else None
    used = [sample.memory_used for sample in samples if sample.memory_used is not None]
    bits = [sample.reasons for sample in samples if sample.reasons is not None]
    row["memory_used"] = max(used) if used else None
    # A reason's share is that of the second's samples that show it.
    row["reasons"] = {
        name: round(n / len(bits), 2) for bit, name in REASONS.items() if (n := sum(bool(b & bit) for b in bits))
    }
    return row | {
        "energy_j": watched.energy_j(),
        "ecc": watched.ecc_errors(),
        "remapped_rows": watched.remapped_rows(),
        "xid": watched.new_xid(),
    }  # fmt: skip


class HealthLog:
    """Samples GPUs in a thread of its own until `close`; a context manager.

    Rows wait in memory until `write_to` names the file. A disk that refuses a row costs the row: health must not end a run.
    """

    def __init__(
        self,
        gpus: Mapping[str, Watched],
        hz: float = HZ,
        row_s: float = ROW_S,
        on_row: Callable[[dict[str, Any]], None] | None = None,
    ):
        """on_row: is told every row, in the sampling thread."""
        self.gpus, self.hz, self.row_s = dict(gpus), hz, row_s
        self.lost = 0
        self._on_row = on_row
        self._path: Path | None = None
        self._waiting: deque[str] = deque(maxlen=KEPT_ROWS)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def __enter__(self) -> "HealthLog":
        if self.gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def write_to(self, path: Path) -> None:
        """From now on, and what has waited; another file than before ends the former."""
        with self._lock:
            self._path = path
            self._flush()

    def _run(self) -> None:
        samples: dict[str, list[Sample]] = {gpu: [] for gpu in self.gpus}
        due = time.monotonic()
        row_due = due + self.row_s
        while not self._stop.is_set():
            for gpu, watched in self.gpus.items():
                samples[gpu].append(watched.sample())
            if time.monotonic() >= row_due:
                row_due = time.monotonic() + self.row_s
                for gpu, watched in self.gpus.items():
                    self._keep(health_row(gpu, samples[gpu], watched))
                    samples[gpu].clear()
            due = max(due + 1 / self.hz, time.monotonic() - 1 / self.hz)  # a late one is not made up for by many
            self._stop.wait(max(0.0, due - time.monotonic()))

    def _keep(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._waiting.append(json.dumps(row, allow_nan=False))
            self._flush()
        if self._on_row is not None:
            self._on_row(row)

    def _flush(self) -> None:
        if self._path is None or not self._waiting:
            return
        lines = "".join(f"{line}\n" for line in self._waiting).encode()
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(fd, lines)
            finally:
                os.close(fd)
        except OSError:
            self.lost += len(self._waiting)
        self._waiting.clear()
