"""Reads the JSON of `dwslm bench step` (described in docs/benchmark.md) and joins pieces: each build may be a call of its own."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dwslm.page.bench_file import Measured, short_commit, unique
from dwslm.runs.durable import from_json

FORMAT, KIND = 1, "step"
STATUSES = ("ok", "missing", "refused", "error", "skipped")
DONE = ("ok", "missing", "refused")
"""Statuses of rows that another call would not give more of."""
OBJECTS = ("config", "work", "data", "start", "second_start", "profile", "peer", "ceilings")
"""Fields of a row that are objects, or null."""
TEXTS, KERNEL_FIELDS = ("kernel", "class"), ("kernel", "class", "ms", "count")
CLASS_FIELDS = ("class", "ms", "ms_micro_batch", "share", "floor_ms", "floor_share")
PEER_FIELDS = ("parameters", "attention", "compiled")

ENDED = "ended before its time: what it had not reached is missing here."
MISSING, COMMITS = "Missing here: ", "The pieces come from different commits: "
"""Of notes that are found anew whenever files are joined."""


@dataclass(frozen=True)
class Build:
    """The row of one build, with where it comes from. `raw` is the row as the file has it.

    `name` ends in brackets with the overrides in which it differs from other rows of its name.
    """

    name: str
    status: str
    raw: Mapping[str, Any]
    commit: str
    started: str = ""
    """When its call began, as the file has it."""

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """What is measured: rows with the same are measurements of the same."""
        return self.name, tuple(sorted(words_of(self.raw)))

    def number(self, *names: str) -> float | None:
        """The number under these names, one in the other; None where there is none."""
        value: Any = self.raw
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def stat(self, name: str, scale: float = 1.0) -> Measured | None:
        """A measured value, times `scale`."""
        middle = self.number(name, "median")
        return None if middle is None else Measured(scale * middle, scale * (self.number(name, "spread") or 0.0))

    def runs(self, *names: str) -> list[float]:
        """That number of each timed run, those that have it."""
        runs = [Build(self.name, self.status, run, self.commit) for run in self.raw.get("runs") or []]
        return [value for run in runs if (value := run.number(*names)) is not None]

    @property
    def timed(self) -> bool:
        return self.number("tokens_per_second", "median") is not None

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        profile = self.raw.get("profile")
        return list(profile.get("classes") or []) if isinstance(profile, Mapping) else []


@dataclass(frozen=True)
class Steps:
    """Pieces of one device, joined. `stopped`: files of calls that were stopped, so that builds may be missing unnamed."""

    pieces: tuple[Mapping[str, Any], ...]
    paths: tuple[str, ...]
    builds: tuple[Build, ...]
    notes: tuple[str, ...]
    stopped: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return device_of(self.pieces[0])

    @property
    def timed(self) -> list[Build]:
        return [build for build in self.builds if build.timed]

    @property
    def source(self) -> str:
        """Command, commits (shortened) and device, as one line; the whole commands stand in the setup."""
        commits = ", ".join(unique(short_commit(build.commit) for build in self.builds))
        return f"dwslm bench step · commit {commits} · {self.device}"

    def as_json(self) -> dict[str, Any]:
        """One document of the whole: what the pieces agree on from the newest, the builds of all."""
        whole = dict(self.pieces[-1])
        return whole | {
            "command": "; ".join(unique(str(piece.get("command")) for piece in self.pieces)),
            "commit": ", ".join(unique(str(piece.get("commit") or "unknown") for piece in self.pieces)),
            "started": self.pieces[0].get("started"),
            "seconds": sum(float(piece.get("seconds") or 0) for piece in self.pieces),
            "complete": not self.stopped and all(build.status in DONE for build in self.builds),
            "overrides": shared(words_of(piece) for piece in self.pieces),
            "builds": [dict(build.raw) | {"commit": build.commit, "started": build.started} for build in self.builds],
            "notes": list(self.notes),
        }


def device_of(piece: Mapping[str, Any]) -> str:
    machine = piece.get("machine")
    return str(machine.get("device") or "unknown device") if isinstance(machine, Mapping) else "unknown device"


def is_step(path: str | os.PathLike[str]) -> bool:
    """Whether a file was written by `dwslm bench step`; False for what cannot be told.

    Raises OSError where it cannot be read.
    """
    try:
        data = from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


def join(paths: Sequence[str | os.PathLike[str]]) -> Steps:
    """Reads the files and joins them; of two rows for the same build that were timed, the later one counts.

    A build is its name and its overrides: rows of one name and other overrides stand beside each other.

    Raises:
        OSError: a file cannot be read.
        ValueError: for a file of another kind, and for pieces of different devices or clock caps.
    """
    read_pieces = sorted(
        ((str(path), read(path)) for path in paths), key=lambda piece: moment(str(piece[1].get("started") or ""))
    )
    if not read_pieces:
        raise ValueError("give at least one benchmark JSON")
    files, pieces = tuple(path for path, _ in read_pieces), tuple(piece for _, piece in read_pieces)
    caps = [piece["machine"].get("clock_cap_mhz") for piece in pieces]
    for path, piece, cap in zip(files, pieces, caps, strict=True):
        if device_of(piece) != device_of(pieces[0]):
            raise ValueError(
                f"{path}: measured on {device_of(piece)}, but {files[0]} on {device_of(pieces[0])}; one page is one device"
            )
        if cap != caps[0]:
            raise ValueError(f"{path}: clock cap {cap}, but {files[0]}: {caps[0]}; one page is one clock cap")
    notes = [
        str(note)
        for piece in pieces
        for note in piece.get("notes") or []
        if not str(note).endswith(ENDED) and not str(note).startswith((COMMITS, MISSING))
    ]
    notes += _other_words(files, pieces)
    builds: dict[tuple[str, tuple[str, ...]], Build] = {}
    for build in (build for piece in pieces for build in rows_of(piece)):
        before = builds.get(build.key)
        if before is not None and before.timed and build.timed and _measured(before) != _measured(build):
            notes.append(f"{build.name} stands in more than one piece; the later measurement is shown.")
        if before is None or (before.timed, moment(before.started)) <= (build.timed, moment(build.started)):
            builds[build.key] = build
    commits = unique(short_commit(build.commit) for build in builds.values())
    if len(commits) > 1:
        notes.append(f"{COMMITS}{', '.join(commits)}. Compare them with care.")
    stopped = tuple(path for path, piece in zip(files, pieces, strict=True) if was_stopped(piece))
    notes += [f"{path} {ENDED}" for path in stopped]
    told = _told_apart(list(builds.values()))
    if lacking := [f"{build.name} ({build.status})" for build in told if build.status not in DONE]:
        notes.append(f"{MISSING}{', '.join(lacking)}.")
    return Steps(pieces, files, tuple(told), tuple(dict.fromkeys(notes)), stopped)


def _measured(build: Build) -> dict[str, Any]:
    """The row alone, without what joining has written into it."""
    return {name: value for name, value in build.raw.items() if name not in ("commit", "started")}


def rows_of(piece: Mapping[str, Any]) -> list[Build]:
    """Its builds; those of a piece that was joined itself have commit and start of their own."""
    return [
        Build(
            str(row["name"]),
            str(row.get("status") or "error"),
            row,
            str(row.get("commit") or piece.get("commit") or "unknown"),
            str(row.get("started") or piece.get("started") or ""),
        )
        for row in piece["builds"]
    ]


def was_stopped(piece: Mapping[str, Any]) -> bool:
    """Whether a call ended before it had reached all of its builds. Of those that broke or were left out there are rows."""
    statuses = [row.get("status") for row in piece["builds"]]
    return piece.get("complete") is False and (None in statuses or all(status in DONE for status in statuses))


def moment(started: str) -> datetime:
    """When that was; the first of all moments where it is no date. Without a zone it is taken for UTC's."""
    try:
        found = datetime.fromisoformat(started)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def words_of(row: Mapping[str, Any]) -> list[str]:
    """The overrides of a row or a piece, of those for one setting the last, which is the one that holds; without their plus."""
    words = [str(word).lstrip("+") for word in row.get("overrides") or []]
    return list({word.partition("=")[0]: word for word in words}.values())


