"""`dwslm bench step` on a CPU: real steps of a tiny model in a process of their own, and the peer's side of it."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dwslm.bench import step_peer
from dwslm.bench.step import Clock, Drive, breakdown, measure, mfu, spread, unmarked
from dwslm.bench.step_builds import BUILDS, MEANING, PEER, Measurement, named
from dwslm.bench.step_floor import Floor
from dwslm.bench.step_trace import Kernel, share_out
from dwslm.cli import bench_step, bench_step_measure, main
from dwslm.data.loader import Loader, TorchBatch
from dwslm.model.lm import ModelSettings

TINY = [
    "experiment=demo", "data.packing.context=64", "data.mixture.phases=[]", "train.tokens=4096", "train.batch_tokens=256",
    "train.micro_batch_tokens=128", "train.device=cpu", "model.layers=4", "model.width=32", "model.head_dim=8",
    "model.delta_head_dim=8", "model.delta_gate_rank=8", "model.mlp_hidden=64",
]  # fmt: skip


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dwslm", "bench", *arguments])
    main()


def test_a_build_and_the_peer_on_a_cpu(tiny_data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.json"
    command(monkeypatch, "step", *TINY, f"data.path={tiny_data}", "--builds", "plain", "--peer", "--steps", "2",
            "--warm", "0", "--out", str(out))  # fmt: skip
    plain = json.loads(out.read_text())
    assert plain["kind"] == "step" and plain["complete"] and plain["machine"]["device"] == "CPU"
    build, peer = plain["builds"]
    assert build["name"] == "plain" and build["status"] == "ok" and build["recorded"] is False
    assert build["config"]["model"]["depth_block"] == 0 and build["sizes"]["value tables"] == 0
    assert build["config"]["model"]["head_engine"] == "auto" and build["engines"]["head"] == "torch"
    speeds = [run["tokens_per_second"] for run in build["runs"]]
    assert len(speeds) == 3 and build["tokens_per_second"]["median"] == sorted(speeds)[1]
    assert build["tokens_per_second"]["spread"] == pytest.approx(max(speeds) - min(speeds))
    assert speeds[0] == pytest.approx(2 * 256 / build["runs"][0]["seconds"])
    assert build["timed_steps"] == 2 and build["micro_batch_ms"]["n"] == 12 and build["update_ms"]["n"] == 6
    assert build["start"]["to_first_step_s"] > build["first_step_s"] > 0 and build["start"]["caches"] == "unused"
    assert build["mfu"] is None and build["energy_j_per_token"] is None and build["profile"] is None
    assert "no power" in build["not_measured"]
    assert peer["name"] == "peer" and peer["status"] in ("missing", "refused") and peer["reason"]
    said = capsys.readouterr().out
    assert "run 3 of 3: 2 steps" in said and "Training steps" in said

    command(monkeypatch, "report", str(out), "--out", str(tmp_path / "page"))
    assert "Sustained speed" in (tmp_path / "page" / "step.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--builds", "everything"], "unknown build 'everything': choose out of main, plain"),
        (["--builds", "plain,plain"], "build 'plain' is given twice"),
        (["--builds", ""], "--builds is empty: name one, or give --peer"),
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--budget-minutes", "0"], "--budget-minutes must be above 0"),
        (["model.nothing=1"], "unknown setting model.nothing"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(
    arguments, message, tiny_data, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "step.json"
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, "step", *TINY, f"data.path={tiny_data}", *arguments, "--out", str(out))
    assert message in capsys.readouterr().err and not out.exists()


def test_what_a_build_cannot_do_is_its_row_and_the_others_are_measured(tiny_data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.json"
    command(monkeypatch, "step", *TINY, f"data.path={tiny_data}", "--recorded", "both", "--steps", "1", "--warm", "0",
            "--out", str(out))  # fmt: skip
    recorded, launched = json.loads(out.read_text())["builds"]
    assert recorded["name"] == "main recorded" and recorded["status"] == "refused"
    assert "train.record=true needs an NVIDIA GPU" in recorded["reason"]
    assert launched["name"] == "main launched" and launched["status"] == "ok" and launched["recorded"] is False
    assert launched["config"]["model"]["depth_block"] == 4 and launched["sizes"]["value tables"] > 0
    assert "REFUSED" in capsys.readouterr().out


def test_a_budget_that_is_used_up_leaves_rows_that_say_so(tiny_data, tmp_path, monkeypatch):
    out = tmp_path / "step.json"
    command(monkeypatch, "step", *TINY, f"data.path={tiny_data}", "--builds", "main,plain", "--budget-minutes", "0.001",
            "--out", str(out))  # fmt: skip
    plain = json.loads(out.read_text())
    assert [build["status"] for build in plain["builds"]] == ["skipped", "skipped"] and not plain["complete"]
    assert all("budget was used up" in build["reason"] for build in plain["builds"])


def test_classes_are_a_table_of_their_own():
    row = {"class": "mlp up", "ms": 700.0, "floor_share": 0.7}
    profile = {"classes": [row, {"class": "other", "ms": 3.0, "floor_share": None}], "idle_ms": 30.0, "wall_ms": 733.0}
    builds = [{"name": "plain", "profile": profile}, {"name": "window", "profile": None}]
    table = bench_step.class_table(builds)
    cells = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    assert dict(cells) == {
        "mlp up": "700.0 (70%)", "other": "3.0 (-)", "idle": "30.0", "whole step": "733.0",
    }  # fmt: skip


def test_recorded_and_launched_are_builds_of_their_own():
    assert [name for name, _ in named(["main", "fp8"], "both")] == [
        "main recorded", "main launched", "fp8 recorded", "fp8 launched",
    ]  # fmt: skip
    assert named(["plain"], "on") == [("plain", (*BUILDS["plain"], "train.record=true"))]
    assert named(["main"], None) == [("main", ())]
    assert set(MEANING) == {*BUILDS, PEER}


# ---- figures ----------------------------------------------------------------------------------------------


def test_the_spread_of_runs_is_their_range():
    assert spread([210.0, 200.0, 206.0]) == {"median": 206.0, "spread": 10.0, "n": 3, "values": [210.0, 200.0, 206.0]}


def test_mfu_is_not_guessed():
    assert mfu(285_335_552, 203_300, torch.device("cpu")) is None


class Counting:
    """A stepper that does nothing, and says a loss."""

    def __init__(self, loss: float):
        self.loss, self.numbers, self.mark = loss, [], unmarked

    def step(self, batch, number):
        self.numbers.append(number)
        with self.mark("micro_batch"):
            pass
        return torch.tensor(self.loss)


class Energy:
    """A GPU that has used 3 J more each time one asks."""

    def __init__(self):
        self.joules = 0.0

    def energy_j(self):
        self.joules += 3.0
        return self.joules

    def sample(self):
        return SimpleNamespace(time=0.0, power_w=690.0, sm_mhz=1800, temperature_c=60, reasons=0x4)


def test_three_runs_follow_the_warm_up_and_energy_is_counted_in_them_alone():
    stepper = Counting(2.5)
    drive = Drive(stepper, iter([None] * 100), torch.device("cpu"))
    found = measure(drive, steps=4, warm_s=0.0, batch_tokens=30, gpu=Energy(), say=lambda text: None)
    assert stepper.numbers == list(range(1 + 1 + 3 * 4))  # the first, one to warm up, three runs
    assert found["energy_j_per_token"]["values"] == [3.0 / 120] * 3
    assert found["micro_batch_ms"]["n"] == 12 and found["update_ms"] is None and found["loss"] == 2.5


def test_a_loss_that_is_not_finite_is_no_measurement():
    drive = Drive(Counting(float("nan")), iter([None] * 100), torch.device("cpu"))
    with pytest.raises(ValueError, match="the loss is nan after 5 steps"):
        measure(drive, steps=1, warm_s=0.0, batch_tokens=30, gpu=None, say=lambda text: None)


def test_marks_on_a_cpu_are_milliseconds_of_the_host():
    clock = Clock(torch.device("cpu"))
    for part in ("micro_batch", "micro_batch", "update"):
        with clock.mark(part):
            pass
    found = clock.read()
    assert len(found["micro_batch"]) == 2 and len(found["update"]) == 1 and min(found["micro_batch"]) >= 0


def test_the_breakdown_is_of_one_step_and_adds_up():
    # Two steps: 4 ms of products, 2 ms of the optimizer, 1 ms of idle.
    kernels = [Kernel("gemm", "kernel", 0, 4000), Kernel("adam", "kernel", 5000, 2000)]
    ceilings = {"copy_gb_s": {"median": 4000.0}, "bf16_tflops": {"median": 700.0}}
    shares = share_out(kernels, ["projections", "optimizer"])
    found = breakdown(shares, 2, 4, {"projections": Floor(flop=0.7e12)}, ceilings)
    assert found["wall_ms"] == 3.5 and found["idle_ms"] == 0.5 and found["busy_ms"] == 3.0
    rows = {row["class"]: row for row in found["classes"]}
    assert rows["projections"]["ms"] == 2.0 and rows["projections"]["ms_micro_batch"] == 0.5
    assert rows["projections"]["floor_ms"] == pytest.approx(1.0) and rows["projections"][
        "floor_share"
    ] == pytest.approx(0.5)
    assert rows["optimizer"]["ms_micro_batch"] is None and rows["optimizer"]["floor_ms"] is None
    assert sum(row["share"] for row in found["classes"]) == pytest.approx(6 / 7)
    assert sum(row["ms"] for row in found["classes"]) + found["idle_ms"] == found["wall_ms"]
    assert found["kernels"][0] == {"class": "projections", "kernel": "gemm", "ms": 2.0, "count": 0.5}


def test_a_build_that_fills_the_card_keeps_what_was_timed(monkeypatch):
    """What measures the ceilings wants memory of its own."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(bench_step_measure, "measure_ceilings", full)
    monkeypatch.setattr(bench_step_measure, "floors", lambda *_: None)
    kept: dict[str, Any] = {"status": "ok", "not_measured": "no power"}
    said: list[str] = []
    micro_batch = SimpleNamespace(cu_seqlens=torch.zeros(2), context=64)
    drive: Any = SimpleNamespace(batches=iter([SimpleNamespace(micro_batches=[micro_batch])]))
    model = SimpleNamespace(vocab_size=100)
    built: Any = SimpleNamespace(plan=SimpleNamespace(micro_batch_tokens=64, grad_accum=1), model=model, optimizer=None)
    config: Any = SimpleNamespace(model=ModelSettings())
    stepper: Any = SimpleNamespace(launch=None)
    bench_step_measure.keep_classes(built, config, drive, stepper, torch.device("cpu"), kept.update, said.append)
    assert kept["status"] == "ok" and kept["not_measured"] == "no power" and "profile" not in kept
    assert "smaller micro-batches" in kept["no_classes"] and said == [kept["no_classes"]]


