"""Whole calls on a CPU: the file that comes out, budgets, broken engines, interruptions."""

import dataclasses
import json

import pytest
import torch

from dwslm.bench import attention, projection
from dwslm.bench.case import Engine
from dwslm.bench.figures import blank_row
from dwslm.bench.process import Ended
from dwslm.bench.request import OPS, Request
from dwslm.bench.run import Run, line, working_clock
from dwslm.bench.timing import Timer
from dwslm.machine.compiler_cache import Moved
from dwslm.machine.health import Sample

ABOUT = {
    "kind": "day0",
    "command": "dwslm bench day0",
    "commit": None,
    "versions": {"torch": "x"},
    "machine": {"cpu": "c"},
}
MEASURED = {"median", "spread", "n"}


def request(tiny_data, **more):
    fields = {
        "data": str(tiny_data / "train"), "seed": 5, "tokens": [256, 512], "contexts": [128, 256], "heads": [1, 2],
        "small": True, "device": "cpu", "repeats": 3, "warm_up_s": 0.0,
    }  # fmt: skip
    return Request(**(fields | more))


def run(tiny_data, out, said=None, **more):
    said = [] if said is None else said
    return Run(request(tiny_data, **more), out, say=said.append, about=ABOUT, inline=True).run()


@pytest.fixture(scope="module")
def document(tiny_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "cpu.json"
    said = []
    run(tiny_data, out, said)
    return json.loads(out.read_text()), said


def test_every_operation_is_gated_and_timed_on_a_cpu(document):
    plain, _ = document
    assert plain["format"] == 1 and plain["complete"] and plain["seed"] == 5
    assert plain["machine"]["device"] == "CPU" and plain["machine"]["cpu"] == "c"
    ok = [row for row in plain["rows"] if row["status"] == "ok"]
    assert {row["op"] for row in ok} == set(OPS)
    for row in ok:
        assert row["gate"]["passed"] and row["gate"]["errors"] and row["gate"]["checks"]["twice"]
        assert set(row["forward_backward_ms"]) == MEASURED and row["forward_backward_ms"]["n"] == 3
        assert row["forward_backward_ms"]["median"] > 0 and row["tflops"] > 0 and row["gb_s"] > 0
        if row["op"] not in ("newton_schulz", "optimizer"):
            assert row["forward_ms"]["median"] > 0
        if row["dtype"] == "float32":
            assert row["floor_ms"] > 0 and row["floor_share"] == pytest.approx(
                row["floor_ms"] / row["forward_backward_ms"]["median"]
            )
            assert all(e["value"] <= e["bound"] for e in row["gate"]["errors"].values())
    assert plain["ceilings"]["bf16_tflops"] is None and plain["ceilings"]["float32_tflops"]["median"] > 0


def test_sizes_are_those_that_were_asked_for(document):
    plain, _ = document
    assert {(w["tokens"], w["context"], w["rows"]) for w in plain["work"]} == {
        (256, 128, 2), (256, 256, 1), (512, 128, 4), (512, 256, 2),
    }  # fmt: skip
    heads = {row["heads"] for row in plain["rows"] if row["op"] == "delta_rule" and row["status"] == "ok"}
    assert heads == {1, 2}
    mlp = {row["tokens"] for row in plain["rows"] if row["op"] == "mlp" and row["status"] == "ok"}
    assert mlp == {256, 512}


def test_what_cannot_be_had_says_why_and_how_once(document):
    plain, said = document
    rows = [row for row in plain["rows"] if row["status"] in ("missing", "refused")]
    assert all(row["reason"] for row in rows)
    missing = {row["engine"]: row["reason"] for row in rows if row["status"] == "missing"}
    assert "pip install cut-cross-entropy" in missing["cce"]
    assert "pip install flash-qla" in missing["flashqla"]
    refused = {row["engine"]: row["reason"] for row in rows if row["status"] == "refused"}
    assert "needs an NVIDIA GPU" in refused["flash"]
    keys = [(row["op"], row["case"], row["engine"]) for row in rows]
    assert len(keys) == len(set(keys))
    assert any("work: 256 tokens, context 128" in text and "segments" in text for text in said)


def test_the_first_engine_is_timed_again_at_the_end(document):
    noise = document[0]["noise"]
    assert noise["engine"] == "torch" and noise["op"] == "attention"
    assert set(noise["first"]) == set(noise["again"]) == MEASURED
    most = max(noise["first"]["spread"], noise["again"]["spread"])
    assert noise["within_spread"] == (noise["difference_ms"] <= most)
    assert noise["difference_ms"] == pytest.approx(abs(noise["first"]["median"] - noise["again"]["median"]))


def test_a_failed_engine_is_reported_and_not_timed(tiny_data, tmp_path, monkeypatch):
    real, timed = attention.attention, []

    def scaled(*arguments, **keywords):
        return 1.01 * real(*arguments, **keywords)

    monkeypatch.setattr(attention, "attention", scaled)
    monkeypatch.setattr(Timer, "measure", measure_and_tell(timed))
    plain = run(tiny_data, tmp_path / "a.json", ops=["attention"], engines=["torch"], tokens=[256])
    assert [row["status"] for row in plain["rows"]] == ["failed", "failed"]  # global and window
    row = plain["rows"][0]
    assert "o misses float32: relative error 0.01" in row["reason"]
    assert row["forward_backward_ms"] is None and row["tflops"] is None and row["gate"]["errors"]["o"]["value"] > 0.009
    assert timed == ["copy", "product"]  # the ceilings, and nothing else
    assert plain["noise"] is None


@pytest.mark.parametrize("takes", [{}, {"x": torch.float64}])
def test_an_engine_is_held_and_timed_with_inputs_in_the_dtypes_that_it_reads(tiny_data, tmp_path, monkeypatch, takes):
    """Converted inside what is held to the truth, and before what is timed."""
    seen = set()

    def own(inputs, seg):
        seen.add(inputs[0].dtype)
        return (inputs[0] * 1.0,)

    real = projection.cases

    def cases(*arguments):
        case = real(*arguments)[0]
        same = dataclasses.replace(case, reference=lambda inputs, cu_seqlens: (inputs[0] * 1.0,), learnt=(True, False))
        return [dataclasses.replace(same, engines=(Engine("torch", lambda: own, takes=takes),))]

    monkeypatch.setattr(projection, "cases", cases)
    found = run(tiny_data, tmp_path / "a.json", ops=["projection"], engines=["torch"], tokens=[256])
    assert [row["status"] for row in found["rows"]] == ["ok"]
    assert seen == {takes.get("x", torch.float32)}


def measure_and_tell(timed):
    real = Timer.measure

    def measure(self, calls, before=None):
        timed.append(("copy", "product")[len(timed)] if len(timed) < 2 else "engine")
        return real(self, calls, before)

    return measure


def test_an_engine_that_breaks_is_an_error_and_the_run_goes_on(tiny_data, tmp_path, monkeypatch):
    def breaks(*arguments, **keywords):
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    monkeypatch.setattr(attention, "attention", breaks)
    plain = run(tiny_data, tmp_path / "a.json", ops=["attention", "norm"], engines=["torch", "eager"], quick=True)
    assert [row["status"] for row in plain["rows"]] == ["error", "error", "ok"]
    assert plain["rows"][0]["reason"] == "RuntimeError: CUDA error: an illegal memory access"


def test_what_does_not_fit_the_budget_is_skipped_with_the_command_that_measures_it(tiny_data, tmp_path):
    plain = run(tiny_data, tmp_path / "a.json", ops=["norm"], engines=["eager"], budget_s=5.0)
    assert [row["status"] for row in plain["rows"]] == ["skipped", "skipped"]
    assert "alone: dwslm bench norm --engines eager --tokens 256" in plain["rows"][0]["reason"]
    assert plain["complete"]


def test_an_interrupted_run_keeps_its_rows(tiny_data, tmp_path):
    out = tmp_path / "a.json"

    def say(text):
        if "2/" in text:
            raise KeyboardInterrupt

    bench = Run(request(tiny_data, ops=["norm"], engines=["eager"]), out, say=say, about=ABOUT, inline=True)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    plain = json.loads(out.read_text())
    assert len(plain["rows"]) == 2 and not plain["complete"]
    assert not list(tmp_path.glob(".*"))  # no half-written file beside it


def test_gates_see_other_inputs_in_another_run(tiny_data, tmp_path):
    errors = []
    for seed in (1, 2):
        plain = run(tiny_data, tmp_path / f"{seed}.json", ops=["attention"], engines=["torch"], seed=seed, quick=True)
        errors.append(plain["rows"][0]["gate"]["errors"]["o"]["value"])
    assert errors[0] != errors[1]


class FakeWorker:
    """Answers as a test tells it to, one entry a row: how the process ends, or (how it ends after the row was timed,), or
    (why the device is broken,)."""

    def __init__(self, *ends):
        self.ends, self.opened, self.closed, self.running = list(ends), 0, 0, False

    def ask(self, message, seconds):
        if message["do"] == "open":
            self.opened, self.running = self.opened + 1, True
            engines = [{"engine": name, "patience": 40.0, "missing": None} for name in ("a", "b", "c")]
            case = {"op": "norm", "case": "n", "heads": None, "sized": True, "by_context": False, "engines": engines}
            yield {"machine": {"device": "x", "uuid": None}, "catalogue": [case], "done": True}
        elif message["do"] == "ceilings":
            rate, names = {"median": 1.0}, ("copy_gb_s", "bf16_tflops", "fp8_tflops", "float32_tflops")
            yield {"ceilings": dict.fromkeys(names, rate), "done": True}
        else:
            yield from self.row(message["job"])

    def row(self, job):
        end = self.ends.pop(0) if self.ends else (None,)
        if isinstance(end, Ended):
            self.running = False
            raise end
        yield {"row": timed(job), "done": False}
        if isinstance(end[0], Ended):
            self.running = False
            raise end[0]
        yield {"done": True, "broken": end[0]}

    def close(self):
        self.closed, self.running = self.closed + 1, False


def timed(job):
    figures = {"status": "ok", "gate": {"passed": True}, "tflops": 1.0, "gb_s": 1.0}
    return blank_row(job) | figures | {"forward_backward_ms": {"median": 2.0, "spread": 0.1, "n": 20}}


def with_worker(tiny_data, tmp_path, *ends):
    bench = Run(request(tiny_data, ops=["norm"], tokens=[256]), tmp_path / "a.json", say=print, about=ABOUT)
    bench.worker = FakeWorker(*ends)
    return bench.run()["rows"], bench.worker


def test_a_row_that_takes_too_long_is_skipped_and_the_next_has_a_new_process(tiny_data, tmp_path):
    rows, worker = with_worker(tiny_data, tmp_path, Ended("not finished after 60 s", late=True))
    assert [row["status"] for row in rows] == ["skipped", "ok", "ok"] and worker.opened == 2
    assert rows[0]["reason"] == "not finished after 60 s; alone: dwslm bench norm --engines a --tokens 256"


def test_a_crash_is_an_error_with_the_last_words(tiny_data, tmp_path):
    rows, worker = with_worker(tiny_data, tmp_path, Ended("the measuring process ended with code -11: bad kernel"))
    assert [row["status"] for row in rows] == ["error", "ok", "ok"] and worker.opened == 2
    assert "code -11: bad kernel" in rows[0]["reason"]


def test_what_was_timed_is_kept_when_the_recording_takes_the_process_with_it(tiny_data, tmp_path):
    rows, worker = with_worker(tiny_data, tmp_path, (Ended("the measuring process ended with code -6"),))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok"] and worker.opened == 2
    assert rows[0]["record"]["status"] == "fails" and "code -6" in rows[0]["record"]["reason"]
    assert rows[0]["forward_backward_ms"]["median"] == 2.0


def test_a_device_that_is_left_broken_is_opened_again(tiny_data, tmp_path):
    rows, worker = with_worker(tiny_data, tmp_path, ("an illegal memory access",))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok"] and worker.opened == 2 and worker.closed == 2


def test_moved_cache_files_and_folders_are_in_the_document(tiny_data, tmp_path):
    moved = [Moved(tmp_path / "cache" / "a", tmp_path / "aside" / "a", ["kernel.cubin"])]
    bench = Run(
        request(tiny_data),
        tmp_path / "a.json",
        say=print,
        about=ABOUT,
        cache=([tmp_path / "cache"], moved),
        inline=True,
    )
    assert bench.document["stability"]["cache"] == {
        "folders": [str(tmp_path / "cache")],
        "moved_aside": [{"from": str(moved[0].source), "to": str(moved[0].target), "empty": ["kernel.cubin"]}],
    }


def test_the_clock_of_a_row_is_that_of_the_working_gpu():
    def sample(mhz, reasons):
        return Sample(0.0, 1.0, mhz, 1, reasons)

    assert working_clock([sample(345, 1), sample(345, 1), sample(345, 1), sample(1700, 4), sample(1755, 0)]) == 1755
    assert working_clock([sample(345, 1)]) is None and working_clock([]) is None


def test_no_engine_of_that_name(tiny_data, tmp_path):
    with pytest.raises(ValueError, match="no engine of that name"):
        run(tiny_data, tmp_path / "a.json", ops=["norm"], engines=["nothing"])


def test_a_line_tells_what_was_measured(document):
    row = next(row for row in document[0]["rows"] if row["status"] == "ok" and row["op"] == "delta_rule")
    text = line(row)
    assert text.startswith("delta_rule, kda, torch, 256 tokens, context 256, 1 heads: ")
    assert f"{row['forward_backward_ms']['median']:.3f} ms" in text
    recorded = {"status": "ok", "recorded_ms": {"median": 1.0}, "launched_ms": {"median": 2.0}}
    assert "recorded: ok, 2.000 -> 1.000 ms" in line(row | {"record": recorded})


def test_the_shape_of_the_main_model_is_what_is_measured_on_a_gpu():
    shape = Request(data="x", seed=0).shape(32_768)
    assert dataclasses.asdict(shape) == {
        "width": 1024, "heads": 8, "kv_heads": 2, "head_dim": 128, "window": 512, "delta_heads": (8, 16),
            "delta_gate_rank": 128,
        "mlp_hidden": 4096, "softcap": 20.0, "vocab_size": 32_768, "layers": 20, "global_layers": 5,
    }  # fmt: skip
