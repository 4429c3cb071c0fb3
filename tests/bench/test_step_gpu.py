"""Where the time of a real step goes, on a GPU: everything is told apart, and adds up."""

import json
import sys

import pytest

from dwslm.bench.step_classes import CLASSES
from dwslm.cli import main

pytestmark = pytest.mark.gpu

SMALL = [
    "experiment=demo", "data.packing.context=512", "data.mixture.phases=[]", "train.tokens=262144",
    "train.batch_tokens=32768", "train.micro_batch_tokens=16384", "train.device=cuda", "train.compile=true",
    "model.layers=4", "model.width=256", "model.heads=2", "model.kv_heads=1", "model.head_dim=128", "model.delta_heads=2",
    "model.delta_head_dim=128", "model.delta_gate_rank=64", "model.mlp_hidden=1024", "model.dtype=bfloat16",
]  # fmt: skip


def test_a_step_on_a_gpu_is_told_apart(tiny_data, tmp_path, monkeypatch):
    out = tmp_path / "step.json"
    arguments = [*SMALL, f"data.path={tiny_data}", "--steps", "2", "--warm", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["dwslm", "bench", "step", *arguments])
    main()
    build = json.loads(out.read_text())["builds"][0]
    assert build["status"] == "ok" and build["peak_memory_bytes"] > 0
    assert build["energy_j_per_token"] is None or build["energy_j_per_token"]["median"] >= 0
    profile = build["profile"]
    classes = {row["class"]: row for row in profile["classes"]}
    assert set(classes) <= set(CLASSES)
    assert sum(row["ms"] for row in classes.values()) + profile["idle_ms"] == pytest.approx(profile["wall_ms"])
    for name in ("mlp up", "mlp down", "projections", "head", "newton-schulz", "delta rule", "softmax attention", "optimizer",
                 "convolution", "attention residuals", "norms and elementwise", "copies"):  # fmt: skip
        assert classes[name]["ms"] > 0, name
        assert classes[name]["floor_ms"] > 0, name
    unknown = sum(classes[name]["ms"] for name in ("other", "other products") if name in classes)
    assert unknown < 0.02 * profile["busy_ms"]
