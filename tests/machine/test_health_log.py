import json
import time

from dwslm.machine.health import Sample
from dwslm.machine.health_log import KEPT_ROWS, HealthLog, health_row


class Fake:
    """A GPU that draws 100 W more each time it is looked at."""

    def __init__(self):
        self.looks = 0
        self.codes = [[], [31], []]

    def sample(self):
        self.looks += 1
        return Sample(time.monotonic(), 100.0 * self.looks, 1500 + self.looks, 50, 0x4, 2619, 10_000 * self.looks)

    def energy_j(self):
        return 5.0

    def ecc_errors(self):
        return {"corrected": 0, "uncorrected": 0}

    def remapped_rows(self):
        return None

    def new_xid(self):
        return self.codes.pop(0) if self.codes else []


def test_a_row_by_hand():
    fake = Fake()
    row = health_row("GPU-1", [fake.sample() for _ in range(4)], fake)
    assert row["gpu"] == "GPU-1" and row["samples"] == 4 and row["schema"] == 1
    assert row["power_w"] == {"min": 100.0, "mean": 250.0, "max": 400.0}
    assert row["sm_mhz"] == {"min": 1501, "mean": 1502.5, "max": 1504}
    assert row["memory_mhz"]["max"] == 2619 and row["temperature_c"]["mean"] == 50 and row["memory_used"] == 40_000
    assert row["reasons"] == {"sw_power_cap": 1.0}
    assert row["energy_j"] == 5.0 and row["ecc"]["uncorrected"] == 0 and row["xid"] == []
    blank = health_row("GPU-1", [Sample(0.0, None, None, None, None)], fake)
    assert blank["power_w"] is None and blank["memory_used"] is None and blank["reasons"] == {} and blank["xid"] == [31]


def test_rows_wait_for_their_file_and_then_go_there(tmp_path):
    heard = []
    path = tmp_path / "health-host.jsonl"
    with HealthLog({"GPU-1": Fake(), "GPU-2": Fake()}, hz=200, row_s=0.05, on_row=heard.append) as log:
        while len(heard) < 4:
            time.sleep(0.01)
        assert not path.exists()
        log.write_to(path)
        before = len(path.read_text().splitlines())
        assert before >= 4
        while len(heard) < 8:
            time.sleep(0.01)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(heard) and rows == heard and len(rows) > before
    assert {row["gpu"] for row in rows} == {"GPU-1", "GPU-2"} and rows[0]["samples"] >= 2
    assert [row["xid"] for row in rows if row["gpu"] == "GPU-1"][:3] == [[], [31], []]


def test_a_disk_that_refuses_costs_rows_and_nothing_else(tmp_path):
    with HealthLog({"GPU-1": Fake()}, hz=100, row_s=0.02) as log:
        log.write_to(tmp_path / "nosuch" / "health.jsonl")
        end = time.monotonic() + 10
        while log.lost < 2 and time.monotonic() < end:
            time.sleep(0.01)
    assert log.lost >= 2
    assert log._waiting.maxlen == KEPT_ROWS  # nor does it fill the memory


def test_without_a_gpu_it_does_nothing(tmp_path):
    with HealthLog({}) as log:
        log.write_to(tmp_path / "health.jsonl")
    assert not list(tmp_path.iterdir())
