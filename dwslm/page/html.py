"""A page as one HTML file: style and drawings inside, no script, nothing fetched, light and dark, any width."""

from collections.abc import Iterable
from html import escape

from dwslm.page.document import Block, Cell, Figure, Page, Prose, Section, Table

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1d21; --soft: #5b626c; --rule: #d9dde2; --band: #f3f5f7;
  --best: #0b6e4f; --warn: #8a4b00; --warn-band: #fff4e0; --link: #0a58a8;
  --s0: #1f6fb4; --s1: #d97a1d; --s2: #2e9478; --s3: #a2589c; --s4: #8c7a1f; --s5: #b4493f; --quiet: #7d8896; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e8eb; --soft: #a0a8b2; --rule: #333a42; --band: #1c2126;
  --best: #5fd3a9; --warn: #f0b45c; --warn-band: #2d2415; --link: #7ab8f5;
  --s0: #5aa5e6; --s1: #f0a04b; --s2: #52bfa0; --s3: #cc8cc6; --s4: #c9b550; --s5: #e58076; --quiet: #717c89; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
a { color: var(--link); }
nav ol { columns: 16rem; padding-left: 1.5rem; font-size: .925rem; }
figure { margin: 1.5rem 0 .5rem; }
figure.table { margin: 1.25rem 0 2rem; }
figcaption { font-weight: 600; margin-bottom: .5rem; }
.source, .note { color: var(--soft); font-size: .8rem; line-height: 1.45; margin: .4rem 0 0; }
.verdict { margin: .6rem 0 0; padding-left: .75rem; border-left: 3px solid var(--best); }
.warning { background: var(--warn-band); border-left: 3px solid var(--warn); padding: .5rem .75rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; line-height: 1.4; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--rule);
  overflow-wrap: break-word; }
thead th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule); }
tbody th { font-weight: 500; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { min-width: 11rem; } thead .num { white-space: normal; } .facts td { overflow-wrap: anywhere; min-width: 0; }
td small, th small { display: block; color: var(--soft); font-size: .75rem; font-weight: 400; }
td strong { color: var(--best); }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2rem; }
.panels.one { grid-template-columns: 1fr; }
.panels h3 { font-size: .85rem; margin: 0 0 .25rem; color: var(--soft); }
.chart { display: block; font-size: 13px; overflow: visible; }
.chart text { fill: var(--ink); } .chart .n { font-variant-numeric: tabular-nums; } .chart .h { font-weight: 600; }
.chart .axis { stroke: var(--rule); } .chart .w { stroke: var(--ink); stroke-width: 2; }
.chart .l { fill: none; stroke: var(--s0); stroke-width: 1.5; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
.s4 { fill: var(--s4); } .s5 { fill: var(--s5); } .quiet { fill: var(--quiet); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; margin: .25rem 0 .75rem;
  font-size: .85rem; }
.legend svg { width: .8em; height: .8em; margin-right: .4em; }
@media (max-width: 40rem) { body { padding: 1rem .9rem 3rem; } h1 { font-size: 1.4rem; } th, td { padding: .3rem .45rem; }
  tbody th[scope=row] { position: sticky; left: 0; background: var(--paper); max-width: 9rem; }
  .stacked thead { position: absolute; clip-path: inset(50%); } .stacked, .stacked tbody { display: block; }
  .stacked tr { display: block; padding: .6rem 0; border-bottom: 1px solid var(--rule); }
  .stacked th[scope=row] { position: static; max-width: none; font-weight: 600; }
  .stacked th, .stacked td { display: block; border: 0; min-width: 0; padding: .1rem 0; text-align: left; white-space: normal; }
  .stacked td:empty { display: none; }
  .stacked .num small { display: inline; margin-left: .4em; }
  .stacked td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); } }
