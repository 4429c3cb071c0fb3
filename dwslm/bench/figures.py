"""A row of the report: what it holds, and what follows from times, costs and ceilings."""

from typing import Any

from dwslm.bench.case import FP8, Cost
from dwslm.bench.timing import Stat

RATES = {FP8: "fp8_tflops", "float32": "float32_tflops"}
"""Dtype of the products to the ceiling that bounds them; bf16 for the rest."""


def blank_row(job: dict[str, Any]) -> dict[str, Any]:
    """A row with nothing measured yet. `job`: op, case, heads, engine, tokens, context."""
    row = {name: job[name] for name in ("op", "case", "engine", "tokens", "context", "heads")}
    empty = ("dtype", "status", "reason", "gate", "forward_ms", "forward_backward_ms", "forward_tflops", "tflops", "gb_s",
             "floor_ms", "floor_share", "flop", "bytes", "forward_flop", "forward_bytes", "peak_bytes", "first_call_s",
             "sm_mhz", "record")  # fmt: skip
    return row | dict.fromkeys(empty) | {"extra_ms": {}, "seconds": 0.0}


def fill_figures(
    row: dict[str, Any], cost: Cost, one_way: Stat | None, both_ways: Stat, ceilings: dict[str, Any]
) -> None:
    """Times, rates, the floor that the ceilings set, and the share of it that was reached."""
    row["forward_backward_ms"] = both_ways.as_json()
    if one_way is not None:
        row["forward_ms"] = one_way.as_json()
        row["forward_tflops"] = cost.forward_flop / one_way.median / 1e9
    row |= {
        "flop": cost.flop,
        "bytes": cost.bytes,
        "forward_flop": cost.forward_flop,
        "forward_bytes": cost.forward_bytes,
    }
    row["tflops"] = cost.flop / both_ways.median / 1e9
    row["gb_s"] = cost.bytes / both_ways.median / 1e6
    rate = ceilings[RATES.get(row["dtype"], "bf16_tflops")]
    if rate is not None:
        by_bytes = cost.bytes / ceilings["copy_gb_s"]["median"] / 1e6
        row["floor_ms"] = max(by_bytes, cost.flop / rate["median"] / 1e9)
        row["floor_share"] = row["floor_ms"] / both_ways.median
