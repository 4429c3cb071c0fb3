"""A page as Markdown: the tables and their verdicts. Drawings are only in the HTML; each stands beside a table of its numbers."""

import re

from dwslm.page.document import Cell, Figure, Page, Prose, Table


def render(page: Page) -> str:
    """The whole file; tables carry the numbers that they have in the HTML."""
    lines = [f"# {plain(page.title)}", "", plain(page.source), ""]
    for prose in page.lead:
        lines += _prose(prose)
    number = 0
    for part in page.sections:
        lines += [f"## {plain(part.title)}", ""]
        for block in part.blocks:
            if isinstance(block, Prose):
                lines += _prose(block)
            elif isinstance(block, Table):
                number += 1
                lines += _table(block, number, page.source)
            else:
                assert isinstance(block, Figure)
    return "\n".join(lines).rstrip() + "\n"


def plain(text: str) -> str:
    """`text` so that Markdown shows it as it is: no tags, emphasis, links, code or table cells out of a name."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~])", r"\\\1", text)
    return re.sub(r"(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])", r"\\_", text)  # within a word it emphasises nothing


def _prose(prose: Prose) -> list[str]:
    return [f"> **Note.** {plain(prose.text)}" if prose.warning else plain(prose.text), ""]


def _table(table: Table, number: int, source: str) -> list[str]:
    rules = ["---:" if table.is_numeric(i) else "---" for i in range(len(table.columns))]
    lines = [
        f"**Table {number}. {plain(table.title)}**",
        "",
        f"| {' | '.join(plain(name) or ' ' for name in table.columns)} |",
        f"| {' | '.join(rules)} |",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in table.rows),
        "",
    ]
    for sentence in table.verdicts:
        lines += [f"→ {plain(sentence)}", ""]
    if table.note:
        lines += [plain(table.note), ""]
    return [*lines, f"<sub>{plain(source)}</sub>", ""]


def _cell(cell: Cell) -> str:
    text = plain(cell.text)
    if cell.strong and text:
        text = f"**{text}**"
    if not cell.note:
        return text
    return f"{text} {plain(cell.note)}" if cell.note.startswith("(") else f"{text} ({plain(cell.note)})"
