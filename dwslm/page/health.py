"""Power, clocks, temperature and memory of a run's GPUs over time, from `health-<host>.jsonl`."""

import os
from pathlib import Path

import numpy as np

from dwslm.page.columns import Columns

FIELDS = (
    "time", "power_w.mean", "power_w.max", "sm_mhz.min", "sm_mhz.max", "temperature_c.max", "memory_used",
)  # fmt: skip
BUCKETS = 500  # stretches of time that a figure tells apart
OF = {
    "power": ("power_w.mean", "mean"),
    "power_max": ("power_w.max", "max"),
    "clock_low": ("sm_mhz.min", "min"),
    "clock": ("sm_mhz.max", "max"),
    "temperature": ("temperature_c.max", "max"),
    "memory_used": ("memory_used", "max"),
}
"""Column of a figure -> the field, and what is kept of it over a stretch of time and over all GPUs."""


class Health:
    """The health files of a run, one a host, read on as they grow."""

    def __init__(self, run: str | os.PathLike[str]):
        self.run = Path(run)
        self._files: dict[str, Columns] = {}

    def read(self, since: float) -> dict[str, np.ndarray]:
        """`hours` on the clock from `since` (seconds since 1970), and the columns of `OF`, at most `BUCKETS` long.

        Each value stands for a stretch of time: the mean of power, the lowest and highest of clocks, so that no dip is lost.
        Raises OSError where a file cannot be read.
        """
        for path in self.run.glob("health-*.jsonl"):
            if path.name not in self._files:
                self._files[path.name] = Columns(path, FIELDS, needs=("time",))
        for columns in self._files.values():
            columns.read()
        files = [columns for columns in self._files.values() if len(columns)]
        if not files:
            return {}
        time = np.concatenate([columns["time"] for columns in files])
        low, high = time.min(), time.max()
        buckets = min(BUCKETS, max(1, int(high - low) + 1))  # not finer than the rows, which are a second apart
        at = np.minimum(((time - low) / max(high - low, 1e-9) * buckets).astype(int), buckets - 1)
        seen = np.bincount(at, minlength=buckets) > 0
        found = {"hours": ((low + (np.arange(buckets) + 0.5) * (high - low) / buckets - since) / 3600)[seen]}
        for name, (field, kind) in OF.items():
            values = np.concatenate([columns[field] for columns in files])
            found[name] = _over(values, at, buckets, kind)[seen]
        return found


def _over(values: np.ndarray, at: np.ndarray, buckets: int, kind: str) -> np.ndarray:
    """Mean, min or max of the finite values of each bucket; NaN where there is none."""
    finite = np.isfinite(values)
    values, at = values[finite], at[finite]
    count = np.bincount(at, minlength=buckets)
    if kind == "mean":
        result = np.bincount(at, weights=values, minlength=buckets) / np.maximum(count, 1)
    else:
        result = np.full(buckets, np.inf if kind == "min" else -np.inf)
        (np.minimum if kind == "min" else np.maximum).at(result, at, values)
    return np.where(count > 0, result, np.nan)
