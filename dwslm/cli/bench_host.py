"""What a benchmark says of the machine that it ran on, and of what is installed there."""

import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("dwslm", "torch", "triton", "numpy", "fla-core", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "apache-tvm-ffi",
            "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "flash-qla", "cut-cross-entropy", "transformer-engine",
            "nvidia-ml-py")  # fmt: skip


def host() -> dict[str, Any]:
    """The machine without its GPU."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    memory = None
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": name, "cpus": os.cpu_count(), "host_memory_bytes": memory}