@media print { .scroll { overflow: visible; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


STACKED_FROM = 70
"""Letters that the longest texts of a table's columns add up to, from which a narrow screen gets its rows one above the other."""


def render(page: Page) -> str:
    """The whole file. Figures and tables are numbered in order, each for itself."""
    counter = _Counter()
    body = [f"<h1>{escape(page.title)}</h1>", f'<p class="source">{escape(page.source)}</p>']
    body += [_prose(prose) for prose in page.lead]
    body.append('<nav aria-label="Contents"><ol>')
    body += [f'<li><a href="#{escape(part.name)}">{escape(part.title)}</a></li>' for part in page.sections]
    body.append("</ol></nav>")
    body += [_section(part, counter, page.source) for part in page.sections]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


class _Counter:
    """Numbers of tables and figures so far."""

    def __init__(self) -> None:
        self.tables = self.figures = 0


def _section(part: Section, counter: _Counter, source: str) -> str:
    blocks = [_block(block, counter, source) for block in part.blocks]
    return f'<section id="{escape(part.name)}">\n<h2>{escape(part.title)}</h2>\n' + "\n".join(blocks) + "\n</section>"


def _block(block: Block, counter: _Counter, source: str) -> str:
    if isinstance(block, Prose):
        return _prose(block)
    if isinstance(block, Figure):
        counter.figures += 1
        return _figure(block, counter.figures, counter.tables + 1, source)
    counter.tables += 1
    return _table(block, counter.tables, source)


def _prose(prose: Prose) -> str:
    return f'<p class="warning">{escape(prose.text)}</p>' if prose.warning else f"<p>{escape(prose.text)}</p>"


def _figure(figure: Figure, number: int, table: int, source: str) -> str:
    legend = "".join(
        f'<li><svg aria-hidden="true"><rect class="{escape(colour)}" width="100%" height="100%"/></svg>{escape(name)}</li>'
        for colour, name in figure.legend
    )
    panels = "\n".join(
        f"<div>{f'<h3>{escape(name)}</h3>' if name else ''}{panel}</div>" for name, panel in figure.panels
    )
    return (
        f"<figure>\n<figcaption>Figure {number}. {escape(figure.title)}</figcaption>\n"
        + (f'<ul class="legend">{legend}</ul>\n' if legend else "")
        + f'<div class="panels{" one" if len(figure.panels) == 1 else ""}">\n{panels}\n</div>\n'
        + f'<p class="note">{escape(figure.description)} The numbers are in table {table}.</p>'
        + f'<p class="source">{escape(source)}</p>\n</figure>'
    )


def _table(table: Table, number: int, source: str) -> str:
    return table_figure(table, f"table-{number}", f"Table {number}. {table.title}", source)


def table_figure(table: Table, anchor: str, caption: str, source: str = "") -> str:
    """A table with its caption above and its sentences below. `anchor` is the id of the caption, unique on the page."""
    numeric = [table.is_numeric(i) for i in range(len(table.columns))]
    classes = [' class="num"' if is_number else "" for is_number in numeric]
    # A column of sentences gets room before the table starts to scroll.
    for i in range(len(classes)):
        if not numeric[i] and any(len(row[i].text) > 40 for row in table.rows):
            classes[i] = ' class="wide"'
    widths = [max((len(row[i].text) for row in table.rows), default=0) for i in range(len(classes)) if not numeric[i]]
    stacked = sum(widths) > STACKED_FROM and len(table.columns) > 2
    labels = [f' data-label="{escape(name)}"' if stacked else "" for name in table.columns]
    head = "".join(f'<th scope="col"{c}>{escape(name)}</th>' for name, c in zip(table.columns, classes, strict=True))
    body = "\n".join(f"<tr>{''.join(_row(row, classes, labels))}</tr>" for row in table.rows)
    kinds = [name for name, given in (("stacked", stacked), ("facts", len(table.columns) == 2)) if given]
    css = f' class="{" ".join(kinds)}"' if kinds else ""
    label = f'aria-labelledby="{escape(anchor)}"'
    return (
        f'<figure class="table">\n<figcaption id="{escape(anchor)}">{escape(caption)}</figcaption>\n'
        # Focusable, so that the keyboard can scroll what is wider than the screen.
        + f'<div class="scroll" tabindex="0" role="region" {label}>'
        + f"<table{css} {label}>\n"
        + f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n"
        + "\n".join(f'<p class="verdict">{escape(sentence)}</p>' for sentence in table.verdicts)
        + (f'<p class="note">{escape(table.note)}</p>' if table.note else "")
        + (f'<p class="source">{escape(source)}</p>' if source else "")
        + "\n</figure>"
    )


def _row(cells: Iterable[Cell], classes: list[str], labels: list[str]) -> Iterable[str]:
    for i, (cell, css, label) in enumerate(zip(cells, classes, labels, strict=True)):
        text = escape(cell.text)
        if cell.value is not None:
            text = f'<data value="{cell.value!r}">{text}</data>'
        if cell.strong:
            text = f"<strong>{text}</strong>"
        if cell.note:
            text += f"<small>{escape(cell.note)}</small>"
        yield f'<th scope="row"{css}>{text}</th>' if i == 0 else f"<td{css}{label}>{text}</td>"
