"""A log that many processes on many hosts add to: numbered files, one an event, each put in its place by link(2).

A link refuses a name that is taken, on local disks and on network ones. So whoever adds event n has read all events before it,
and what it decided by them still holds: no locks, and nothing to repair after a kill.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dwslm.runs.durable import disk_error, from_json, sync, to_json

DIGITS = 8
Event = dict[str, Any]


class QueueLog:
    """Reads and adds events. For one thread.

    Attributes:
        last: number of the last event that was read; 0 before the first.
        damaged: events without content, which a power cut leaves where one was promised and not yet acknowledged.

    Raises:
        ValueError: where events are missing in between.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.last = 0
        self.damaged = 0
        there = [int(name[:-5]) for name in _names(self.folder) if re.fullmatch(rf"\d{{{DIGITS}}}\.json", name)]
        if there and max(there) != len(there):
            missing = min(set(range(1, max(there))) - set(there))
            raise ValueError(f"{self._path(missing)} is missing, and later events are there: put it back")

    def new(self) -> list[tuple[int, Event]]:
        """Events since the last call, with their numbers, in order.

        Raises OSError where the log is there and cannot be read.
        """
        found: list[tuple[int, Event]] = []
        while True:
            path = self._path(self.last + 1)
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                return found
            except UnicodeDecodeError:
                text = ""
            except OSError as error:
                raise disk_error(f"cannot read {path}", error) from error
            self.last += 1
            try:
                event = from_json(text)
            except ValueError:
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                found.append((self.last, event))
            else:
                self.damaged += 1

    def append(
        self, decide: Callable[[], Event | None], take: Callable[[int, Event], None], durable: bool
    ) -> int | None:
        """Adds what `decide` says, asked again whenever somebody else was first.

        Args:
            decide: the event, judged by all that was read; None for none. May raise.
            take: is given every event that is read meanwhile, and the new one.
            durable: the event is on disk when this returns. Without it, it outlives this process, but no power cut.

        Returns:
            The event's number; None where `decide` has none.
        """
        while True:
            for number, event in self.new():
                take(number, event)
            event_or_none = decide()
            if event_or_none is None:
                return None
            if self._put(event_or_none, durable):
                take(self.last, event_or_none)
                return self.last

    def _put(self, event: Event, durable: bool) -> bool:
        """Whether the event is now number last + 1."""
        path = self._path(self.last + 1)
        draft = self.folder / f".new-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Whole and closed before it has its name: a reader never sees a part, on a network disk neither.
            draft.write_text(to_json(event) + "\n", encoding="utf-8")
            os.link(draft, path)
            if durable:
                sync(path)
                sync(self.folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise ValueError(f"{self.folder} is on a disk without hard links: put the queue elsewhere") from error
            raise disk_error(f"cannot write {path}", error) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        self.last += 1
        return True

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:0{DIGITS}}.json"


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []
