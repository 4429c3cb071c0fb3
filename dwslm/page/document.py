"""A page as data: sections of prose, tables and figures. `html` and `markdown` give it its forms.

Every string here is plain text. The two writers escape it, so nothing that a file says can become markup.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    `value` is the number as the file has it, of which `text` is the rounded form. `strong` marks the best of its kind, `note` is
    a smaller second line.
    """

    text: str
    value: float | None = None
    strong: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under `columns`. The first cell of a row names it. `verdicts` are the sentences that its numbers support."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    verdicts: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers, and is set flush right."""
        return any(row[column].value is not None for row in self.rows)


@dataclass(frozen=True)
class Figure:
    """One or more drawings of the numbers in the table that follows. The SVG comes from `svg`, which escapes what it is given."""

    title: str
    description: str
    panels: tuple[tuple[str, str], ...]
    """Heading (empty where there is one panel) and SVG of each."""
    legend: tuple[tuple[str, str], ...] = ()
    """Class of the colour in `svg`, and what it stands for."""


@dataclass(frozen=True)
class Prose:
    """A paragraph; `warning` sets it apart."""

    text: str
    warning: bool = False


Block = Table | Figure | Prose


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it. `name` is the anchor: letters, digits and dashes."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """A whole page. `source` says which command, commit, device and clock cap its figures come from; it stands under each."""

    title: str
    source: str
    lead: tuple[Prose, ...] = ()
    sections: tuple[Section, ...] = field(default=())


def text_cell(text: str, note: str = "") -> Cell:
    return Cell(text, note=note)
