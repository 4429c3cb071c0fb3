"""Who may use a GPU: one lock file each, held by a process, freed by the kernel when that process is gone.

The lock is flock's, on a file on local disk; what stands in the file only serves messages. It holds on one host, among programs
that ask. A file descriptor of a lease that is handed to a child keeps the lease until the child has gone, too.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType


def lease_folder() -> Path:
    """Where lock files lie unless another place is given: one folder for all users of this host."""
    return Path(tempfile.gettempdir(), "dwslm-gpus")


class Taken(ValueError):
    """Somebody else holds the lease."""


class Lease:
    """Exclusive hold on one GPU until `release()`; a context manager.

    Raises:
        Taken: naming the holder.
        OSError: where the lock file cannot be made.
    """

    def __init__(self, gpu: str, what: str = "", folder: Path | None = None):
        """
        Args:
            gpu: the GPU's UUID, or any name that all who ask agree on.
            what: told to whoever asks in vain.
        """
        self.gpu = gpu
        folder = folder or lease_folder()
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if made:
            with contextlib.suppress(OSError):
                folder.chmod(0o1777)  # other users of the host lease GPUs here, too
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', gpu)}.lock"
        self._fd = _open(self.path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise Taken(f"GPU {gpu} is in use by {_describe(holder)}") from None
        who = {"pid": os.getpid(), "host": socket.gethostname(), "what": what[:500]}
        with contextlib.suppress(OSError):  # a full disk must not stop a run for it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(who).encode(), 0)

    def fileno(self) -> int:
        """For handing the lease to a child."""
        return self._fd

    def release(self) -> None:
        """Ends it here; a child that was given the descriptor still has it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def take(gpus: Iterable[str], count: int, what: str = "", folder: Path | None = None) -> list[Lease]:
    """Leases of the first `count` free ones of `gpus`.

    Raises:
        Taken: where fewer are free, naming who holds the others; none is held then.
    """
    held: list[Lease] = []
    taken: list[str] = []
    for gpu in gpus:
        if len(held) == count:
            break
        try:
            held.append(Lease(gpu, what, folder))
        except Taken as error:
            taken.append(str(error))
    if len(held) < count:
        for lease in held:
            lease.release()
        raise Taken(f"{count} GPUs wanted, {len(held)} free" + "".join(f"; {reason}" for reason in taken))
    return held


def _open(path: Path) -> int:
    # Without O_CREAT first: in a folder like /tmp the kernel may refuse to "create" a file that another user owns.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    fd = os.open(path, flags | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o666)  # the umask would keep other users out
    return fd


def _describe(holder: bytes) -> str:
    try:
        who = json.loads(holder)
        return f"pid {who['pid']} on {who['host']}" + (f" ({who['what']})" if who.get("what") else "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "another process"