# ---- the peer ---------------------------------------------------------------------------------------------


def test_the_peer_has_the_shape_and_as_many_weights():
    found = step_peer.configuration(ModelSettings(), 32768, 4096)
    assert found["attn"]["layers"] == [3, 7, 11, 15, 19] and found["attn"]["num_kv_heads"] == 2
    assert found["hidden_size"] == 1024 and found["num_hidden_layers"] == 20 and found["lower_bound"] == -5.0
    assert found["intermediate_size"] == 2816  # of 3 x 1,024 x 2,731, rounded up to 256
    assert 1.0 <= 3 * found["intermediate_size"] / (2 * 4096) < 1.04
    with pytest.raises(ValueError, match="--peer compares with KDA layers"):
        step_peer.configuration(ModelSettings(local="window"), 32768, 4096)


def test_the_peer_gets_the_same_documents_and_targets():
    tokens = torch.arange(8, dtype=torch.int32)
    targets = torch.tensor([1, 2, -100, 4, 5, 6, 7, -100])
    batch = TorchBatch(tokens, targets, torch.tensor([0, 3, 4, 8, 8, 8], dtype=torch.int32), context=4, scored=6)
    ((whole, labels, bounds),) = step_peer.cut(batch, 1)
    assert whole.tolist() == [tokens.tolist()] and bounds.tolist() == [0, 3, 4, 8]
    # The package compares position i with label i + 1: that must be target i.
    assert labels[0, 1:].tolist() == targets[:-1].tolist() and labels[0, 0] == -100
    first, second = step_peer.cut(batch, 2)
    assert first[2].tolist() == [0, 3, 4] and second[2].tolist() == [0, 4]
    assert second[0].tolist() == [[4, 5, 6, 7]] and second[1].tolist() == [[-100, 5, 6, 7]]
    with pytest.raises(ValueError, match="2 rows of a micro-batch cannot be cut into 4 pieces"):
        step_peer.cut(batch, 4)


