"""The page of a folder of runs, made from its files: what `export` writes down and `server` answers with."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from dwslm.page import index_page
from dwslm.page.compare import NO_BRIEF, Brief, brief, siblings
from dwslm.page.html import STYLE
from dwslm.page.run_charts import Plots, plots
from dwslm.page.run_data import RunReader
from dwslm.page.run_page import TEST, article, test_part, unreadable
from dwslm.page.watch import Overview, Watch
from dwslm.runs.decisions import Decision, check, load
from dwslm.runs.folder import RunFolder, open_run
from dwslm.runs.summary import RunSummary

Kept = TypeVar("Kept")
STATIC = ("uplot.js", "uplot.css", "plots.js", "page.js", "page.css")
PACKAGE = Path(__file__).parent
IN_MEMORY = 32  # runs; a long one takes some MB


@dataclass(frozen=True)
class Drawn:
    """A run's part of the page before the comparison with others: article, plots as JSON, and what others compare with."""

    article: str
    plots: str
    brief: Brief


def read_decisions(path: str | os.PathLike[str] | None, runs_dir: str | os.PathLike[str]) -> list[Decision]:
    """Raises ValueError with everything that is wrong: a printed figure that is not its run's."""
    if path is None:
        return []
    decisions = load(path)
    wrong = [told for decision in decisions for told in check(decision, runs_dir)]
    if wrong:
        raise ValueError("; ".join(wrong))
    return decisions


def draw_run(run: RunSummary, reader: RunReader) -> Drawn:
    """A run whose files cannot be read is shown as such: the rest of the page is no worse for it."""
    try:
        data = reader.read()[1]
    except OSError as error:
        return Drawn(unreadable(run, str(error)), to_json(Plots({}, ()).to_dict()), NO_BRIEF)
    drawn = plots(data)
    return Drawn(article(run, data, drawn), to_json(drawn.to_dict()), brief(data))


def brief_of(reader: RunReader) -> Brief:
    try:
        return brief(reader.read()[1])
    except OSError:
        return NO_BRIEF


def finish(
    run: RunSummary, drawn: Drawn, others: Sequence[RunSummary], briefs: Mapping[str, Brief], mark: str
) -> tuple[str, str]:
    """The article, and what the browser draws it from as JSON."""
    html, compared = test_part(run, others, {**briefs, run.path.name: drawn.brief})
    own = f'"own":{drawn.plots},"test":{to_json(compared.to_dict())}'
    content = f'{{"run":{to_json(run.path.name)},"mark":{to_json(mark)},{own}}}'
    return drawn.article.replace(TEST, html), content


def to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def mark(run: RunSummary, seen: Overview) -> str:
    """Changes whenever the run's part of the page does: with its files, its state and its siblings."""
    every = (run, *siblings(run, seen.runs))
    told = [(one.path.name, seen.signatures.get(one.path.name), one.state) for one in every]
    minutes = (
        None if run.finish is None else run.finish // 60
    )  # an estimate moves with the clock; no more of it is shown
    return sha256(repr((code(), told, replace(run, finish=minutes))).encode()).hexdigest()[:16]


@cache
def code() -> str:
    """Of the files that make the page: a newer version makes it anew."""
    found = sha256()
    for path in sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("static/*")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@cache
def static_files() -> dict[str, bytes]:
    """Scripts and styles by name."""
    return {"base.css": STYLE.encode()} | {name: (PACKAGE / "static" / name).read_bytes() for name in STATIC}


class Site:
    """The page while it is looked at: runs stay in memory, and only what is new of them is read. Threads may share it."""

    def __init__(
        self,
        runs_dir: str | os.PathLike[str],
        decisions: str | os.PathLike[str] | None,
        queue: str | os.PathLike[str] | None = None,
    ):
        """decisions, queue: file and folder, None for none."""
        self.runs_dir, self.decisions = Path(runs_dir), decisions
        self._watch = Watch(runs_dir, queue)
        self._readers: dict[str, RunReader] = {}
        self._pages: dict[str, tuple[str, str, str]] = {}
        self._decided: tuple[object, list[Decision], str] | None = None
        self._lock = threading.Lock()

    def overview(self, now: float) -> Overview:
        """For one thread at a time. Raises ValueError where the folder is gone."""
        return self._watch.look(now)

    def listed(self, seen: Overview) -> bytes:
        """What the browser polls."""
        marks = {run.path.name: mark(run, seen) for run in seen.runs}
        return to_json(index_page.list_data(seen, marks)).encode()

    def run(self, run: RunSummary, seen: Overview) -> tuple[str, str]:
        """Article and JSON."""
        others, now = siblings(run, seen.runs), mark(run, seen)
        with self._lock:
            known = self._pages.pop(run.path.name, None)
        if known is None or known[0] != now:
            briefs = {other.path.name: brief_of(self._reader(other)) for other in others}
            known = (now, *finish(run, draw_run(run, self._reader(run)), others, briefs, now))
        with self._lock:
            _keep(self._pages, run.path.name, known)
        return known[1], known[2]

    def index(self, seen: Overview) -> str:
        """The page of all runs, with the newest up close. Decisions whose figures do not hold are replaced by what is wrong."""
        close = self.run(seen.runs[0], seen)[0] if seen.runs else ""
        decisions, wrong = self._decide(seen)
        return index_page.render(seen, decisions, close, live=True, wrong=wrong)

    def _decide(self, seen: Overview) -> tuple[list[Decision], str]:
        """The decisions, or what is wrong with them; looked at again when their file or any run has changed."""
        path = self.decisions
        try:
            changed = None if path is None else Path(path).stat().st_mtime_ns
        except OSError as error:
            return [], f"cannot read {path}: {error.strerror}"
        key = (changed, seen.signatures)
        with self._lock:
            known = self._decided
        if known is None or known[0] != key:
            try:
                known = (key, read_decisions(path, self.runs_dir), "")
            except (OSError, ValueError) as error:
                known = (key, [], str(error))
            with self._lock:
                self._decided = known
        return known[1], known[2]

    def _reader(self, run: RunSummary) -> RunReader:
        with self._lock:
            reader = self._readers.pop(run.path.name, None) or RunReader(folder_of(run))
            _keep(self._readers, run.path.name, reader)
        return reader


def _keep(store: dict[str, Kept], name: str, value: Kept) -> None:
    """Puts it at the end; the one that was used longest ago goes where there are too many."""
    store[name] = value
    while len(store) > IN_MEMORY:
        store.pop(next(iter(store)))


def folder_of(run: RunSummary) -> RunFolder:
    return open_run(run.path, run.path.parent)