def shared(lists: Iterable[list[str]]) -> list[str]:
    """Words that stand in all of the lists."""
    every = list(lists)
    return [word for word in every[0] if all(word in other for other in every)]


def _told_apart(builds: list[Build]) -> list[Build]:
    """Builds of one name get the overrides that not all of them have into their names."""
    found = []
    for build in builds:
        same = shared(words_of(other.raw) for other in builds if other.name == build.name)
        own = " ".join(word for word in words_of(build.raw) if word not in same)
        found.append(replace(build, name=f"{build.name} ({own})") if own else build)
    return found


def _other_words(files: Sequence[str], pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note where not all pieces were called with the same overrides."""
    same = shared(words_of(piece) for piece in pieces)
    own = {
        path: " ".join(word for word in words_of(piece) if word not in same)
        for path, piece in zip(files, pieces, strict=True)
    }
    told = "; ".join(f"{path}: {words}" for path, words in own.items() if words)
    return [f"Not all pieces share all overrides. Those of one alone: {told}. Compare them with care."] if told else []


def read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """One file.

    Raises:
        OSError: it cannot be read.
        ValueError: naming the file and what is wrong with it.
    """
    try:
        data = from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not whole JSON (torn, or another kind of file): {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError(f"{path}: not a report of `dwslm bench step`; join files of one kind")
    if data.get("format") != FORMAT:
        raise ValueError(f"{path}: is of format {data.get('format')!r}, and this version reads format {FORMAT}")
    builds = data.get("builds")
    sound = isinstance(builds, list) and all(
        isinstance(row, dict) and isinstance(row.get("name"), str) for row in builds
    )
    if not sound or not isinstance(data.get("machine"), dict):
        raise ValueError(f"{path}: `builds` is no list of named builds, or `machine` no object")
    check_words(data, f"{path}")
    for row in builds or []:
        if row.get("status") not in (*STATUSES, None):
            raise ValueError(f"{path}: {row['name']}: status {row['status']!r} is none of {', '.join(STATUSES)}")
        check_row(row, f"{path}: {row['name']}")
    return data


def check_words(row: Mapping[str, Any], where: str) -> None:
    words = row.get("overrides") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{where}: `overrides` is no list of settings")


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where a field that is read whole has not the shape that docs/benchmark.md gives it."""
    check_words(row, where)
    for name in OBJECTS:
        if not isinstance(row.get(name), dict | None):
            raise ValueError(f"{where}: `{name}` is no object")
    peer, profile = row.get("peer"), row.get("profile") or {}
    if peer is not None and not peer.keys() >= set(PEER_FIELDS):
        raise ValueError(f"{where}: `peer` lacks one of {', '.join(PEER_FIELDS)}")
    for name, found, fields in (
        ("runs", row.get("runs"), ()),
        ("profile.kernels", profile.get("kernels"), KERNEL_FIELDS),
        ("profile.classes", profile.get("classes"), CLASS_FIELDS),
    ):
        if not isinstance(found, list | None) or not all(_holds(one, fields) for one in found or []):
            raise ValueError(
                f"{where}: `{name}` is no list of objects" + (f" with {', '.join(fields)}" if fields else "")
            )


def _holds(one: Any, fields: Sequence[str]) -> bool:
    """Whether it is an object with these fields: texts, and numbers or null."""
    return isinstance(one, dict) and all(
        name in one and isinstance(one[name], str if name in TEXTS else int | float | None) for name in fields
    )
