"""One run up close as HTML: the part that the index shows, and the page of its own."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import count

import numpy as np

from dwslm.page.amounts import amount, shown
from dwslm.page.compare import Brief, compare
from dwslm.page.document import Cell, Table
from dwslm.page.html import table_figure
from dwslm.page.run_charts import AXES, Figure, Plots, draw
from dwslm.page.run_data import RunData, number
from dwslm.page.run_words import (
    checkpoint_table,
    event_rows,
    facts,
    interval,
    latest_scores,
    slice_name,
    slice_table,
)
from dwslm.page.svg import Bar, bars
from dwslm.page.words import digits
from dwslm.runs.summary import RunSummary

EVENTS = 50  # that are shown at once; the rest can be unfolded
ALL_EVENTS = 1000
TEST = "<!--test-->"
"""Stands where the comparison goes, which is made when the other runs have been read."""
BARS = 12  # slices that are drawn; the table has all
NUMBERS = 9  # rows of the table under a figure


def article(run: RunSummary, data: RunData, plots: Plots) -> str:
    """All of a run but the comparison, whose place is marked by `TEST`. Captions count up in the browser's own counter."""
    parts = [
        f'<article id="up" data-run="{escape(data.run.path.name)}">',
        f'<h3 id="up-name" tabindex="-1">{escape(shown(run.name or data.run.path.name))}</h3>',
        _part("facts", f'<dl class="about">{"".join(_fact(*fact) for fact in facts(run, data))}</dl>'),
        TEST,
    ]
    if not plots.figures:
        parts.append(_part("figures", '<p class="note">No reports yet: there is nothing to draw.</p>'))
    parts += [figure_html(figure, plots) for figure in plots.figures]
    parts.append(_part("checkpoints", _checkpoints(data)))
    parts.append(_part("events", _events(data)))
    parts.append(_part("slices", _slices(data)))
    parts.append("</article>")
    return "\n".join(parts)


def unreadable(run: RunSummary, why: str) -> str:
    """The same for a run whose files cannot be read."""
    name = shown(run.name or run.path.name)
    return (
        f'<article id="up" data-run="{escape(run.path.name)}">\n<h3 id="up-name" tabindex="-1">{escape(name)}</h3>\n'
        + _part("facts", f'<p class="warning">The files of this run cannot be read: {escape(why)}</p>')
        + f"\n{TEST}</article>"
    )


def test_part(run: RunSummary, others: Sequence[RunSummary], briefs: Mapping[str, Brief]) -> tuple[str, Plots]:
    """What goes in the place of `TEST`, and its plots; empty where the run has no test or is alone in it."""
    if not others:
        return "", Plots({}, ())
    plots, table = compare(run, others, briefs)
    figures = "\n".join(figure_html(figure, plots) for figure in plots.figures)
    return figures + "\n" + _part("test-table", table_figure(table, "up-test", table.title)), plots


def _part(name: str, html: str) -> str:
    return f'<div data-part="{escape(name)}">{html}</div>'


