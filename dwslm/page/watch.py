"""All runs of a folder at one moment, and again and again: only what may have changed is read."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dwslm.page.jobs import JobLine, Jobs
from dwslm.page.run_data import Signature, signature
from dwslm.runs.folder import RunFolder, list_runs, open_run
from dwslm.runs.summary import RunSummary, summaries, summary

OVER = ("done", "stopped", "failed")
"""States that only new files or a taken lock can change."""
LOST_S = 60.0  # after which a lost run's words about its silence are renewed


@dataclass(frozen=True)
class Overview:
    """All runs at one moment, newest first, each with the signature of its files."""

    runs: tuple[RunSummary, ...]
    signatures: Mapping[str, Signature]
    unreadable: tuple[tuple[Path, str], ...]
    now: float
    jobs: tuple[JobLine, ...] = ()
    """Of the queue: those without a run."""
    queue_wrong: str = ""
    """Why the queue says nothing, in one line; its runs then stand as their own files say."""

    def find(self, folder: str) -> RunSummary | None:
        return next((run for run in self.runs if run.path.name == folder), None)


def overview(runs_dir: str | os.PathLike[str], now: float, queue: str | os.PathLike[str] | None = None) -> Overview:
    """One look. Raises ValueError where there is no such folder, or no queue where one is named."""
    return told(_look(runs_dir, now), Jobs(queue))


def told(seen: Overview, jobs: Jobs) -> Overview:
    """With what the queue says."""
    runs, lines = jobs.look(seen.runs, seen.now)
    return replace(seen, runs=runs, jobs=lines)


def _look(runs_dir: str | os.PathLike[str], now: float) -> Overview:
    root = Path(runs_dir)
    if not root.is_dir():
        raise ValueError(f"no folder of runs at {root}; give it with --runs DIR")
    # Signatures first: what changes from here on is seen by the next look.
    signatures = {path.name: signature(path) for path in _folders(root)}
    runs = tuple(run for run in summaries(root, now) if run.path.name in signatures)
    odd = signatures.keys() - {run.path.name for run in runs}
    return Overview(runs, signatures, tuple(list_runs(root)[1]) if odd else (), now)


class Watch:
    """Looks at the same folder again and again. For one thread at a time."""

    def __init__(self, runs_dir: str | os.PathLike[str], queue: str | os.PathLike[str] | None = None):
        """queue: folder of the queue, None for none."""
        self.runs_dir = Path(runs_dir)
        self._jobs = Jobs(queue)
        self._folders: dict[str, RunFolder] = {}
        self._known: dict[str, tuple[Signature, int, RunSummary, float]] = {}
        self._began = False

    def look(self, now: float) -> Overview:
        """Raises ValueError where the folder is gone. A queue that cannot be read is no reason to show no runs."""
        seen = self._runs(now)
        try:
            return told(seen, self._jobs)
        except (OSError, ValueError) as error:
            return replace(seen, queue_wrong=" ".join(str(error).split()))

    def _runs(self, now: float) -> Overview:
        if not self._began:
            first = _look(self.runs_dir, now)
            self._known = {
                run.path.name: (first.signatures[run.path.name], _lock(run.path), run, now) for run in first.runs
            }
            self._began = True
            return first
        if not self.runs_dir.is_dir():
            raise ValueError(f"the folder of runs at {self.runs_dir} is gone")
        known, unreadable = {}, []
        for path in _folders(self.runs_dir):
            seen, lock = signature(path), _lock(path)
            before = self._known.get(path.name)
            if before is not None and before[:2] == (seen, lock) and _stands(before[2], before[3], now):
                known[path.name] = before
                continue
            try:
                known[path.name] = (seen, lock, summary(self._folder(path), now), now)
            except (ValueError, OSError) as error:
                unreadable.append((path, str(error)))
        self._known = known
        self._folders = {name: run for name, run in self._folders.items() if name in known}
        runs = sorted(
            (entry[2] for entry in known.values()), key=lambda run: (run.created, run.path.name), reverse=True
        )
        return Overview(tuple(runs), {name: entry[0] for name, entry in known.items()}, tuple(unreadable), now)

    def _folder(self, path: Path) -> RunFolder:
        if path.name not in self._folders:  # run.json never changes
            self._folders[path.name] = open_run(path, self.runs_dir)
        return self._folders[path.name]


def _stands(run: RunSummary, at: float, now: float) -> bool:
    return run.state in OVER or (run.state == "lost" and 0 <= now - at < LOST_S)


def _folders(root: Path) -> Iterator[Path]:
    for name in sorted(os.listdir(root)):
        if not name.startswith(".") and (root / name / "run.json").is_file():
            yield root / name


def _lock(run: Path) -> int:
    """When the lock was last taken or freed."""
    try:
        return (run / "lock").stat().st_mtime_ns
    except OSError:
        return 0
