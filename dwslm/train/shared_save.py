"""One checkpoint that several ranks write together."""

import contextlib

from dwslm.train.distributed import Ranks
from dwslm.train.rank_watch import text_of


class SharedSave:
    """A checkpoint that several ranks write: rank 0 makes the folder, each writes its file, rank 0 vouches for all.

    Called from the threads that write, so it uses words alone, never a collective. With one rank nothing is waited for.
    """

    def __init__(self, ranks: Ranks, number: int):
        """number: of this save among those of the ranks' life, the same on all."""
        self._ranks, self._key = ranks, f"save/{number}"
        self.rank, self.world = ranks.rank, ranks.world
        self._over = False

    def begun(self) -> None:
        """Rank 0: the folder is there."""
        self._say("begun")

    def wait_begun(self) -> None:
        """Others: returns once it is. Raises OSError where rank 0 could not make it."""
        self._hear("begun")

    def written(self) -> None:
        """Others: this rank's file is on disk."""
        self._say(f"written/{self.rank}")

    def wait_written(self) -> None:
        """Rank 0: returns once all other files are. Raises OSError with the reason of the first that is not."""
        for rank in range(1, self.world):
            self._hear(f"written/{rank}")

    def committed(self) -> None:
        """Rank 0: the checkpoint is safe. Nothing of the others."""
        self._over = True
        if self.rank == 0:
            self._say("committed")

    def wait_committed(self) -> None:
        """Others: returns once it is. Raises OSError where it could not be saved."""
        self._hear("committed")

    def failed(self, error: BaseException) -> None:
        """This rank's part of the save has failed: those who wait for it hear the reason. Nothing once it is committed."""
        if self._over:
            return
        with contextlib.suppress(RuntimeError):  # the store may be what is gone; then all leave anyhow
            for what in ("begun", "committed") if self.rank == 0 else (f"written/{self.rank}",):
                self._say(what, text_of(error))

    def _say(self, what: str, error: str = "") -> None:
        if self.world > 1:
            self._ranks.say(f"{self._key}/{what}", error)

    def _hear(self, what: str) -> None:
        if self.world > 1 and (error := self._ranks.hear(f"{self._key}/{what}")):
            raise OSError(error)
