"""Numbers of a run as a reader sees them."""

import math
import re
import time

from dwslm.page.words import digits

NAME = 120  # letters of a name that are shown


HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What would steer a terminal, turn the direction of writing, or be no text at all."""


def visible(text: str) -> str:
    """Text as runs say it, with a sign in the place of each character that is none to read."""
    return HIDDEN.sub("\ufffd", text)


def shown(name: str) -> str:
    """A name of any length, cut where it would fill the page."""
    return visible(name if len(name) <= NAME else f"{name[:NAME]}…")


def amount(value: float) -> str:
    """1,234,567 as `1.23M`; three digits."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size * 0.9995:
            return (
                f"{value / size:.{0 if abs(value) >= 99.95 * size else 1 if abs(value) >= 9.995 * size else 2}f}{unit}"
            )
    return digits(value)


def tick(value: float) -> str:
    """A number on an axis: as short as it can be."""
    if value and not 1e-3 <= abs(value) < 1e4:
        if abs(value) >= 1e3:
            scaled, unit = next(
                (value / s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")) if abs(value) >= s
            )
            return f"{scaled:.4g}{unit}"
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def moment(seconds: float) -> str:
    """`2026-11-29 20:05`, UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = int(abs(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 else f"{days} d"
