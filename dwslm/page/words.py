"""Numbers and names as a reader sees them."""

import math
from collections.abc import Iterable

from dwslm.page.bench_file import Measured, Row
from dwslm.page.document import Cell

OPS = {
    "attention": "softmax attention",
    "delta_rule": "delta rule",
    "short_conv": "short convolution",
    "delta_gate": "decay gate",
    "gated_norm": "gated norm",
    "depth_mix": "attention residuals",
    "mlp": "MLP",
    "projection": "projection",
    "head": "loss head",
    "norm": "norm",
    "add_norm": "residual addition and norm",
    "rope": "rotary positions",
    "newton_schulz": "Newton-Schulz",
    "optimizer": "optimizer step",
}

ENGINES = {
    ("attention", "flash"): "FlashAttention-2 in PyTorch",
    ("attention", "flash_attn"): "FlashAttention-2, own package",
    ("attention", "flex"): "FlexAttention",
    ("attention", "cudnn"): "cuDNN frontend",
    ("attention", "fa3"): "FlashAttention-3",
    ("attention", "flash4"): "FlashAttention-4",
    ("attention", "fa4"): "FlashAttention-4",  # its name in files written before it was an engine
    ("attention", "torch"): "plain PyTorch",
    ("delta_rule", "fused"): "our own, Triton",
    ("delta_rule", "cudnn"): "cuDNN frontend",
    ("delta_rule", "fla"): "flash-linear-attention",
    ("delta_rule", "fla_gdn"): "flash-linear-attention's own GDN",
    ("delta_rule", "flashqla"): "FlashQLA",
    ("delta_rule", "torch"): "chunks in plain PyTorch",
    ("head", "cce"): "Cut Cross-Entropy",
    ("mlp", "transformer_engine"): "transformer-engine, FP8",
}
"""What the short names stand for, where they do not say it themselves."""


def op_name(op: str) -> str:
    return OPS.get(op, op)


def engine_words(row: Row) -> str:
    return ENGINES.get((row.op, row.engine), "")


def engine_cell(row: Row) -> Cell:
    return Cell(row.engine, note=engine_words(row))


def is_fp8(row: Row) -> bool:
    return row.dtype.startswith("float8") or "fp8" in row.engine or row.engine == "transformer_engine"


def digits(value: float, significant: int = 3) -> str:
    """Three significant digits, or as many; all digits before the point, thousands apart."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = significant - 1 - math.floor(math.log10(abs(float(f"{value:.{significant - 1}e}"))))
    return f"{value:,.{min(max(places, 0), 6)}f}"


def percent(share: float) -> str:
    """A fraction of one: two significant digits below 1 %, one decimal below 10 %."""
    value = share * 100
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0 %"
    if abs(value) < 0.005:  # errors of float32 engines
        return f"{value:.1e} %"
    places = 2 if abs(value) < 0.995 else 1 if abs(value) < 9.95 else 0
    return f"{value:,.{places}f} %"


def span(values: Iterable[float], unit: str = "") -> str:
    """`0.5 to 3.1 ms`, or `0.5 ms` where both ends are written alike."""
    ends = list(values)
    low, high = digits(min(ends)), digits(max(ends))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def count_span(values: Iterable[float]) -> str:
    """Whole numbers: `18 to 46`."""
    low, high = min(ends := list(values)), max(ends)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def percent_span(shares: Iterable[float]) -> str:
    ends = list(shares)
    low, high = percent(min(ends)), percent(max(ends))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def number(value: float | None, strong: bool = False, note: str = "") -> Cell:
    return Cell("") if value is None else Cell(digits(value), float(value), strong, note)


def count(value: float | None) -> Cell:
    """A whole number in full."""
    return Cell("") if value is None else Cell(f"{value:,.0f}", float(value))


def share(value: float | None, strong: bool = False) -> Cell:
    return Cell("") if value is None else Cell(percent(value), float(value), strong)


def measured(value: Measured | None, strong: bool = False) -> Cell:
    """A median, and its spread in brackets below."""
    if value is None:
        return Cell("")
    return Cell(digits(value.median), value.median, strong, f"({digits(value.spread, 2)})")


def whole(value: Measured | None) -> Cell:
    """A median of many as a whole number, and its spread in brackets below."""
    return Cell("") if value is None else Cell(f"{value.median:,.0f}", value.median, False, f"({value.spread:,.0f})")


def memory(value: float | None) -> Cell:
    """Bytes as MB."""
    return Cell("") if value is None else Cell(f"{value / 1e6:,.0f} MB", float(value))


def place(row: Row) -> str:
    """`attention global, 16,384 tokens, context 4,096, 8 heads`, without what the row does not have."""
    parts = [f"{op_name(row.op)} {row.case}".strip()]
    parts += [f"{row.tokens:,} tokens"] if row.tokens else []
    parts += [f"context {row.context:,}"] if row.context else []
    parts += [f"{row.heads} heads"] if row.heads and row.op == "delta_rule" else []
    return ", ".join(parts)


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    every = list(names)
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)
