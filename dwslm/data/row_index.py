"""The running count of rows: which window a row is in, kept on disk beside the dataset."""

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAVE_EVERY = 64
"""Windows between two writes of the file. A killed run counts these again, in a fraction of a second."""


class RowIndex:
    """Rows before each window, for the windows counted so far.

    The file is only ever a saving of time. One that is damaged, or belongs to another key, is left out of
    account and replaced; one that can't be written costs the count at the next start. Either is said in
    `warnings`.

    Args:
        key: hex digest of all that decides the rows. The file is `rows-<key, shortened>.npz`.
        folder: where the file is kept, created when first needed; None keeps nothing.
    """

    def __init__(self, key: str, folder: Path | None) -> None:
        self.key = key
        self.path = None if folder is None else Path(folder) / f"rows-{key[:20]}.npz"
        self.warnings: list[str] = []
        self._starts = np.zeros(1, dtype=np.int64)  # grows by doubling
        self.windows = 0
        self._saved = 0
        if self.path is not None:
            counts = self._read(self.path)
            if counts is not None:
                self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
                self.windows = self._saved = len(counts)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Rows before each counted window, then the number of rows in all of them, int64 [windows + 1]."""
        return self._starts[: self.windows + 1]

    @property
    def rows(self) -> int:
        """Rows in the windows counted so far."""
        return int(self._starts[self.windows])

    def find(self, row: int) -> int:
        """The window that holds a row below `rows`."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def append(self, count: int) -> None:
        """Add the next window, of `count` rows."""
        if self.windows + 1 == len(self._starts):
            self._starts = np.concatenate([self._starts, np.zeros_like(self._starts)])
        self._starts[self.windows + 1] = self.rows + count
        self.windows += 1
        if self.windows - self._saved >= SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write what has been counted since the last write, if anything: to a temporary file, then
        renamed."""
        if self.path is None or self.windows == self._saved:
            return
        self._saved = self.windows
        counts = np.diff(self.starts).astype("<u4")
        temporary = self.path.with_name(f".{self.path.stem}-{uuid.uuid4().hex}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                np.savez(file, key=self.key, counts=counts, sha256=_digest(self.key, counts))
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._warn(f"{self.path}: the row index can't be kept ({error.strerror}); each start counts it anew")

    def _read(self, path: Path) -> NDArray[np.uint32] | None:
        # A damaged zip or header can raise nearly anything, and all of it means the same: count again.
        try:
            with np.load(path, allow_pickle=False) as file:
                counts = file["counts"]
                whole = counts.dtype == np.dtype("<u4") and counts.ndim == 1
                if whole and str(file["key"]) == self.key and str(file["sha256"]) == _digest(self.key, counts):
                    return counts
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            self._warn(f"{path}: the row index can't be read ({type(error).__name__}) and is counted anew")
            return None
        self._warn(f"{path}: the row index is damaged or of another run and is counted anew")
        return None

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def _digest(key: str, counts: NDArray[np.uint32]) -> str:
    return hashlib.sha256(key.encode() + counts.tobytes()).hexdigest()
