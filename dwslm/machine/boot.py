"""Processes: which start of the machine this is, whether a process of an earlier moment still lives, what runs below another."""

import os
import re
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Changes with every start of the machine; None where the kernel does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None


def started(pid: int) -> str | None:
    """When a living process was started, in the kernel's ticks since the boot; None where there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def identity() -> str:
    """This process among all that ever were on this machine: boot, number, start; safe as a file's name."""
    return f"{boot_id() or 'unknown'}.{os.getpid()}.{started(os.getpid()) or 0}"


def alive(who: str) -> bool:
    """Whether the process that `identity` described still lives."""
    match = re.fullmatch(r"(.+)\.(\d+)\.(\d+)", who)
    return match is not None and match[1] == (boot_id() or "unknown") and started(int(match[2])) == match[3]


def below(root: int) -> list[int]:
    """All living descendants of a process, parents before children; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, queue = [], [root]
    while queue:
        mine = children.get(queue.pop(0), [])
        found += mine
        queue += mine
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def oom_kills() -> int:
    """How often the kernel has killed something for want of host memory: in this control group, else on the machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = [line.split() for line in Path(path).read_text().splitlines()]
        except OSError:
            continue
        for name, count in lines:
            if name == "oom_kill":
                return int(count)
    return 0
