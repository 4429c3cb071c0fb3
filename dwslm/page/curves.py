"""Curves as SVG: several lines over one axis, with the numbers of the axes as text that keeps its size at any width."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from dwslm.page.history import pick

HEIGHT = 190
TOP, BOTTOM = 8, 22  # pixels above the plot, and below for the numbers
POINTS = 500  # of a line


@dataclass(frozen=True)
class Line:
    """One line: its values at `x`. `kind` is `thin`, `strong`, `dash` or `dots`; `colour` a class of the page's style."""

    x: np.ndarray
    y: np.ndarray
    colour: str
    kind: str = "strong"


def curves(
    name: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    log: bool = False,
    marks: Sequence[float] = (),
) -> str:
    """A drawing with a title and a description for who does not see it. `marks` are drawn as upright lines at their x.

    `name` is unique on the page. Values that are not finite (on a logarithmic axis, not above zero) leave a gap.
    """
    lines = [_clean(line, log) for line in lines]
    low, high = _range([line.y for line in lines], log)
    x_low, x_high = _ends([line.x[np.isfinite(line.y)] for line in lines])
    scale = math.log10 if log else float
    bottom, span = scale(low), (scale(high) - scale(low)) or 1.0
    width = (x_high - x_low) or 1.0
    drawn = []
    for value in ticks(low, high, log):
        y = TOP + (1 - (scale(value) - bottom) / span) * HEIGHT
        drawn.append(f'<line class="axis" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="n" x="0" y="{max(y - 3, 10):.1f}">{escape(y_text(value))}</text>')
    paths = [
        f'<path class="{line.kind} line-{escape(line.colour)}" vector-effect="non-scaling-stroke" '
        f'd="{_path(line, x_low, width, bottom, span, log)}"/>'
        for line in lines
    ]
    uprights = "".join(
        f'<path class="mark" vector-effect="non-scaling-stroke" d="M{(x - x_low) / width * 1000:.1f} 0V1000"/>'
        for x in marks
        if x_low <= x <= x_high
    )
    drawn.append(
        # The inner drawing is stretched to the width; its lines stay as thick as they are, and no text is in it.
        f'<svg x="0" y="{TOP}" width="100%" height="{HEIGHT}" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
        f"{uprights}{''.join(paths)}</svg>"
    )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        text = x_text(x_low + share * (x_high - x_low))
        drawn.append(
            f'<text class="n" x="{share:.0%}" y="{TOP + HEIGHT + 16}" text-anchor="{anchor}">{escape(text)}</text>'
        )
    name = re.sub(r"[^A-Za-z0-9]+", "-", name)
    return (
        f'<svg class="chart" role="img" aria-labelledby="{name}-t {name}-d" width="100%" height="{TOP + HEIGHT + BOTTOM}">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f"{''.join(drawn)}</svg>"
    )


def ticks(low: float, high: float, log: bool = False, count: int = 4) -> list[float]:
    """Round values from `low` to `high`: about `count` of them, powers of ten on a logarithmic axis that spans some."""
    if log and high / low >= 100:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        stride = -(-(last - first + 1) // (count + 1))
        return [10.0**power for power in range(first, last + 1, stride)]
    if high <= low:
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * min((n for n in (1, 2, 5, 10) if n * size >= rough), default=10)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _clean(line: Line, log: bool) -> Line:
    y = np.where(np.isfinite(line.x) & np.isfinite(line.y) & ((line.y > 0) | (not log)), line.y, np.nan)
    keep = pick([y], POINTS) if len(y) else np.empty(0, int)
    return Line(line.x[keep], y[keep], line.colour, line.kind)


def _ends(values: Sequence[np.ndarray]) -> tuple[float, float]:
    every = np.concatenate([np.empty(0), *values])
    every = every[np.isfinite(every)]
    return (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)


def _range(values: Sequence[np.ndarray], log: bool) -> tuple[float, float]:
    low, high = _ends(values)
    if low == high:  # a constant is drawn in the middle
        return (low / 2, high * 2) if log else (low - (abs(low) / 10 or 0.5), high + (abs(high) / 10 or 0.5))
    if log:
        return low, high
    room = (high - low) / 20
    return (0.0 if 0 <= low < (high - low) / 3 else low - room), high + room


def _path(line: Line, x_low: float, width: float, bottom: float, span: float, log: bool) -> str:
    y = np.log10(line.y) if log else line.y
    across = ((line.x - x_low) / width * 1000).tolist()
    down = ((1 - (y - bottom) / span) * 1000).tolist()
    parts, pen = [], "M"
    for i, (a, d) in enumerate(zip(across, down, strict=True)):
        if d != d:
            pen = "M"
            continue
        parts.append(f"{pen}{a:.1f} {d:.1f}")
        alone = pen == "M" and (i + 1 == len(down) or down[i + 1] != down[i + 1])
        if alone or line.kind == "dots":
            parts.append("h0")  # a point of its own, drawn as a dot
            pen = "M"
            continue
        pen = "L"
    return "".join(parts)
