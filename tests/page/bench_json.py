"""A small benchmark report, made up, in the form that `dwslm bench` writes. Tests change it and read the page."""

import json
from pathlib import Path
from typing import Any

CONTEXTS = (512, 4096)
CHECKS = {"prefix": True, "neighbour": True, "twice": True}


def stat(median: float, spread: float = 0.01) -> dict[str, float | int]:
    return {"median": median, "spread": spread, "n": 20}


def gate(tensors: tuple[str, ...] = ("o", "dq"), value: float = 0.004, bound: float = 0.01) -> dict[str, Any]:
    return {"errors": {tensor: {"value": value, "bound": bound} for tensor in tensors}, "checks": dict(CHECKS)}


def record(launched: float, saved: float = 0.15, **changes: Any) -> dict[str, Any]:
    row = {"status": "ok", "reason": None, "identical": True, "padding_identical": True,
           "recorded_ms": stat(launched * (1 - saved)), "launched_ms": stat(launched)}  # fmt: skip
    return row | changes


def row(op: str, case: str, engine: str, tokens: int | None = 16384, context: int | None = None, heads: int | None = None,
        ms: float = 1.0, **changes: Any) -> dict[str, Any]:  # fmt: skip
    """A row that passed: forward is a quarter of the whole, the floor a fifth."""
    made = {
        "op": op, "case": case, "engine": engine, "tokens": tokens, "context": context, "heads": heads, "dtype": "bfloat16",
        "status": "ok", "reason": None, "gate": gate(), "forward_ms": stat(ms / 4), "forward_backward_ms": stat(ms),
        "forward_tflops": 400.0, "tflops": 300.0, "gb_s": 500.0, "floor_ms": ms / 5, "floor_share": 0.2,
        "peak_bytes": 200_000_000, "extra_ms": {}, "first_call_s": 1.5, "record": None,
    }  # fmt: skip
    return made | changes


def absent(op: str, case: str, engine: str, status: str, reason: str, **sizes: Any) -> dict[str, Any]:
    given = {"tokens": 16384, "context": 4096, "heads": 8} | sizes
    kept = {"op", "case", "engine", "tokens", "context", "heads", "dtype", "status", "reason", "extra_ms"}
    made = row(op, case, engine, **given, status=status, reason=reason)
    return {name: value if name in kept else None for name, value in made.items()}


def rows() -> list[dict[str, Any]]:
    found = []
    for context in CONTEXTS:
        grown = context / 4096
        for case, ms in (("global", 1.4 + grown), ("window 512", 0.6 + 0.2 * grown)):
            whole = {"record": record(ms)} if context == 4096 else {}
            found.append(row("attention", case, "flash", context=context, heads=8, ms=ms, **whole))
            slower = record(ms * 1.2, status="fails", reason="stream is capturing", recorded_ms=None, identical=None)
            found.append(row("attention", case, "cudnn", context=context, heads=8, ms=ms * 1.2, forward_ms=stat(ms / 5, 0.001),
                             extra_ms={"graph": 44.0}, **({"record": slower} if whole else {})))  # fmt: skip
            found.append(row("attention", case, "flex", context=context, heads=8, ms=ms * 1.4, extra_ms={"mask": stat(0.3)},
                             **({"record": record(ms * 1.4)} if whole else {})))  # fmt: skip
        for heads in (8, 16):
            for case, engine, ms in (("kda", "cudnn", 1.5), ("kda", "fla", 2.9), ("gdn", "cudnn", 1.2)):
                whole = {"record": record(ms)} if context == 4096 and heads == 8 else {}
                found.append(row("delta_rule", case, engine, context=context, heads=heads, ms=ms * heads / 8, **whole))
    found.append(absent("delta_rule", "gdn", "fla_gdn", "refused", "wrong results under this Triton"))
    found.append(absent("attention", "global", "fa3", "missing", "not installed: build it"))
    broken = gate()
    broken["errors"]["dq"]["value"] = 0.21
    found.append(absent("attention", "global", "bent", "failed", "dq misses the reference") | {"gate": broken})
    found.append(row("mlp", "1024-4096-1024", "compiled", ms=1.3, tflops=620.0))
    found.append(
        row(
            "mlp",
            "1024-4096-1024",
            "fp8_compiled",
            ms=1.0,
            tflops=800.0,
            dtype="float8_e4m3fn",
            gate=gate(value=0.06, bound=0.08),
        )
    )
    found.append(row("head", "softcap 20", "compiled", ms=6.4, tflops=515.0, peak_bytes=1_500_000_000))
    found.append(row("head", "softcap 20", "cce", ms=21.6, peak_bytes=370_000_000))
    found.append(row("norm", "rms_norm 1024", "compiled", ms=0.05))
    found.append(row("optimizer", "muonh", "eager", tokens=None, ms=20.5, forward_ms=None))
    return found


def report(**changes: Any) -> dict[str, Any]:
    """The whole file; `changes` replace top-level parts."""
    work = [
        {"tokens": 16384, "context": context, "rows": 16384 // context, "segments": [31, 24, 44], "slots": 96,
         "padding_share": 0.004,
         "lengths": {"min": 9, "median": 444, "mean": 611.1, "p90": 1777, "max": context, "share_of_tokens_at_context": 0.5}}
        for context in CONTEXTS
    ]  # fmt: skip
    made: dict[str, Any] = {
        "format": 1, "kind": "day0", "command": "dwslm bench day0 --out day0.json", "commit": "0123456789abcdef" * 2,
        "started": "2026-01-01T00:00:00+00:00", "seconds": 555.5, "complete": True, "seed": 1,
        "shape": {"layers": 20, "global_layers": 5, "local_layers": 15}, 
        "data": {"path": "data/sample", "fingerprint": "f00d", "median": 444.0, "share_of_tokens_in_long": 0.5, "long": 4096},
        "machine": {"device": "Made-Up GPU", "memory_bytes": 150e9, "power_limit_w": 700.0, "clock_cap_mhz": None,
                    "max_clock_mhz": 1980},
        "versions": {"torch": "2.11.0"},
        "ceilings": {"copy_gb_s": stat(4100.0), "bf16_tflops": stat(650.0), "fp8_tflops": stat(1100.0), "float32_tflops": None,
                     "products": [{"tokens": 16384, "k": 1024, "n": 4096, "bf16_tflops": stat(640.0),
                                   "fp8_tflops": stat(1080.0)}]},
        "work": work,
        "rows": rows(),
        "noise": {"op": "attention", "case": "global", "engine": "flash", "first": stat(2.4), "again": stat(2.405),
                  "within_spread": True},
        "stability": {"samples": 5555, "hz": 10.0, "power_w": {"mean": 444.4, "max": 683.0},
                      "sm_mhz": {"min": 1200, "median": 1755, "max": 1980},
                      "throttle_reasons": {"none": 0.9, "sw_power_cap": 0.1}, "temperature_c": {"min": 35, "max": 66},
                      "ecc_errors": {"corrected": 0, "uncorrected": 0}, "energy_j": 246000.0,
                      "series": [[float(t), 300.0 + t, 1900 - t, 40 + t % 9] for t in range(40)],
                      "cache": {"folders": ["cache"], "moved_aside": []}},
    }  # fmt: skip
    return made | changes


def find(data: dict[str, Any], op: str, case: str, engine: str, context: int | None = None) -> dict[str, Any]:
    """The first such row, to be changed in place."""
    return next(
        r for r in data["rows"]
        if (r["op"], r["case"], r["engine"]) == (op, case, engine) and context in (None, r["context"])
    )  # fmt: skip


def save(folder: Path, data: dict[str, Any], name: str = "bench.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path
