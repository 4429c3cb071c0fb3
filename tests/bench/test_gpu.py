"""On a GPU: the measuring process end to end on a few rows, and recordings that are really recorded."""

import json
import subprocess
import sys

import pytest
import torch

from dwslm.bench.process import ROOT
from dwslm.bench.record import check_replay, record_cuda
from dwslm.bench.request import Request
from dwslm.bench.run import Run
from dwslm.bench.timing import Timer, measure_ceilings, sets_needed

pytestmark = pytest.mark.gpu

ABOUT = {"kind": "attention", "command": "", "commit": None, "versions": {}, "machine": {}}


def test_flash_attention_is_gated_timed_and_recorded(tiny_data, tmp_path):
    request = Request(
        data=str(tiny_data / "train"), seed=1, ops=["attention"], engines=["flash"], tokens=[4096], contexts=[2048]
    )
    Run(request, tmp_path / "a.json", say=print, about=ABOUT).run()
    plain = json.loads((tmp_path / "a.json").read_text())
    assert [row["status"] for row in plain["rows"]] == ["ok", "ok"], [row["reason"] for row in plain["rows"]]
    for row in plain["rows"]:
        assert row["gate"]["size"]["passed"] and row["record"]["status"] == "ok" and row["record"]["padding_identical"]
        assert row["peak_bytes"] > 0 and 0 < row["floor_share"] < 1.2


def test_a_recording_follows_its_buffers_and_one_that_keeps_old_ones_is_caught():
    batches = [([torch.randn(8, device="cuda")], torch.tensor([0, i, 8], device="cuda")) for i in (1, 4, 7)]
    kept = {}

    def step(inputs, cu_seqlens):
        return {"o": inputs[0] * cu_seqlens[1]}

    def stale(inputs, cu_seqlens):
        # Made once for a buffer, as a table kept by the identity of its boundaries.
        table = kept.setdefault(cu_seqlens.data_ptr(), cu_seqlens[1].clone())
        return {"o": inputs[0] * table}

    assert check_replay(record_cuda, step, batches) == []
    assert check_replay(record_cuda, stale, batches) == ["o on batch 2", "o on batch 3"]


WAITS = """
import torch
from dwslm.bench.record import record_cuda
from dwslm.bench.worker import broken
try:
    record_cuda(lambda: {"o": torch.full((1,), float(torch.ones(1, device="cuda").sum().item()), device="cuda")})
except Exception as error:
    assert "captur" in str(error), error
    assert float(torch.ones(4, device="cuda").sum()) == 4
    print("refused;", broken(torch.device("cuda")))
"""


def test_a_step_that_waits_for_the_host_fails_to_record_and_its_process_is_known_to_be_broken():
    """In a process of its own: what breaks off leaves the default generator unusable, so that workers are started again."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused; ")


def test_the_ceilings_of_a_gpu():
    timer = Timer(torch.device("cuda"), repeats=5)
    found = measure_ceilings(timer, 4096, quick=True)
    assert found["copy_gb_s"]["median"] > 50 and found["bf16_tflops"]["median"] > 5
    assert sets_needed(2**20, torch.device("cuda")) > sets_needed(2**30, torch.device("cuda")) == 2
