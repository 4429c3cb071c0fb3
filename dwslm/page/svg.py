"""Bars and lines as SVG: text keeps its size at any width, colours come from the page, nothing is fetched.

Horizontal positions are percentages of whatever width the page gives, so that a phone and a wide screen get the same letters.
Each drawing carries a title and a description for readers who do not see it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LINE = 16  # pixels of a line of text
BAR = 12  # pixels of a bar's height
GAP = 14  # pixels between bars
POINTS = 600  # points of a line that are drawn; more would not be seen


@dataclass(frozen=True)
class Bar:
    """A bar of one or more parts: value, and class of its colour (`s0` to `s5`, `quiet`). `low` and `high` draw a whisker."""

    label: str
    text: str
    parts: tuple[tuple[float, str], ...]
    low: float | None = None
    high: float | None = None


def bars(name: str, title: str, description: str, rows: Sequence[Bar], *, longest: float) -> str:
    """Horizontal bars from zero; `longest` is the value that fills the width, the same for panels to be compared.

    `name` is unique on the page. Each bar stands under a line with its label on the left and its text on the right.
    """
    step = LINE + BAR + GAP
    drawn = []
    for i, row in enumerate(rows):
        top, start = 4 + i * step, 0.0
        drawn.append(f'<text x="0" y="{top + 11}">{escape(row.label)}</text>')
        drawn.append(f'<text class="n" x="100%" y="{top + 11}" text-anchor="end">{escape(row.text)}</text>')
        for value, colour in row.parts:
            width = _percent(value, longest)
            drawn.append(
                f'<rect class="{escape(colour)}" x="{start:.3f}%" y="{top + LINE}" width="{width:.3f}%" height="{BAR}"/>'
            )
            start += width
        if row.low is not None and row.high is not None:
            low, high, middle = _percent(row.low, longest), _percent(row.high, longest), top + LINE + BAR / 2
            drawn.append(f'<line class="w" x1="{low:.3f}%" x2="{high:.3f}%" y1="{middle}" y2="{middle}"/>')
    return _frame(name, title, description, len(rows) * step, drawn)


def lines(name: str, title: str, description: str, points: Sequence[tuple[float, float]], unit: str) -> str:
    """One value over seconds, from zero up to its largest; `points` are (seconds, value) in order of time."""
    high = max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    span, top = (last - first) or 1.0, high or 1.0
    path = " ".join(f"{(t - first) / span * 1000:.1f},{(1 - max(v, 0) / top) * 100:.1f}" for t, v in _thin(points))
    height = 120
    drawn = [
        f'<text x="0" y="12">{high:,.0f} {escape(unit)}</text>',
        '<line class="axis" x1="0" x2="100%" y1="18" y2="18"/>',
        # The inner drawing is stretched to the width; its line stays as thick as it is, and no text is in it.
        f'<svg x="0" y="18" width="100%" height="{height}" viewBox="0 0 1000 100" preserveAspectRatio="none">'
        f'<polyline class="l" vector-effect="non-scaling-stroke" points="{path}"/></svg>',
        f'<line class="axis" x1="0" x2="100%" y1="{18 + height}" y2="{18 + height}"/>',
        f'<text x="0" y="{height + 34}">{first:,.0f} s</text>',
        f'<text x="100%" y="{height + 34}" text-anchor="end">{last:,.0f} s</text>',
    ]
    return _frame(name, title, description, height + 40, drawn)


def _frame(name: str, title: str, description: str, height: float, drawn: Sequence[str]) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", name)  # two ids stand in one attribute, apart by a space
    return (
        f'<svg class="chart" role="img" aria-labelledby="{name}-t {name}-d" width="100%" height="{height:g}">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f"{''.join(drawn)}</svg>"
    )


def _percent(value: float, longest: float) -> float:
    return min(max(value / longest if longest > 0 else 0.0, 0.0), 1.0) * 100


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about POINTS of them: the lowest and highest of each stretch, so that no peak is lost."""
    if len(points) <= POINTS:
        return list(points)
    stride = -(-len(points) * 2 // POINTS)
    kept = []
    for start in range(0, len(points), stride):
        part = points[start : start + stride]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
