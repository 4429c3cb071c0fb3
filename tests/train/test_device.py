"""What the host waits for, counted by the step."""

from types import SimpleNamespace

import pytest
import torch

from dwslm.train import device
from dwslm.train.device import STEPS_AHEAD, RunAhead


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(device.time, "perf_counter", lambda: now.seconds)
    return now


def waits(clock, seconds: float):
    def call() -> str:
        clock.seconds += seconds
        return "done"

    return call


def test_waits_are_told_by_the_step_and_once(clock):
    ahead = RunAhead(torch.device("cpu"))
    assert ahead.timed("data", waits(clock, 3.0)) == "done"
    clock.seconds += 10  # the host's own work
    ahead.timed("data", waits(clock, 1.0))
    assert ahead.waits(8) == {"data_seconds": 0.5}
    assert ahead.waits(8) == {"data_seconds": 0.0}


def test_what_broke_is_raised_as_it_is():
    with pytest.raises(StopIteration):
        RunAhead(torch.device("cpu")).timed("data", iter([]).__next__)


def test_a_gpu_is_waited_for_a_few_steps_late(clock, monkeypatch):
    """With events of this test in the place of CUDA's: each step ends two seconds after it was waited for."""

    class Event:
        def record(self, stream) -> None: ...

        synchronize = staticmethod(waits(clock, 2.0))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    ahead = RunAhead(torch.device("cuda"))
    for _ in range(STEPS_AHEAD + 3):
        ahead.wait()
    assert ahead.waits(4) == {"data_seconds": 0.0, "device_seconds": 3 * 2.0 / 4}
