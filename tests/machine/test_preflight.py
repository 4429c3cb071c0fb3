from dataclasses import replace
from types import SimpleNamespace

import pytest

from dwslm.machine import preflight
from dwslm.machine.health import Sample
from dwslm.machine.preflight import Check, check_clocks, check_disk, check_gpu, check_xid, fit

ROWS = {"corrected": 1, "uncorrected": 0, "pending": False, "failed": False}
HEALTHY = Sample(0.0, 70.0, 345, 30, 0x1)


class Fake:
    """A healthy H200 at rest; the test makes it ill."""

    def __init__(self, **changed):
        self.told = {
            "facts": {"driver": "580.159"},
            "name": ("NVIDIA H200", "GPU-abc"),
            "memory": (1 << 30, 141 << 30),
            "ecc_errors": {"corrected": 3, "uncorrected": 0},
            "remapped_rows": ROWS,
            "sample": HEALTHY,
        } | changed

    def __getattr__(self, name):
        return lambda: self.told[name]


def failed(checks):
    return {check.name: check.said for check in checks if check.status == "failed"}


def test_a_healthy_gpu_is_fit():
    checks = check_gpu(Fake())
    assert fit(checks) and all(check.status == "ok" for check in checks)
    said = " ".join(check.said for check in checks)
    for part in (
        "NVIDIA H200 GPU-abc",
        "driver 580.159",
        "150 of 151 GB free",
        "3 corrected, 0 uncorrected",
        "30 C, 70 W",
        "idle",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("changed", "name", "told"),
    [
        ({"memory": (30 << 30, 141 << 30)}, "GPU: memory", "other processes"),
        ({"ecc_errors": {"corrected": 0, "uncorrected": 1}}, "GPU: memory errors", "1 uncorrected"),
        ({"remapped_rows": ROWS | {"pending": True}}, "GPU: remapped rows", "reset"),
        ({"remapped_rows": ROWS | {"failed": True}}, "GPU: remapped rows", "replaced"),
        ({"sample": replace(HEALTHY, reasons=0x40)}, "GPU: state", "hw_thermal_slowdown"),
        ({"sample": replace(HEALTHY, reasons=0x80)}, "GPU: state", "hw_power_brake_slowdown"),
    ],
)  # fmt: skip
def test_each_illness_is_named(changed, name, told):
    (found,) = failed(check_gpu(Fake(**changed))).items()
    assert found[0] == name and told in found[1]


def test_what_a_gpu_does_not_tell_is_a_warning_and_no_refusal():
    nothing = {"corrected": None, "uncorrected": None}
    checks = check_gpu(
        Fake(memory=(None, None), ecc_errors=nothing, remapped_rows=None, sample=replace(HEALTHY, reasons=None))
    )
    assert fit(checks) and [check.status for check in checks] == ["ok", "warning", "warning"]


def load(*clocks, reasons=0x4):
    return [Sample(0.0, 690.0, clock, 60, reasons) for clock in clocks]


def test_clocks_under_load():
    assert check_clocks(load(1700, 1980), None).status == "ok"
    assert check_clocks(load(1700, 1980), 1980) == Check(
        "GPU: clock under load", "ok", "1700 to 1980 MHz, under the cap of 1980"
    )
    above = check_clocks(load(1700, 1980), 1800)
    assert above.status == "failed" and "nvidia-smi -lgc 0,1800" in above.said
    hot = check_clocks(load(1200, reasons=0x20), None)
    assert hot.status == "failed" and "sw_thermal_slowdown" in hot.said
    assert check_clocks([], 1800).status == "skipped"


def test_driver_errors():
    assert check_xid([]).status == "ok"
    assert check_xid([31]).status == "warning"
    assert check_xid([79]).status == "failed" and "reboot" in check_xid([79]).said


def test_disk_at_a_place_that_is_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: SimpleNamespace(free=5_000_000_000))
    assert check_disk(tmp_path / "not" / "yet", 5_000_000_000, "x").status == "ok"
    short = check_disk(tmp_path / "not" / "yet", 5_000_000_001, "3 checkpoints")
    assert short.status == "failed" and "5.00 GB needed (3 checkpoints), 5.00 GB free" in short.said
