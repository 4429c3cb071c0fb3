"""Run folders: make one, find one again, and let only one process train in it."""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwslm.runs.durable import disk_error, from_json, sync, to_json, write_synced
from dwslm.runs.reader import FINISHED, last_lifecycle

FORMAT_VERSION = 1
NAME_LIMIT = 48  # characters of the name that go into the folder's name; run.json keeps all of it

LOCK_TRIES, LOCK_PAUSE_S = 10, 0.01
"""How long a lock that is held is asked for: longer than a reader looks at it."""


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. `record` is run.json, which never changes once the folder exists."""

    path: Path
    record: dict[str, Any]

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def name(self) -> str:
        """The name as it was given, which may hold anything; the folder's name is a safe form of it."""
        return str(self.record["name"])

    @property
    def test(self) -> str:
        """The test that it belongs to, "" for none."""
        return str(self._proxy().get("test") or "")

    @property
    def arm(self) -> str:
        """Its arm of that test, "" where it was not named."""
        return str(self._proxy().get("arm") or "")

    @property
    def job(self) -> str:
        """The job of a queue that it was started by, "" for none."""
        return str(self._proxy().get("job") or "")

    def _proxy(self) -> dict[str, Any]:
        config = self.record.get("config")
        proxy = config.get("proxy") if isinstance(config, dict) else None
        return proxy if isinstance(proxy, dict) else {}

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def next_attempt(self, writer: str = "trainer") -> int:
        """Number of the attempt about to start, from 1: one more than any whose files are here."""
        own = re.compile(rf"(?:events-{re.escape(writer)}|metrics)-(\d+)\.jsonl")
        found = [own.fullmatch(name) for name in os.listdir(self.path)]
        return 1 + max((int(match[1]) for match in found if match), default=0)

    def lock(self) -> "RunLock":
        """Takes the run for this process; the kernel frees it when the process ends, however it ends.

        Raises ValueError naming the holder where another process has it.
        """
        return RunLock(self.path / "lock")

    @property
    def host(self) -> str | None:
        """Name of the machine that trains it, or did last."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((self.path / "lock").read_bytes())["host"])
        hardware = self.record.get("hardware")
        return hardware.get("host") if isinstance(hardware, dict) else None

    def held(self) -> bool | None:
        """Whether a process trains it; None where this machine can't tell, because another one does or did last."""
        if self.host not in (None, socket.gethostname()):
            return None
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for an instant; who wants the run tries longer than that
            return False
        except OSError as error:
            return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
        finally:
            os.close(fd)


class RunLock:
    """Exclusive hold on a run, as a context manager or until `release()`."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise disk_error(f"cannot open {path}", error) from error
        try:
            self._take()
        except OSError as error:
            holder = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise disk_error(f"cannot lock {path}", error) from error
            raise ValueError(f"{path.parent} is in use by {_describe(holder)}; stop that process first") from error
        # The content only serves the message above; what holds the run is the lock itself.
        with contextlib.suppress(OSError):  # a full disk must not stop a run for it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, to_json({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _take(self) -> None:
        for _ in range(LOCK_TRIES):
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # held, or looked at by `RunFolder.held`
                time.sleep(LOCK_PAUSE_S)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _describe(holder: bytes) -> str:
    try:
        who = json.loads(holder)
        return f"pid {who['pid']} on {who['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def slug(name: str) -> str:
    """`name` in lower-case ASCII letters, digits, dots, dashes and underscores, `NAME_LIMIT` at most."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    safe = re.sub(r"[^a-z0-9._-]+", "-", ascii_name).strip("-._")[:NAME_LIMIT].rstrip("-._")
    return safe or "run"


