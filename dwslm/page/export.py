"""`dwslm page export`: the page as a folder of files that any web host, or none, can show."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dwslm.page import index_page
from dwslm.page.amounts import shown
from dwslm.page.compare import Brief, siblings, stored_brief
from dwslm.page.run_data import RunReader
from dwslm.page.site import Drawn, draw_run, finish, folder_of, mark, read_decisions, static_files, to_json
from dwslm.page.watch import Overview, overview
from dwslm.runs.decisions import Decision
from dwslm.runs.durable import disk_error
from dwslm.runs.summary import RunSummary

MADE = "made.json"
"""In the exported folder: the mark of every run's page, so that the next export makes only what has changed."""


@dataclass(frozen=True)
class Exported:
    index: Path
    runs: int
    made: int
    """Pages of runs that were made anew; the others were still good."""


def export(
    runs_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    decisions: str | os.PathLike[str] | None,
    *,
    now: float,
    queue: str | os.PathLike[str] | None = None,
    threads: int | None = None,
) -> Exported:
    """Writes the page of `runs_dir` into `out`, made where it is missing; index.html comes last.

    Raises:
        ValueError: where there is no such folder of runs or queue, where `out` holds something else, or where a decision prints a
            figure that is not its run's. Nothing is written then.
        OSError: where a file cannot be read or written.
    """
    folder = Path(out)
    seen = overview(runs_dir, now, queue)
    written = read_decisions(decisions, runs_dir)
    if folder.exists() and not (folder / MADE).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files that are no exported page; give an empty or new folder with --out")
    try:
        return _export(seen, folder, written, now, threads or 1 + (os.cpu_count() or 1))
    except OSError as error:
        raise disk_error(f"cannot export to {folder}", error) from error if error.filename is None else error


def _export(seen: Overview, folder: Path, decisions: Sequence[Decision], now: float, threads: int) -> Exported:
    for name in ("static", "runs", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in static_files().items():
        _replace(folder / "static" / name, content)
    shutil.copyfile(Path(__file__).parent / "static" / "uplot.LICENSE", folder / "static" / "uplot.LICENSE")
    before = _made(folder)
    marks = {run.path.name: mark(run, seen) for run in seen.runs}
    changed = [run for run in seen.runs if before.get(run.path.name) != marks[run.path.name] or not _there(folder, run)]
    # The marks go first and come back last: an export cut short makes its pages again.
    _replace(folder / MADE, json.dumps({run: old for run, old in before.items() if marks.get(run) == old}).encode())
    drawn: dict[str, Drawn] = {}
    waiting = {run.path.name: run for run in changed}
    for name, one in _draw(changed, threads):
        drawn[name] = one
    briefs: dict[str, Brief] = {name: one.brief for name, one in drawn.items()}
    for run in waiting.values():
        others = siblings(run, seen.runs)
        for other in others:
            if other.path.name not in briefs:
                text = (folder / "data" / f"{other.path.name}.json").read_text(encoding="utf-8")
                briefs[other.path.name] = stored_brief(json.loads(text))
        article, numbers = finish(run, drawn[run.path.name], others, briefs, marks[run.path.name])
        _replace(folder / "data" / f"{run.path.name}.json", numbers.encode())
        html = index_page.run_file(shown(run.name or run.path.name), article, now)
        _replace(folder / "runs" / f"{run.path.name}.html", html.encode())
    for name in before.keys() - marks.keys():
        for path in (folder / "data" / f"{name}.json", folder / "runs" / f"{name}.html"):
            path.unlink(missing_ok=True)
    listed = to_json(index_page.list_data(seen, marks))
    _replace(folder / "data" / "runs.json", listed.encode())
    close = _article(folder / "runs" / f"{seen.runs[0].path.name}.html") if seen.runs else ""
    index = index_page.render(seen, decisions, close, live=False)
    _replace(folder / "index.html", index.encode())
    _replace(folder / MADE, json.dumps(marks).encode())
    return Exported(folder / "index.html", len(seen.runs), len(changed))


def _draw(runs: Sequence[RunSummary], threads: int) -> Iterator[tuple[str, Drawn]]:
    """Threads serve: most of the time goes into Arrow, which leaves the interpreter to the others."""
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(_draw_one, runs)


def _draw_one(run: RunSummary) -> tuple[str, Drawn]:
    return run.path.name, draw_run(run, RunReader(folder_of(run)))


def _article(page: Path) -> str:
    """The run up close, out of its own page."""
    text = page.read_text(encoding="utf-8")
    return text[text.index('<article id="up"') : text.index("</article>") + len("</article>")]


def _made(folder: Path) -> dict[str, str]:
    try:
        made = json.loads((folder / MADE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return made if isinstance(made, dict) else {}


def _there(folder: Path, run: RunSummary) -> bool:
    return (folder / "data" / f"{run.path.name}.json").exists() and (folder / "runs" / f"{run.path.name}.html").exists()


def _replace(path: Path, content: bytes) -> None:
    """Whole or as it was: a web host may be reading."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)
