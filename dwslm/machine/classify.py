"""Why a training process ended, from its exit code, its own last event, what it printed, and what the machine saw."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREEMPTED = 75
"""Exit code of a run that saved and left because it was told to."""
INTERRUPTED = 130
BACK_OFF_S = (30.0, 120.0, 600.0)

DONE, STOPPED, CONFIGURATION, MEMORY, NON_FINITE, DISK = (
    "done",
    "preempted",
    "bad_configuration",
    "out_of_memory",
    "non_finite",
    "disk_full",
)
CACHE, DEVICE, HARDWARE, KILLED, HANG, CRASH = "damaged_cache", "cuda_error", "hardware", "killed", "hang", "crash"

RETRIES = {
    DONE: 0,
    STOPPED: 0,  # whoever stopped it says when it goes on
    CONFIGURATION: 0,
    MEMORY: 0,
    NON_FINITE: 0,  # the trainer has stepped back and tried again by itself before it ends so
    HARDWARE: 0,
    DISK: 2,
    CACHE: 1,
    CRASH: 1,
    DEVICE: 2,
    KILLED: 2,
    HANG: 2,
}
"""Class -> how often it is tried again without a new checkpoint in between."""

XID = {
    13: ("graphics engine exception", "again"),
    31: ("GPU memory page fault", "again"),
    43: ("GPU stopped processing", "again"),
    45: ("preemptive channel removal", "again"),
    48: ("double bit memory error", "drain the machine and reset the GPU"),
    63: ("memory row remapped", "reset the GPU when the run is over"),
    64: ("memory row could not be remapped", "drain the machine and reset the GPU"),
    74: ("NVLink error", "check the links"),
    79: ("GPU has fallen off the bus", "reboot"),
    94: ("contained memory error", "again"),
    95: ("uncontained memory error", "drain the machine and reset the GPU"),
    119: ("GPU system processor does not answer", "reboot"),
    120: ("GPU system processor error", "reboot"),
}
"""The driver's error codes that end runs, and what helps. Our grouping, November 2026; NVIDIA's Xid catalog decides."""
HARDWARE_XID = (48, 64, 79, 95, 119, 120)

# Looked for in what the process printed, in this order.
SIGNATURES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        MEMORY,
        re.compile(r"OutOfMemoryError|out of memory|^MemoryError|can't allocate memory|Cannot allocate memory", re.M),
    ),
    (DISK, re.compile(r"No space left on device|Disk quota exceeded|MB needed, [\d,]+ MB free")),
    (NON_FINITE, re.compile(r"FloatingPointError|the loss is (nan|inf|-inf)")),
    (
        DEVICE,
        re.compile(
            r"CUDA error|CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error|NCCL error|ncclSystemError|"
            r"ncclUnhandledCudaError|ncclRemoteError|Watchdog caught collective operation timeout|AcceleratorError|"
            r"Triton Error \[CUDA\]|uncorrectable ECC|No CUDA GPUs are available|no CUDA-capable device"
        ),
    ),
    # What the other ranks of a run say of one that is lost, where it has not told the reason itself.
    (
        KILLED,
        re.compile(r"rank \d+ \(pid \d+ on [^)]*\) has died|launcher is gone, and the ranks' meeting place with it"),
    ),
    (
        HANG,
        re.compile(
            r"rank \d+ \(pid .*(has not been heard of|has kept the others waiting)|no rank has moved for|"
            r"rank \d+ has not come within \d+ s"
        ),
    ),
)
# A damaged file of a compiler cache: an error that such a file causes, and a compiler's cache in the same report.
CACHE_ERROR = re.compile(
    r"file too short|CppCompileError|invalid ELF header|device kernel image is invalid|JSONDecodeError|EOFError|UnpicklingError|"
    r"has no attribute '(call|kernel|cpp_fused\w*|triton_\w+|benchmark_compiled_module)'|"
    r"cannot open shared object file|undefined symbol|source code string cannot contain null bytes|bad magic number|"
    r"No such file or directory: '[^']*(inductor|triton)"
)
CACHE_PLACE = re.compile(r"torchinductor_|[/_]inductor/|/triton/|triton/compiler|torch/_inductor/")


@dataclass(frozen=True)
class Evidence:
    """What is known of a process that has ended."""

    code: int
    """Exit code; -N for a death by signal N."""
    event: Mapping[str, Any] | None = None
    """The last event of this attempt that says where the run stands, as the trainer wrote it."""
    text: str = ""
    """The end of what it printed on standard error."""
    hang: str | None = None
    """Which deadline it broke, if it was killed for that."""
    xid: Sequence[int] = field(default=())
    """The driver's error codes of its time."""
    oom_kills: int = 0
    """How often the kernel killed something here for want of host memory meanwhile."""


