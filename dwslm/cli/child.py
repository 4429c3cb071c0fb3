"""What a training process does before it compiles anything: its compiler cache, and what a supervisor wants of it."""

import atexit
import faulthandler
import os
import platform
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dwslm.machine import compiler_cache
from dwslm.machine.health import list_gpus

ANNOUNCE = "DWSLM_ANNOUNCE"
"""Names a file that the training process writes its run folder into; set by the supervisor."""
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.sshfs", "fuse.juicefs",
          "fuse.glusterfs"}  # fmt: skip
"""Types of file systems that lie on other machines."""


def begin(console: Console) -> None:
    """Called once, before anything compiles."""
    begin_cache(console)
    if hasattr(faulthandler, "register") and sys.__stderr__:  # not on Windows, nor without a standard error
        # Written by a C handler to standard error, even by a process that holds the interpreter lock and hangs.
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True, chain=False)


def announce(run: Path) -> None:
    """Tells a supervisor, if there is one, where this run lies. Whole or not there: it reads while this writes."""
    target = os.environ.get(ANNOUNCE)
    if target:
        new = Path(f"{target}.{os.getpid()}")
        new.write_text(str(run.resolve()), encoding="utf-8")
        new.replace(target)


# ---- the compiler cache ---------------------------------------------------------------------------------


def begin_cache(console: Console) -> None:
    """Points compilers at the cache of this torch, Triton, driver, GPU and Python, after moving damaged parts of it aside.

    A folder that the environment names already is left as it is.
    """
    root = cache_root() / cache_key()
    folders = cache_folders(root, os.environ)
    marker, unclean, others = compiler_cache.begin(root)
    # After a clean end a look at sizes is enough. Young files count too, unless another process may be writing them now.
    recent = compiler_cache.RECENT_S if others else 0.0
    for part in compiler_cache.move_aside(folders.values(), recent, deep=unclean):
        told = f"damaged compiler cache: moved {part.source} to {part.target}"
        console.print(Text(told + (f" ({', '.join(part.empty[:3])})" if part.empty else "")))
    for name, folder in folders.items():
        os.environ[name] = str(folder)
    atexit.register(compiler_cache.end, marker)


def cache_folders(root: Path, environment: Mapping[str, str]) -> dict[str, Path]:
    """Variable -> folder: those under `root`, where the environment names none."""
    ours = {INDUCTOR: root / "inductor", TRITON: root / "triton"}
    return {name: Path(environment.get(name) or folder) for name, folder in ours.items()}


def cache_root() -> Path:
    """Folder of all our compiler caches: the user's cache folder, or the temporary one where that lies on a network disk."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if file_system(home) in REMOTE:
        return Path(tempfile.gettempdir(), f"dwslm-{os.getuid()}", "compiled")
    return home / "dwslm" / "compiled"


def file_system(path: Path) -> str:
    """Type of the file system that holds a path; "" where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    whole = str(path.resolve())
    found, kind = -1, ""
    for _, place, name, *_ in mounts:
        if (whole == place or whole.startswith(place.rstrip("/") + "/")) and len(place) >= found:
            found, kind = len(place), name
    return kind


def cache_key() -> str:
    """What compiled code depends on: torch, Triton, driver, GPU and Python; safe as a file's name."""
    parts = [f"{name}-{installed(name)}" for name in ("torch", "triton")]
    gpus = list_gpus()
    if gpus:
        models = sorted({gpu.name()[0] or "unknown" for gpu in gpus})
        parts += [f"driver-{gpus[0].facts()['driver']}", *models]
    else:
        parts.append("cpu-" + platform.machine())
    parts.append(f"python-{platform.python_version()}")
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "_".join(parts))


def installed(package: str) -> str:
    """Version of a package, "none" without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
