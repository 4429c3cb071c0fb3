"""The page of all runs: outcomes, results and decisions, every run, and one run up close."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dwslm.page.amounts import clock, moment, shown, visible
from dwslm.page.document import Cell, Table
from dwslm.page.html import table_figure
from dwslm.page.jobs import JobLine
from dwslm.page.run_words import COLUMNS, STATES, cells, outcomes
from dwslm.page.svg import Bar, bars
from dwslm.page.watch import Overview
from dwslm.runs.decisions import Decision
from dwslm.runs.summary import RunSummary

TITLE = "Runs"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: nothing inline, nothing from elsewhere."""
NOT_RUN = "not run"


def shell(title: str, body: str, up: str, extra: str = "") -> str:
    """A whole file around `body`. `up` is the way to the folder of the index: "" or "../"."""
    return visible(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n<meta name="referrer" content="no-referrer"/>\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,"/>\n'
        + "".join(
            f'<link rel="stylesheet" href="{up}static/{name}"/>\n' for name in ("base.css", "uplot.css", "page.css")
        )
        + "".join(
            f'<script src="{up}static/{name}" defer=""></script>\n' for name in ("uplot.js", "plots.js", "page.js")
        )
        + f"{extra}</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def render(seen: Overview, decisions: Sequence[Decision], close: str, *, live: bool, wrong: str = "") -> str:
    """The index.

    close: the article of the run that is shown without being picked, "" for none; wrong: why the decisions are not shown.
    """
    now, runs = seen.now, _runs(len(seen.runs))
    when = f"{moment(now)[:10]} {clock(now)} UTC"
    status = f"Updated {clock(now)} UTC. {runs}." if live else f"As of {when}. {runs}."
    body = [
        '<a class="skip" href="#every-run">To the runs</a>',
        f'<main data-live="{int(live)}" data-now="{now!r}">',
        f"<header><h1>{TITLE}</h1>",
        "<p>Every run of this folder and the decisions they led to. Failed and lost runs stay. "
        "A run that is silent on purpose is paused, one that has gone silent is stale.</p>",
        f'<p id="status">{escape(status)}</p><p id="news" class="unseen" role="status"></p>',
        f'<noscript><p class="note">Without JavaScript this is every run as of {escape(when)}: results, table and figures '
        "are all here, and each run has a page of its own.</p></noscript>",
        "</header>",
        outcome_figure(seen, decisions),
        "<section><h2>Results and decisions</h2>",
        f'<p class="warning">Not shown, since they do not hold: {escape(wrong)}</p>'
        if wrong
        else decision_table(decisions),
        '</section>\n<section><h2 id="every-run" tabindex="-1">Every run</h2>',
        run_table(seen),
        _unreadable(seen.unreadable),
        "</section>",
        job_section(seen.jobs, seen.queue_wrong),
        '<section aria-labelledby="close-title"><h2 id="close-title">One run up close</h2>',
        '<p id="pick" class="note">Pick a run in the table above.' + (" This is the newest." if close else "") + "</p>",
        f'<div id="close">{close}</div></section>',
        f'<footer><p class="note">{"Live: asks for news every 5 seconds." if live else f"Exported {escape(when)}."} '
        "Nothing here comes from, or goes to, another host.</p></footer>",
        "</main>",
    ]
    return shell(TITLE, "\n".join(body), "")


def run_file(title: str, article: str, now: float) -> str:
    """The page of one run. `now` is the moment of its states."""
    body = (
        f'<main data-live="0" data-now="{now!r}"><p><a href="../index.html">All runs</a></p>\n'
        f'<h1>{escape(title)}</h1>\n<p class="note">As of {moment(now)} UTC.</p>\n<h2>Up close</h2>\n'
        f'<div id="close">{article}</div></main>'
    )
    return shell(title, body, "../")


def _runs(count: int) -> str:
    return f"{count:,} run" + ("" if count == 1 else "s")


def _counts(seen: Overview) -> dict[str, int]:
    """Runs by state, those that have not begun among them."""
    return outcomes([run.state for run in seen.runs] + [job.state for job in seen.jobs if job.training])


def _counted(seen: Overview) -> str:
    waiting = sum(job.training for job in seen.jobs)
    return _runs(len(seen.runs)) + (f", {waiting} more not begun" if waiting else "")


def outcome_figure(seen: Overview, decisions: Sequence[Decision]) -> str:
    """Fig. 1: one bar, and the counts in words."""
    counts = _counts(seen)
    if missing := sum(not decision.runs for decision in decisions):
        counts[NOT_RUN] = missing
    total = sum(counts.values())
    listed = [(state, n, STATES.get(state, ("–", "quiet"))) for state, n in counts.items()]
    text = ", ".join(f"{n} {state}" for state, n, _ in listed) or "no runs yet"
    bar = bars(
        "outcomes", "Runs by outcome", text,
        [Bar("", _counted(seen), tuple((float(n), colour) for _, n, (_, colour) in listed))], longest=max(total, 1),
    )  # fmt: skip
    items = "".join(
        f'<li data-state="{escape(state)}"><svg aria-hidden="true"><rect class="{colour}" width="100%" height="100%"/></svg>'
        f'<span class="what"><span aria-hidden="true">{sign}</span> {escape(state)} <b>{n}</b></span></li>'
        for state, n, (sign, colour) in listed
    )
    legend = f'<ul class="legend" id="states">{items}</ul>'
    return f'<figure id="outcomes"><figcaption>Runs by outcome</figcaption>{bar}{legend}</figure>'


def decision_table(decisions: Sequence[Decision]) -> str:
    """What people wrote; export has held its figures to the runs."""
    if not decisions:
        return '<p class="note">No results are written down yet (results/decisions.toml).</p>'
    rows = tuple(
        (
            Cell(one.title or one.test, note=one.date),
            Cell(one.result, note=one.question),
            Cell(one.decision),
            Cell(one.number),
        )
        for one in decisions
    )
    table = Table("Results", ("test", "result", "decision", "K"), rows)
    caption = "Results and the decisions they led to. Every figure with decimals is checked against its run."
    return table_figure(table, "results", caption)


def run_table(seen: Overview) -> str:
    """Every run, newest first. The browser sorts, filters and updates it; without one it stands as it is."""
    runs = seen.runs
    tests = sorted({run.test for run in runs if run.test} | {job.test for job in seen.jobs if job.test})
    options = "".join(f'<option value="{escape(test)}">{escape(test)}</option>' for test in tests)
    controls = (
        '<form id="controls" hidden="" role="search" aria-label="Find runs">'
        '<p><label for="find">Find</label> <input type="search" id="find" autocomplete="off"/></p> '
        f'<p><label for="test">Test</label> <select id="test"><option value="">all</option>{options}</select></p> '
        '<p><label for="state">State</label> <select id="state"><option value="">all</option></select></p> '
        '<span id="shown" role="status"></span></form>'
    )
    head = "".join(
        f'<th scope="col" class="{"num" if i > 1 else "word"}" data-col="{i}">{escape(name)}</th>'
        for i, name in enumerate(COLUMNS)
    )
    body = (
        "\n".join(run_row(run) for run in runs) or f'<tr id="none"><td colspan="{len(COLUMNS)}">No runs yet.</td></tr>'
    )
    return (
        f'{controls}<figure class="table"><figcaption id="runs-caption">Every run, newest first. Loss and speed are means '
        "of the last 20 reports. A stale run has not reported for 10 minutes; a paused one waits on purpose.</figcaption>"
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="runs-caption">'
        f'<table id="runs" class="runs" aria-labelledby="runs-caption"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div></figure>"
    )


def run_row(run: RunSummary) -> str:
    folder = run.path.name
    texts = cells(run)
    first = f'<a href="runs/{quote(folder)}.html">{escape(texts[0].text)}</a>' + _note(texts[0].note)
    html = [
        f'<tr data-run="{escape(folder)}" data-state="{escape(run.state)}" data-test="{escape(run.test)}">'
        f'<th scope="row">{first}</th>'
    ]
    for i, (cell, name) in enumerate(zip(texts[1:], COLUMNS[1:], strict=True), 1):
        text = escape(cell.text)
        if i == 1:
            text = f'<span aria-hidden="true">{STATES.get(run.state, ("–", ""))[0]}</span> <span>{text}</span>'
        css = "" if i == 1 else ' class="num"'
        value = "" if cell.value is None else f' data-value="{cell.value!r}"'
        html.append(f'<td{css} data-label="{escape(name)}"{value}>{text}{_note(cell.note)}</td>')
    return "".join(html) + "</tr>"


def _note(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else "<small></small>"


def _unreadable(folders: Sequence[tuple[Path, str]]) -> str:
    if not folders:
        return ""
    items = "".join(f"<li>{escape(path.name)}: {escape(why)}</li>" for path, why in folders)
    return f'<div class="warning"><p>These folders cannot be read as runs:</p><ul>{items}</ul></div>'


def job_section(jobs: Sequence[JobLine], wrong: str) -> str:
    """Jobs without a run, or what is wrong with the queue. There and hidden where there is neither, so that the browser may
    fill it."""
    rows = []
    for job in jobs:
        (name, note), (state, why), since = job_cells(job)
        sign = STATES.get(job.state, ("–", ""))[0]
        rows.append(
            f'<tr data-state="{escape(job.state)}" data-test="{escape(job.test)}">'
            f'<th scope="row">{escape(name)}{_note(note)}</th>'
            f'<td data-label="state"><span aria-hidden="true">{sign}</span> <span>{escape(state)}</span>{_note(why)}</td>'
            f'<td class="num" data-label="since, UTC" data-value="">{escape(since)}</td></tr>'
        )
    body = "\n".join(rows)
    return (
        f'<section id="queue"{"" if jobs or wrong else " hidden"}><h2>In the queue</h2>'
        f'<p id="queue-wrong" class="warning"{"" if wrong else " hidden"}>{escape(_queue_wrong(wrong))}</p>'
        '<figure class="table"><figcaption id="jobs-caption">'
        "Jobs without a run, newest first: waiting, held on purpose, dropped with the reason, or failed before they began."
        '</figcaption><div class="scroll" tabindex="0" role="region" aria-labelledby="jobs-caption">'
        '<table id="jobs" class="runs" aria-labelledby="jobs-caption"><thead><tr><th scope="col" class="word">job</th>'
        '<th scope="col" class="word">state</th><th scope="col" class="num">since, UTC</th></tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div></figure></section>"
    )


def _queue_wrong(why: str) -> str:
    return f"No job is shown, since the queue cannot be read: {visible(why)}" if why else ""


def job_cells(job: JobLine) -> tuple[tuple[str, str], tuple[str, str], str]:
    """Name and test, state and why, and since when."""
    of = " · ".join(shown(part) for part in (job.test, job.arm) if part)
    return (shown(job.name), of), (job.state, shown(job.reason)), moment(job.since)


def list_data(seen: Overview, marks: Mapping[str, str]) -> dict[str, Any]:
    """What the browser polls: the tables' cells as text and value. `marks` changes where a run's page does."""
    rows = []
    for run in seen.runs:
        texts = cells(run)
        rows.append({
            "run": run.path.name, "state": run.state, "test": visible(run.test), "mark": marks.get(run.path.name, ""),
            "sign": STATES.get(run.state, ("–", ""))[0],
            "href": f"runs/{quote(run.path.name)}.html",
            "cells": [[cell.text, cell.note, _plain(cell.value)] for cell in texts],
        })  # fmt: skip
    return {
        "clock": clock(seen.now), "now": seen.now, "runs": rows, "counted": _counted(seen),
        "outcomes": [[state, n, STATES.get(state, ("–", "quiet"))[1]] for state, n in _counts(seen).items()],
        "jobs": [[job.state, visible(job.test), STATES.get(job.state, ("–", ""))[0], *job_cells(job)] for job in seen.jobs],
        "queue_wrong": _queue_wrong(seen.queue_wrong),
    }  # fmt: skip


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
