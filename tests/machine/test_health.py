"""Sampling at a steady rate, what is made of the samples, and NVML through a module that stands in for it."""

import sys
import time
import types

import pytest

from dwslm.machine.health import Gpu, Sample, Sampler, list_gpus, summarise


def samples(n, **more):
    fields = {"power_w": 100.0, "sm_mhz": 1500, "temperature_c": 40, "reasons": 0} | more
    return [Sample(time=50.0 + i / 10, **fields) for i in range(n)]


def test_a_sampler_looks_ten_times_a_second_until_it_is_stopped():
    taken = []

    def source():
        taken.append(time.monotonic())
        return Sample(taken[-1], 1.0, 1, 1, 0)

    with Sampler(source, hz=50) as sampler:
        time.sleep(0.4)
    assert 15 <= len(sampler.samples) <= 22
    count = len(taken)
    time.sleep(0.1)
    assert len(taken) == count
    middle = sampler.between(taken[5], taken[9])
    assert [s.time for s in middle] == taken[5:10]


def test_a_slow_source_does_not_make_samples_pile_up():
    def source():
        time.sleep(0.03)
        return Sample(time.monotonic(), None, None, None, None)

    with Sampler(source, hz=1000) as sampler:
        time.sleep(0.2)
    assert 4 <= len(sampler.samples) <= 8


def test_the_summary_by_hand():
    some = samples(6) + samples(2, power_w=300.0, sm_mhz=1200, temperature_c=60, reasons=0x4 | 0x20)
    told = summarise(some, 10.0)
    assert told["samples"] == 8 and told["hz"] == 10.0
    assert told["power_w"] == {"mean": 150.0, "max": 300.0}
    assert told["sm_mhz"] == {"min": 1200, "median": 1500, "max": 1500}
    assert told["temperature_c"] == {"min": 40, "median": 40, "max": 60}
    assert told["throttle_reasons"] == {"sw_power_cap": 0.25, "sw_thermal_slowdown": 0.25, "none": 0.75}
    assert told["series"][0] == [0.0, 100.0, 1500, 40] and len(told["series"]) == 8


def test_a_long_series_is_thinned_and_keeps_its_span():
    series = summarise(samples(5000), 10.0, points=300)["series"]
    assert 250 <= len(series) <= 300
    assert series[0][0] == 0.0 and series[-1][0] > 495


def test_what_the_gpu_does_not_tell_is_left_out():
    told = summarise(samples(3, power_w=None, sm_mhz=None, temperature_c=None, reasons=None), 10.0)
    assert told["power_w"] is None and told["sm_mhz"] is None and told["throttle_reasons"] == {}
    assert summarise([], 10.0)["samples"] == 0


def test_without_the_module_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match="pip install nvidia-ml-py"):
        Gpu()


@pytest.fixture
def nvml(monkeypatch):
    """A driver that knows one GPU, in milliwatts and millijoules as NVML counts."""
    module = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def by_uuid(uuid):
        if uuid != "GPU-abc":
            raise NVMLError("Not Found")
        return "handle"

    def refused(*arguments):
        raise NVMLError("Not Supported")

    module.__dict__.update(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_GRAPHICS=0, NVML_TEMPERATURE_GPU=0, NVML_VOLATILE_ECC=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetHandleByIndex=lambda index: "handle",
        nvmlDeviceGetPowerUsage=lambda handle: 483_200,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1755,
        nvmlDeviceGetTemperature=lambda handle, kind: 51,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 5_000_000,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: kind,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetApplicationsClock=refused,
        nvmlSystemGetDriverVersion=lambda: b"580.159",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_gpu_in_watts_and_joules(nvml):
    gpu = Gpu("abc")  # as torch names it, without the prefix
    sample = gpu.sample()
    assert (sample.power_w, sample.sm_mhz, sample.temperature_c, sample.reasons) == (483.2, 1755, 51, 0x4)
    assert gpu.energy_j() == 5000.0
    assert gpu.ecc_errors() == {"corrected": 0, "uncorrected": 1}
    assert gpu.facts() == {"driver": "580.159", "power_limit_w": 700.0, "max_clock_mhz": 1980, "clock_cap_mhz": None}


def test_a_cap_by_application_clocks_is_read_back(nvml):
    nvml.nvmlDeviceGetApplicationsClock = lambda handle, kind: 1500
    assert Gpu().facts()["clock_cap_mhz"] == 1500
    nvml.nvmlDeviceGetApplicationsClock = lambda handle, kind: 1980
    assert Gpu().facts()["clock_cap_mhz"] is None


def test_a_newer_modules_name_for_the_clocks_reasons(nvml):
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x40
    assert Gpu().sample().reasons == 0x40
    del nvml.nvmlDeviceGetCurrentClocksEventReasons, nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    assert Gpu().sample().reasons is None


def test_a_gpu_that_is_not_there_is_one_line(nvml):
    with pytest.raises(ValueError, match="no health samples: Not Found"):
        Gpu("GPU-xyz")


def test_names_memory_and_remapped_rows(nvml):
    nvml.nvmlDeviceGetName = lambda handle: b"NVIDIA H200"
    nvml.nvmlDeviceGetUUID = lambda handle: "GPU-abc"
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=5, total=7)
    nvml.nvmlDeviceGetRemappedRows = lambda handle: (1, 2, 0, 1)
    gpu = Gpu()
    assert gpu.name() == ("NVIDIA H200", "GPU-abc") and gpu.memory() == (5, 7) and gpu.sample().memory_used == 5
    assert gpu.remapped_rows() == {"corrected": 1, "uncorrected": 2, "pending": False, "failed": True}
    del nvml.nvmlDeviceGetRemappedRows, nvml.nvmlDeviceGetMemoryInfo
    assert gpu.remapped_rows() is None and gpu.memory() == (None, None)


def test_error_codes_are_given_once_and_not_waited_for(nvml):
    waiting = [31, 79]

    def wait(events, timeout_ms):
        assert timeout_ms == 0
        if not waiting:
            raise nvml.NVMLError("Timeout")
        return types.SimpleNamespace(eventData=waiting.pop(0))

    registered = []
    nvml.nvmlEventTypeXidCriticalError = 8
    nvml.nvmlEventSetCreate = lambda: "set"
    nvml.nvmlDeviceRegisterEvents = lambda handle, kind, events: registered.append((handle, kind, events))
    nvml.nvmlEventSetWait_v2 = wait
    gpu = Gpu()
    assert gpu.new_xid() == [] and waiting  # nobody asked for them yet
    assert gpu.watch_xid() and registered == [("handle", 8, "set")]
    assert gpu.new_xid() == [31, 79] and gpu.new_xid() == []

    def refused(*arguments):
        raise nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceRegisterEvents = refused
    assert Gpu().watch_xid() is False


def test_all_gpus_and_none_without_a_driver(nvml):
    nvml.nvmlDeviceGetCount = lambda: 3
    assert len(list_gpus()) == 3

    def none():
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = none
    assert list_gpus() == []