def test_a_peer_without_memory_gets_smaller_micro_batches():
    batch = SimpleNamespace(micro_batches=[SimpleNamespace(tokens=torch.zeros(8), context=2)])
    said = []

    class Hungry:
        def __init__(self, split):
            self.split = split

        def step(self, batch, number):
            if self.split < 4:
                raise torch.OutOfMemoryError("full")

    found = step_peer.first_that_fits(Hungry, batch, torch.device("cpu"), said.append)
    assert found.split == 4 and len(said) == 2
    Hungry.step = lambda self, batch, number: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        step_peer.first_that_fits(Hungry, batch, torch.device("cpu"), said.append)


@pytest.mark.parametrize(
    ("compile", "breaks", "made", "compiled", "why"),
    [
        (True, False, [True], True, None),
        (False, False, [False], False, "train.compile=false"),
        (True, True, [True, False], False, "RuntimeError: no such kernel"),
    ],
)
def test_the_peer_is_compiled_where_asked_and_as_far_as_it_can_be(
    tiny_data, tmp_path, monkeypatch, compile, breaks, made, compiled, why
):
    """With the package, the GPU and the measuring stood in for; configuration, data and batches are real."""
    asked_of, kept = [], {}

    class Peer:
        matrix_parameters, parameters, attention = 10, 20, "some"

        def __init__(self, settings, vocab_size, context, device, *, split, compile):
            asked_of.append(compile)
            self.compile, self.split = compile, split

        def step(self, batch, number):
            assert len(batch.micro_batches) == 2 and number == 0
            if self.compile and breaks:
                raise RuntimeError("no such kernel")

    def measured(drive, *rest):
        return {"tokens_per_second": {"median": 1.0}}

    for owner, name, stand_in in (
        (step_peer, "missing", lambda: None),
        (step_peer, "PeerStepper", Peer),
        (bench_step_measure, "choose_device", lambda name: torch.device("cuda")),
        (bench_step_measure, "set_numerics", lambda *given: None),
        (bench_step_measure, "watch", lambda *given: None),
        (bench_step_measure, "Loader", lambda *given, pin, **named: Loader(*given, pin=False, **named)),
        (bench_step_measure, "measured", measured),
        (bench_step_measure, "mfu", lambda *given: None),
        (torch.cuda, "synchronize", lambda device: None),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    overrides = [*TINY, f"data.path={tiny_data}", "model.heads=4", "model.delta_heads=4", f"train.compile={compile}"]
    asked = Measurement(PEER, overrides, str(tmp_path / "peer.json"), peer=True, caches=[])
    bench_step_measure.measure_peer(asked, lambda **more: kept.update(more), lambda text: None)
    assert asked_of == made and kept["status"] == "ok"
    assert (kept["peer"]["compiled"], kept["peer"]["not_compiled_because"]) == (compiled, why)