def create_run(
    root: str | os.PathLike[str],
    name: str,
    record: dict[str, Any],
    *,
    clock: Callable[[], float] = time.time,
) -> RunFolder:
    """A new folder `<root>/<UTC time>-<name>-<id>/` with its run.json.

    `record` is plain data (config, hash, commit, versions, seed, hardware); the keys `format_version`,
    `id`, `name` and `created` (seconds since 1970) are added here. The folder appears with its run.json or
    not at all.
    Raises ValueError where the record is not plain data, OSError where the disk refuses.
    """
    created = clock()
    own = {"format_version": FORMAT_VERSION, "id": secrets.token_hex(3), "name": name, "created": created}
    if taken := own.keys() & record.keys():
        raise ValueError(f"run record may not hold {', '.join(sorted(taken))}: written by create_run")
    try:
        text = to_json(own | record)
    except ValueError as error:
        raise ValueError(f"run record {error}") from error
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(created))
    path = Path(root) / f"{stamp}-{slug(name)}-{own['id']}"
    unborn = path.with_name(f".new-{path.name}")
    try:
        unborn.mkdir(parents=True)
        write_synced(unborn / "run.json", text + "\n")
        sync(unborn)
        unborn.rename(path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(unborn, ignore_errors=True)
        raise disk_error(f"cannot create run folder {path}", error) from error
    return RunFolder(path, from_json(text))


def _read(path: Path) -> RunFolder:
    """Raises FileNotFoundError where this is no run, ValueError where run.json cannot be used."""
    try:
        record = from_json((path / "run.json").read_text(encoding="utf-8"))
        version = record["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this program reads {FORMAT_VERSION}")
        record["id"], record["name"], record["created"] + 0.0
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}/run.json is not a run record: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{path}/run.json cannot be read: {error}") from error
    return RunFolder(path, record)


def list_runs(root: str | os.PathLike[str]) -> tuple[list[RunFolder], list[tuple[Path, str]]]:
    """All runs under `root`, newest first, and the folders whose run.json cannot be read, with the reason."""
    runs: list[RunFolder] = []
    unreadable: list[tuple[Path, str]] = []
    folder = Path(root)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            runs.append(_read(path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # some other folder
        except (ValueError, OSError) as error:
            unreadable.append((path, str(error)))
    runs.sort(key=lambda run: (run.record["created"], run.path.name), reverse=True)
    return runs, unreadable


def open_run(which: str | os.PathLike[str], root: str | os.PathLike[str]) -> RunFolder:
    """The run meant by `which`: a path, or under `root` a folder's name, its id or other unique ending, or
    a run's name where only one has it. Two words are special: `latest` is the newest run, `auto` the newest
    unfinished one.

    Raises ValueError, listing what is there, where nothing or more than one fits.
    """
    text = os.fspath(which)
    if text in ("latest", "auto"):
        return _newest(root, unfinished=text == "auto")
    for path in (Path(root) / text, Path(text)):
        if text and (path / "run.json").is_file():
            return _read(path)
    runs, unreadable = list_runs(root)
    for path, reason in unreadable:
        if path.name.endswith(text) and text:
            raise ValueError(reason)
    found = [
        run for run in runs if text and (text in (run.name, run.id, slug(run.name)) or run.path.name.endswith(text))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"run {text!r} is ambiguous: {_names(found)}; give the whole folder name")
    for path, reason in unreadable:
        if text and f"-{slug(text)}-" in path.name:
            raise ValueError(reason)
    for path in (Path(root) / text, Path(text)):
        if text and path.is_dir():
            raise ValueError(f"{path} is no run: it has no run.json; {root} holds {_names(runs)}")
    raise ValueError(f"no run {text!r} in {root}, which holds {_names(runs)}")


def _newest(root: str | os.PathLike[str], unfinished: bool) -> RunFolder:
    runs, unreadable = list_runs(root)
    if unreadable:  # it might be the one that is meant, and training on in an older one would be a surprise
        raise ValueError(f"cannot tell the newest run: {unreadable[0][1]}; move that folder away or name the run")
    for run in runs:
        if not unfinished:
            return run
        last = last_lifecycle(run)
        if last is None or last["event"] not in FINISHED:
            return run
    kind = "unfinished run" if unfinished else "run"
    if not runs:
        raise ValueError(f"no {kind} in {root}, which holds no runs: start one first, python train.py experiment=demo")
    raise ValueError(f"no {kind} in {root}, which holds {_names(runs)}")


def _names(runs: list[RunFolder], limit: int = 10) -> str:
    names = [run.path.name for run in runs[:limit]]
    more = f" and {len(runs) - limit} older" if len(runs) > limit else ""
    return ", ".join(names) + more if names else "no runs"
