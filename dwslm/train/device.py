"""The device a run computes on, how it is made deterministic, and how fast its matrix unit is on paper."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

# Dense bf16 peaks in FLOP/s, from the vendor's data sheets. A device that is not listed has no MFU: a guess would be worse.
PEAK_BF16 = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 SXM5 80GB": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12,
}


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: for another name, or a GPU that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not (name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit())):
        raise ValueError(f"train.device={name!r} is not auto, cpu, cuda or cuda:N")
    if name.startswith("cuda"):
        count = torch.cuda.device_count()
        if int(name[5:] or 0) >= count:
            raise ValueError(
                f"train.device={name!r}: torch sees {count} GPUs here; use train.device=cpu or another machine"
            )
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device in FLOP/s, None where it is not known."""
    return PEAK_BF16.get(device_name(device)) if device.type == "cuda" else None


def set_numerics(deterministic: bool, threads: int) -> None:
    """Process-wide numerics. float32 products stay float32 (no TF32): only bf16 and FP8 are meant to be fast.

    On a GPU `deterministic` also needs CUBLAS_WORKSPACE_CONFIG in the environment before the first product.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(deterministic)
    if threads:
        torch.set_num_threads(threads)


STEPS_AHEAD = 2


class RunAhead:
    """Keeps the host at most `STEPS_AHEAD` steps ahead of a GPU: the GPU never waits, and a run that is to leave not long.

    It also counts what the host waits for. Nothing is asked of the device for that: the host waits there anyway.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._ends: deque[torch.cuda.Event] = deque()
        self._waited: defaultdict[str, float] = defaultdict(float)  # seconds, by what for

    def timed(self, what: str, call: Callable[[], Result]) -> Result:
        """Calls something that waits for `what` ("data", "device")."""
        began = time.perf_counter()
        result = call()
        self._waited[what] += time.perf_counter() - began
        return result

    def waits(self, steps: int) -> dict[str, float]:
        """Seconds a step since the last call: `data_seconds`, on a GPU `device_seconds`. The rest is the host's own work."""
        names = ("data", "device") if self._device.type == "cuda" else ("data",)
        told = {f"{name}_seconds": self._waited[name] / steps for name in names}
        self._waited.clear()
        return told

    def wait(self) -> None:
        """Call after queueing a step; returns when the device has ended all but the last few."""
        if self._device.type != "cuda":
            return
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > STEPS_AHEAD:
            self.timed("device", self._ends.popleft().synchronize)
