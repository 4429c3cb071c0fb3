"""`dwslm preflight`: fit and unfit, on a CPU; what a GPU tells is tested in tests/machine/test_preflight.py."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest
import torch

from dwslm.cli import preflight as command
from dwslm.cli import preflight_step
from dwslm.cli.errors import make_console
from dwslm.cli.launch import build
from dwslm.cli.preflight import composed, preflight
from dwslm.machine import preflight as machine
from dwslm.machine.health import Sample
from dwslm.machine.lease import Lease
from dwslm.train import checkpoint as checkpoints
from tests.train.tiny_run import tiny_config


def checks(config, clock_cap=None, quick=False):
    return {check.name: check for check in preflight(config, clock_cap, quick, make_console())}


@pytest.fixture
def own_data(tiny_data, tmp_path):
    """A dataset that a test may damage."""
    return shutil.copytree(tiny_data, tmp_path / "data")


def test_a_fit_machine_and_dataset(tiny_data, tmp_path):
    found = checks(tiny_config(tiny_data, tmp_path / "runs"))
    assert machine.fit(found.values())
    assert found["GPU"].status == "skipped" and "computes on a CPU" in found["GPU"].said
    for name in ("dataset train", "dataset valid", "tokenizer", "disk", "save and load", "one step", "expected"):
        assert found[name].status == "ok", found[name]
    assert "sha256 of all files" in found["dataset train"].said and "equal" in found["save and load"].said
    assert "of 256 tokens in" in found["one step"].said and "energy not known" in found["expected"].said
    assert not (tmp_path / "runs").exists()  # nothing is left behind


def test_a_flipped_byte_is_found_and_quick_does_not_look(own_data, tmp_path):
    shard = next((own_data / "train").glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    found = checks(tiny_config(own_data, tmp_path / "runs"))
    assert (
        found["dataset train"].status == "failed" and "its sha256 is not the manifest's" in found["dataset train"].said
    )
    assert found["the rest"].status == "skipped" and "one step" not in found
    assert checks(tiny_config(own_data, tmp_path / "runs"), quick=True)["dataset train"].status == "ok"


def test_another_tokenizer_is_refused(own_data, tmp_path):
    file = own_data / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"more": 1}))
    found = checks(tiny_config(own_data, tmp_path / "runs"))
    assert found["dataset train"].status == "failed" and "was not made with" in found["dataset train"].said


def test_too_little_text_too_little_disk_and_a_device_that_is_not_there(tiny_data, tmp_path, monkeypatch):
    config = tiny_config(tiny_data, tmp_path / "runs", tokens=256 * 10_000)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    found = checks(config)
    assert found["enough text"].status == "failed" and "teaches nothing more" in found["enough text"].said
    assert found["disk"].status == "failed" and "0.00 GB free" in found["disk"].said
    assert found["save and load"].status == "failed"  # which needs the space too
    if not torch.cuda.is_available():
        gone = checks(tiny_config(tiny_data, tmp_path / "runs", device="cuda"))
        assert gone["device"].status == "failed" and "torch sees 0 GPUs" in gone["device"].said


def test_a_disk_that_gives_back_something_else(tiny_data, tmp_path, monkeypatch):
    real = checkpoints.newest_good

    def other(root):
        found, rejected = real(root)
        weights = found.load_model()
        next(iter(weights.values())).flatten()[0] += 1
        monkeypatch.setattr(type(found), "load_model", lambda self: weights)
        return found, rejected

    monkeypatch.setattr(command.checkpoints, "newest_good", other)
    found = checks(tiny_config(tiny_data, tmp_path / "runs"))
    assert found["save and load"].status == "failed" and "came back otherwise" in found["save and load"].said
    assert not (tmp_path / "runs").exists()


def test_a_step_that_would_take_too_long_is_skipped_and_a_run_that_would_is_refused(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_step, "CPU_LIMIT_S", 0.0)
    monkeypatch.setattr(preflight_step, "LONGEST_H", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = checks(tiny_config(tiny_data, tmp_path / "runs"))  # device=cpu: somebody means it
    assert asked["one step"].status == "skipped" and "Memory at full size is not known" in asked["one step"].said
    assert asked["expected"].status == "warning"
    found = checks(tiny_config(tiny_data, tmp_path / "runs", device="auto"))
    assert found["expected"].status == "failed" and "train.device=cpu" in found["expected"].said


def test_the_sum_of_the_expected_by_hand(tiny_data, tmp_path):
    plan = SimpleNamespace(rungs=((0, 64), (10, 128)), steps=30, batch_tokens=100, score_stride=15)
    valid = SimpleNamespace(manifest={"totals": {"tokens": 600}})
    built = SimpleNamespace(plan=plan, valid=valid, optimizer=None)
    config = tiny_config(tiny_data, tmp_path)
    said = preflight_step.expected(config, built, [36.0, 72.0], [3.6e6, 7.2e6]).said
    # 10 x 36 s + 20 x 72 s = 0.5 h; 3 scorings of 600 tokens, each as much as 2 steps of 72 s: 0.12 h; 1 kWh and 2 kWh a step.
    assert said.startswith("0.62 hours (0.50 training, about 0.12 in 3 scorings), 62.0 kWh of the GPU alone")
    said = preflight_step.expected(config, built, [3.6e5, 7.2e5], [None, None]).said  # ten thousand times as long
    assert said.startswith("6,200 hours (5,000 training, about 1,200 in 3 scorings), energy not known")


def test_each_check_is_said_when_it_is_done(monkeypatch, capsys):
    """Some take minutes."""

    def slow(*_):
        yield machine.Check("tokenizer", "ok", "there")
        assert "     ok  tokenizer: there\n" in capsys.readouterr().out
        yield machine.Check("disk", "failed", "full [x]")

    monkeypatch.setattr(command, "preflight", slow)
    with pytest.raises(SystemExit):
        command.run(SimpleNamespace(overrides=["data.path=elsewhere"], config_dir=None, clock_cap=None, quick=True))
    assert capsys.readouterr().out == " failed  disk: full [x]\nunfit: disk\n"


class FakeGpu:
    def __init__(self):
        self.joules = 0.0

    def name(self):
        return "NVIDIA H200", "GPU-abc"

    def watch_xid(self):
        return True

    def facts(self):
        return {"driver": "580.159"}

    def memory(self):
        return 0, 141 << 30

    def ecc_errors(self):
        return {"corrected": 0, "uncorrected": 0}

    def remapped_rows(self):
        return None

    def sample(self):
        return Sample(0.0, 70.0, 345, 30, 0x1)


def test_a_gpu_that_another_run_has_and_one_that_torch_does_not_see(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "list_gpus", lambda: [FakeGpu()])
    monkeypatch.setattr("dwslm.machine.lease.lease_folder", lambda: tmp_path / "leases")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu, lease, said = command.leased(torch.device("cuda:0"))
    assert gpu is not None and machine.fit(said)
    lease.release()
    with Lease("GPU-abc", what="the main run"):
        gpu, lease, (said,) = command.leased(torch.device("cuda:0"))
    assert gpu is None and lease is None and said.status == "failed" and "the main run" in said.said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    blind = checks(tiny_config(tiny_data, tmp_path / "runs", device="auto"))
    assert blind["GPU"].status == "failed" and "torch" in blind["GPU"].said and "the rest" in blind


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """The checks of a GPU's step with the step on a CPU: what torch and the driver say is made up."""
    monkeypatch.setattr(preflight_step, "LOAD_S", 0.05)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77_000_000_000)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=150_000_000_000)
    )