def _fact(name: str, value: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def figure_html(figure: Figure, plots: Plots) -> str:
    """Panels side by side, what their colours mean, and their numbers as a table."""
    series = figure.charts[0].series
    legend = "".join(
        f'<li><svg aria-hidden="true"><rect class="{escape(s.colour)}" width="100%" height="100%"/></svg>{escape(s.label)}</li>'
        for s in series
    )
    panels = "\n".join(
        f'<div class="panel" data-chart="{escape(chart.name)}"><h4 class="sub">{escape(chart.title or chart.unit)}</h4>'
        f"{draw('up', chart, plots)}</div>"
        for chart in figure.charts
    )
    size = " single" if len(figure.charts) == 1 else ""
    return (
        f'<figure class="plot{size}" data-part="fig-{escape(figure.name)}">\n<figcaption>{escape(figure.title)}</figcaption>\n'
        + (f'<ul class="legend">{legend}</ul>\n' if len(series) > 1 else "")
        + f'<div class="panels{" one" if len(figure.charts) == 1 else ""}">\n{panels}\n</div>\n'
        + (f'<p class="note">{escape(figure.note)}</p>' if figure.note else "")
        + f'<details><summary>Numbers<span class="unseen"> of {escape(figure.title)}</span></summary>'
        + f"{_numbers(figure, plots)}</details></figure>"
    )


def _numbers(figure: Figure, plots: Plots) -> str:
    """The curves at some places along them."""
    chart = figure.charts[0]
    ends = [x[np.isfinite(x)] for x in (plots.values(chart, s)[0] for s in chart.series)]
    last = max((x[-1] for x in ends if len(x)), default=0.0)
    first = min((x[0] for x in ends if len(x)), default=0.0)
    rows = []
    places = np.unique(np.linspace(first, last, NUMBERS))
    for place in places:
        row = [Cell(AXES[chart.over](float(place)))]
        for s in chart.series:
            x, y = plots.values(chart, s)
            known = np.isfinite(x) & np.isfinite(y)
            if not known.any() or place > x[known][-1] or place < x[known][0]:
                row.append(Cell("", None))
                continue
            value = float(y[known][np.abs(x[known] - place).argmin()])
            row.append(Cell(amount(value) if abs(value) >= 1e4 else digits(value, 4), value))
        rows.append(tuple(row))
    columns = (chart.over, *(s.label for s in chart.series))
    table = Table(figure.title, columns, tuple(rows), note="The nearest report to each place.")
    return table_figure(table, f"up-{figure.name}-numbers", f"{figure.title}: {chart.unit}")


def _checkpoints(data: RunData) -> str:
    if not data.saved:
        return '<h4>Checkpoints</h4><p class="note">None yet.</p>'
    return "<h4>Checkpoints</h4>" + table_figure(
        checkpoint_table(data.saved), "up-checkpoints", "Checkpoints and why each is kept"
    )


def _events(data: RunData) -> str:
    rows = event_rows(data.events[-ALL_EVENTS:])
    head = "<h4>Latest events, newest first</h4>"
    if not rows:
        return f'{head}<p class="note">None yet.</p>'
    html = head + _event_table(rows[:EVENTS], "up-events", "Latest events")
    if rows[EVENTS:]:
        older = _event_table(rows[EVENTS:], "up-older", "Older events")
        more = f", of {len(data.events):,}" if len(data.events) > ALL_EVENTS else ""
        html += f"<details><summary>{len(rows) - EVENTS:,} older events{more}</summary>{older}</details>"
    return html


def _event_table(rows: Sequence[tuple[str, str, str, str]], anchor: str, caption: str) -> str:
    cells = tuple(tuple(Cell(text) for text in row) for row in rows)
    return table_figure(Table(caption, ("when, UTC", "event", "step", "what"), cells), anchor, caption)


def _slices(data: RunData) -> str:
    rows, before = latest_scores(data.evals)
    head = "<h4>Bits per byte by slice</h4>"
    if not rows:
        return f'{head}<p class="note">Not scored yet.</p>'
    overall = rows[-1]
    where = f"Step {overall['step']:,}, {overall.get('writer', '')}"
    html = [head]
    numbers = count()
    for kind, title in (("source", "by source"), ("language", "by language")):
        every = sorted(
            (row for row in rows if row.get("slice") == kind), key=lambda row: -(number(row.get("bytes")) or 0)
        )
        chosen = [*every[:BARS], overall]
        title += f", the {BARS} with the most text" if every[BARS:] else ""
        ends = [interval(row) for row in chosen]
        longest = max(
            max(float(row["bits_per_byte"]), end[1] if end else 0.0) for row, end in zip(chosen, ends, strict=True)
        )
        drawn = [
            Bar(
                slice_name(row),
                f"{row['bits_per_byte']:.4f}",
                ((float(row["bits_per_byte"]), "quiet" if row is overall else f"s{i % 6}"),),
                *(end or (None, None)),
            )
            for i, (row, end) in enumerate(zip(chosen, ends, strict=True))
        ]
        told = ", ".join(f"{bar.label} {bar.text}" for bar in drawn)
        svg = bars(f"up-slices-{next(numbers)}", f"Bits per byte {title}", told, drawn, longest=longest)
        html.append(f'<div class="panel"><h4 class="sub">{escape(title)}</h4>{svg}</div>')
    panels = f'<div class="panels">{html[1]}{html[2]}</div>'
    figure = (
        f'<figure class="plot"><figcaption>Bits per byte by source and language</figcaption>{panels}'
        f'<p class="note">{escape(where)}. Lower is better. Lines are 95 % intervals over documents.</p></figure>'
    )
    crossed = [row for row in rows if row.get("slice") == "crossed"]
    table = slice_table([row for row in rows if row.get("slice") != "crossed"], before)
    html = [head, figure, table_figure(table, "up-slices", "Bits per byte by slice")]
    if crossed:
        inner = table_figure(
            slice_table(crossed, before), "up-crossed", "Bits per byte by source and language together"
        )
        html.append(
            f"<details><summary>{len(crossed)} slices of source and language together</summary>{inner}</details>"
        )
    return "\n".join(html)
