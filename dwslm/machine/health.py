"""GPU health while something runs: power, clock and why it is held back, temperature, memory errors, energy.

Samples come from NVIDIA's management library through the module pynvml (package nvidia-ml-py). A thread takes them; what is
sampled can be anything that returns a `Sample`, so it needs no GPU to be tested.
"""

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

HZ = 10.0
POINTS = 300
"""Of the series that is kept; more samples are thinned to this."""
IDLE = 0x1
# Bits of NVML's clock event reasons.
REASONS = {
    IDLE: "idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


@dataclass(frozen=True)
class Sample:
    """One look at the GPU. None for what it does not tell."""

    time: float
    """Seconds, of time.monotonic()."""
    power_w: float | None
    sm_mhz: int | None
    temperature_c: int | None
    reasons: int | None
    """Bits of `REASONS`."""
    memory_mhz: int | None = None
    memory_used: int | None = None
    """Bytes, of all processes on the GPU."""


Source = Callable[[], Sample]


class Gpu:
    """One GPU, looked at through NVML.

    Raises:
        ValueError: where the module, the driver or the GPU is not there, in one line.
    """

    def __init__(self, uuid: str | None = None, index: int = 0):
        """uuid: of the GPU as torch names it; without it, the `index`-th."""
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise ValueError("no health samples: pip install nvidia-ml-py") from None
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            if uuid is None:
                self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
            else:
                self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except nvml.NVMLError as error:
            raise ValueError(f"no health samples: {error}") from None
        new, old = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        self._reasons = new if hasattr(nvml, new) else old
        self._events: Any = None

    def sample(self) -> Sample:
        """One sample, in well under a millisecond."""
        nvml, handle = self._nvml, self._handle
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        return Sample(
            time=time.monotonic(),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=self._ask(self._reasons, handle),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", handle, getattr(nvml, "NVML_CLOCK_MEM", 2)),
            memory_used=self.memory()[0],
        )

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes used and there are in all."""
        told = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        return (None, None) if told is None else (told.used, told.total)

    def name(self) -> tuple[str | None, str | None]:
        """The GPU's model and its UUID."""
        model, uuid = self._ask("nvmlDeviceGetName", self._handle), self._ask("nvmlDeviceGetUUID", self._handle)
        return _text(model), _text(uuid)

    def remapped_rows(self) -> dict[str, int | bool] | None:
        """Memory rows that spare ones stand in for; "pending": only after a reset; "failed": no spare was left."""
        told = self._ask("nvmlDeviceGetRemappedRows", self._handle)
        if told is None:
            return None
        corrected, uncorrected, pending, failed = told
        return {
            "corrected": corrected,
            "uncorrected": uncorrected,
            "pending": bool(pending),
            "failed": bool(failed),
        }

    def watch_xid(self) -> bool:
        """Begins to collect the driver's error codes for `new_xid`. False where the driver does not tell them."""
        created = self._ask("nvmlEventSetCreate")
        kind = getattr(self._nvml, "nvmlEventTypeXidCriticalError", None)
        if created is None or kind is None:
            return False
        try:
            self._nvml.nvmlDeviceRegisterEvents(self._handle, kind, created)
        except self._nvml.NVMLError:
            return False
        self._events = created
        return True

    def new_xid(self) -> list[int]:
        """Codes since the last call, in order; does not wait."""
        found: list[int] = []
        while self._events is not None:
            event = self._ask("nvmlEventSetWait_v2", self._events, 0)
            if event is None:  # a timeout is an error, too
                break
            found.append(int(event.eventData))
        return found

    def energy_j(self) -> float | None:
        """Since the driver was loaded."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        return None if millijoules is None else millijoules / 1e3

    def ecc_errors(self) -> dict[str, int | None]:
        """Memory errors since the last boot: "corrected" and "uncorrected"."""
        nvml = self._nvml
        kinds = {
            "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        return {
            name: self._ask("nvmlDeviceGetTotalEccErrors", self._handle, kind, nvml.NVML_VOLATILE_ECC)
            for name, kind in kinds.items()
        }

    def facts(self) -> dict[str, Any]:
        """Driver, power limit, highest clock, and the cap that application clocks set on it: None where there is none. A range
        locked with `nvidia-smi -lgc` cannot be read back."""
        nvml, handle = self._nvml, self._handle
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        highest = self._ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)
        wanted = self._ask("nvmlDeviceGetApplicationsClock", handle, nvml.NVML_CLOCK_GRAPHICS)
        capped = highest is not None and wanted is not None and wanted < highest
        driver = self._ask("nvmlSystemGetDriverVersion")
        return {
            "driver": _text(driver),
            "power_limit_w": None if limit is None else limit / 1e3,
            "max_clock_mhz": highest,
            "clock_cap_mhz": wanted if capped else None,
        }

    def _ask(self, question: str, *arguments: Any) -> Any:
        # A version of the module may lack a function, a GPU an answer.
        function = getattr(self._nvml, question, None)
        try:
            return None if function is None else function(*arguments)
        except self._nvml.NVMLError:
            return None


def _text(value: Any) -> str | None:
    """Older versions of the module give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def list_gpus() -> list[Gpu]:
    """All GPUs of this machine in the driver's order; none where there is no NVIDIA driver.

    Raises:
        ValueError: where there is a driver and no way to ask it.
    """
    try:
        first = Gpu()
    except ValueError:
        if Path("/proc/driver/nvidia/version").exists() and importlib.util.find_spec("pynvml") is None:
            raise
        return []
    count = first._ask("nvmlDeviceGetCount") or 1
    return [first, *(Gpu(index=index) for index in range(1, count))]


class Sampler:
    """Calls a source at a steady rate until it is stopped; a context manager."""

    def __init__(self, source: Source, hz: float = HZ):
        self.hz = hz
        self.samples: list[Sample] = []
        self._source = source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self.samples.append(self._source())
            due = max(due + 1 / self.hz, time.monotonic() - 1 / self.hz)  # a late one is not made up for by many
            self._stop.wait(max(0.0, due - time.monotonic()))

    def between(self, start: float, end: float) -> list[Sample]:
        """Samples of a stretch of time.monotonic()."""
        return [sample for sample in list(self.samples) if start <= sample.time <= end]


def summarise(samples: list[Sample], hz: float, points: int = POINTS) -> dict[str, Any]:
    """What the samples say, and a thinned series [seconds since the first, W, MHz, C].

    A reason's share is that of the samples that show it; "none" is that of those without any.
    """
    power = [s.power_w for s in samples if s.power_w is not None]
    clocks = [s.sm_mhz for s in samples if s.sm_mhz is not None]
    heat = [s.temperature_c for s in samples if s.temperature_c is not None]
    told = [s.reasons for s in samples if s.reasons is not None]
    shares = {name: sum(bool(bits & bit) for bits in told) / len(told) for bit, name in REASONS.items()} if told else {}
    shares |= {"none": sum(bits == 0 for bits in told) / len(told)} if told else {}
    step = max(1, -(-len(samples) // points))
    return {
        "samples": len(samples),
        "hz": hz,
        "power_w": {"mean": fmean(power), "max": max(power)} if power else None,
        "sm_mhz": {"min": min(clocks), "median": median(clocks), "max": max(clocks)} if clocks else None,
        "throttle_reasons": {name: share for name, share in shares.items() if share},
        "temperature_c": {"min": min(heat), "median": median(heat), "max": max(heat)} if heat else None,
        "series": [[round(s.time - samples[0].time, 2), s.power_w, s.sm_mhz, s.temperature_c] for s in samples[::step]],
    }