def steps_on_gpu(config, gpu, clock_cap=None):
    return {check.name: check for check in preflight_step.on_gpu(config, build(config, lr=None), gpu, clock_cap)}


class LoadedGpu(FakeGpu):
    """At 1,980 MHz; draws 1,000 J between two looks at its counter."""

    def sample(self):
        return Sample(time.monotonic(), 690.0, 1980, 60, 0x4)

    def energy_j(self):
        self.joules += 1000.0
        return self.joules

    def new_xid(self):
        return []


def test_steps_at_full_size_give_memory_clock_time_and_energy(tiny_data, tmp_path, as_if_on_a_gpu):
    config = tiny_config(tiny_data, tmp_path / "runs")
    found = steps_on_gpu(config, LoadedGpu(), clock_cap=1980)
    assert machine.fit(found.values()) and "77.0 of 150.0 GB at the peak" in found["one step"].said
    assert found["GPU: clock under load"].said == "1980 to 1980 MHz, under the cap of 1980"
    assert "kWh of the GPU alone" in found["expected"].said and found["GPU: driver errors"].status == "ok"
    found = steps_on_gpu(config, LoadedGpu(), clock_cap=1500)
    assert found["GPU: clock under load"].status == "failed"
    assert "energy not known" in steps_on_gpu(config, None)["expected"].said


def test_out_of_memory_comes_now_with_the_way_out(tiny_data, tmp_path, as_if_on_a_gpu, monkeypatch):
    def run(self, batch, rate):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(preflight_step.TrainStep, "run", run)
    found = steps_on_gpu(tiny_config(tiny_data, tmp_path / "runs"), LoadedGpu())
    assert list(found) == ["one step"] and found["one step"].status == "failed"
    assert "halve train.micro_batch_tokens. CUDA out of memory. Tried to allocate 20.00 GiB." in found["one step"].said


def test_the_words_of_train_py(tmp_path):
    assert composed(["experiment=main", "train.seed=7"], None).train.seed == 7
    mine = tmp_path / "experiment" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("# @package _global_\ndefaults: [demo]\ntrain: {seed: 9}\n")
    config = composed(["experiment=mine"], str(tmp_path))
    assert config.train.seed == 9 and config.name == "demo"
    with pytest.raises(ValueError, match="resume=RUN dry_run=true"):
        composed(["resume=x"], None)
