"""A folder that appears under its name when it is whole: made as `NAME.partial`, then renamed."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dwslm.data.durable import sync_folder

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutFolder:
    """Where a dataset goes. `partial` is where it is made, `replaced` where an older one waits to be removed."""

    def __init__(self, out: str):
        self.given = out
        self.path = Path(os.path.abspath(out))
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.replaced = self.path.with_name(f".{self.path.name}.replaced")

    def recover(self) -> None:
        """Put right what a kill left while a new dataset was put in an old one's place.

        Raises:
            ValueError: the folder cannot be renamed.
        """
        if self.replaced.exists():
            if self.path.exists():
                shutil.rmtree(self.replaced)
            else:
                os.rename(self.replaced, self.path)
        if self.path.is_mount():
            raise ValueError(f"{self.path} is a mount point and cannot be renamed; name a folder inside it")

    @property
    def empty(self) -> bool:
        """Whether there is nothing under the name."""
        return not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make `partial` and hold its lock, so that two calls do not write into each other."""
        self.partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ValueError(f"{self.partial} is being written by another process; wait for it or stop it") from None
        finally:
            os.close(descriptor)

    def commit(self) -> None:
        """Give the finished folder its name."""
        if not self.empty:
            os.rename(self.path, self.replaced)
        os.rename(self.partial, self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(self.replaced, ignore_errors=True)

    @contextmanager
    def full_disk_explained(self) -> Iterator[None]:
        """Say what to do where a write found no room."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise OSError(
                f"{self.given}: {os.strerror(error.errno)}; make room and run the same command again, "
                "finished shards are kept"
            ) from None