@dataclass(frozen=True)
class Verdict:
    """The class of an end, and the reason in one line."""

    kind: str
    reason: str

    @property
    def retries(self) -> int:
        return RETRIES[self.kind]


def classify(seen: Evidence) -> Verdict:
    """The class of an end. The run's own last event outranks the exit code, which launchers replace by their own."""
    kind = seen.event["event"] if seen.event else None
    if kind == "done" or (seen.code == 0 and seen.hang is None):
        return Verdict(DONE, "ran to its end")
    if seen.hang is not None:
        return Verdict(HANG, seen.hang)
    if kind in ("preempted", "stopped", "paused") or seen.code in (PREEMPTED, INTERRUPTED, -signal.SIGINT):
        return Verdict(STOPPED, str((seen.event or {}).get("reason") or f"exit code {seen.code}"))
    reason = _reason(seen)
    for code in seen.xid:
        if code in HARDWARE_XID:
            return Verdict(HARDWARE, f"Xid {code}: {XID[code][0]}; {XID[code][1]}. {reason}")
    text = f"{seen.text}\n{(seen.event or {}).get('error', '')}: {(seen.event or {}).get('reason', '')}"
    if _damaged_cache(text):
        return Verdict(CACHE, reason)
    for name, pattern in SIGNATURES:
        if pattern.search(text):
            return Verdict(name, reason)
    if seen.xid:
        told = ", ".join(f"Xid {code}" + (f" ({XID[code][0]})" if code in XID else "") for code in seen.xid)
        return Verdict(DEVICE, f"{told}. {reason}")
    if seen.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP):
        if seen.oom_kills:
            return Verdict(MEMORY, "killed by the kernel: the machine ran out of host memory")
        return Verdict(KILLED, reason)
    # A mistake of the user's is one line on standard error and code 1; argparse and Hydra leave with 2.
    if seen.code in (1, 2) and re.search(r"^(error: |usage: |\S+: error: )", seen.text, re.M):
        return Verdict(CONFIGURATION, reason)
    return Verdict(CRASH, reason)


def _damaged_cache(text: str) -> bool:
    # Compilers warn of entries that they could not read and go on: those lines are no end.
    told = "\n".join(line for line in text.splitlines() if not re.match(r"[IWE]\d{4} ", line))
    return bool(CACHE_ERROR.search(told) and CACHE_PLACE.search(told))


def _reason(seen: Evidence) -> str:
    if seen.event and seen.event["event"] == "failed":
        return f"{seen.event.get('error', 'failed')}: {seen.event.get('reason', '')}"[:500]
    lines = [line.strip() for line in seen.text.splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if line.startswith("error: ")), None)
    told = told or next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)), None
    )
    how = f"killed by {signal.Signals(-seen.code).name}" if seen.code < 0 else f"exit code {seen.code}"
    return f"{how}: {told.removeprefix('error: ')}"[:500] if told else how


def back_off(failures: int) -> float:
    """Seconds to wait after so many failures in a row, from 1."""
    return BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
