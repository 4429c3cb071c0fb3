"""The GPU's record of a stretch: which operators a kernel belongs to, and that all time is accounted for once."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dwslm.bench.step_trace import Kernel, Op, carry_over, read_trace, share_out


def span(name, ts, dur, tid=1, dims=None, number=None, cat="cpu_op"):
    args = {} if dims is None else {"Input Dims": dims}
    args |= {} if number is None else {"External id": number}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 9, "args": args}


def launch(correlation, ts, tid=1, cat="cuda_runtime"):
    return {"ph": "X", "cat": cat, "name": "cudaLaunchKernel", "ts": ts, "dur": 1, "tid": tid, "pid": 9,
            "args": {"correlation": correlation}}  # fmt: skip


def work(name, correlation, ts, dur, cat="kernel", number=None):
    args = {"correlation": correlation} | ({} if number is None else {"External id": number})
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7, "pid": 0, "args": args}


def test_a_kernel_gets_the_operators_that_were_open_where_it_was_launched():
    events = [
        span("dwslm::update", 0, 100, cat="user_annotation"),
        span("aten::linear", 10, 30, dims=[[8, 4], [2, 4], []]),
        span("aten::mm", 12, 20, dims=[[8, 4], [4, 2]]),
        span("aten::add", 50, 10, dims=[[8, 2], [8, 2], []]),
        span("aten::mul", 11, 500, tid=2),  # another thread's
        launch(1, 15),
        launch(2, 36),  # in linear, after mm
        launch(3, 55, cat="cuda_driver"),
        launch(4, 101),  # after everything
        work("gemm", 1, 200, 40),
        work("bias", 2, 240, 5),
        work("adding", 3, 250, 5),
        work("alone", 4, 260, 5),
        work("Memset (Device)", 1, 190, 2, cat="gpu_memset"),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {}},
    ]
    found = read_trace(events)
    assert [kernel.name for kernel in found] == ["Memset (Device)", "gemm", "bias", "adding", "alone"]
    chains = [[op.name for op in kernel.ops] for kernel in found]
    assert chains[0] == chains[1] == ["aten::mm", "aten::linear", "dwslm::update"]
    assert chains[2] == ["aten::linear", "dwslm::update"]
    assert chains[3] == ["aten::add", "dwslm::update"]
    assert chains[4] == []
    assert found[1].ops[0].shapes == ((8, 4), (4, 2))
    assert found[3].ops[0].shapes == ((8, 2), (8, 2))  # numbers have no shape
    assert [kernel.kind for kernel in found[:2]] == ["memset", "kernel"]


def test_where_the_launch_is_not_recorded_the_trace_names_the_operator():
    events = [
        span("outer", 0, 50, number=1),
        span("aten::mm", 5, 5, number=2, dims=[[2, 3], [3, 4]]),
        work("gemm", 11, 100, 5, number=2),
        work("graph", 12, 110, 5, number=0),
    ]
    first, second = read_trace(events)
    assert [op.name for op in first.ops] == ["aten::mm", "outer"] and second.ops == ()


def test_a_trace_that_pytorch_writes_is_read_with_shapes_and_marks(tmp_path):
    """The host's half is real; a launch and its kernel are put where the product was."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, record_function("dwslm::update"):
        torch.ones(8, 4) @ torch.ones(4, 2)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    mm = next(event for event in events if event.get("name") == "aten::mm")
    events += [launch(1, mm["ts"] + mm["dur"] / 2, tid=mm["tid"]), work("gemm", 1, mm["ts"] + 10, 5)]
    (found,) = read_trace(events)
    assert [op.name for op in found.ops] == ["aten::mm", "aten::matmul", "dwslm::update"]
    assert found.ops[0] == Op("aten::mm", ((8, 4), (4, 2)))


def kernel(name, start, duration, *ops):
    return Kernel(name, "kernel", start, duration, tuple(Op(op) for op in ops))


def test_classes_and_idle_add_up_to_the_whole_stretch():
    kernels = [
        kernel("a", 0, 1000),
        kernel("b", 1200, 800),  # 200 us idle
        kernel("copy", 1500, 1000),  # 500 beside b, 500 alone
        kernel("a", 1600, 100),  # wholly beside others
        kernel("b", 2500, 500),
    ]
    shares = share_out(kernels, ["x", "y", "copies", "x", "y"])
    assert shares.wall == pytest.approx(3.0) and shares.idle == pytest.approx(0.2)
    assert shares.classes == pytest.approx({"x": 1.0, "y": 1.3, "copies": 0.5})
    assert sum(shares.classes.values()) + shares.idle == pytest.approx(shares.wall)
    assert shares.overlapped == pytest.approx(0.6)
    assert shares.kernels["x", "a"] == (pytest.approx(1.0), 2)
    assert sum(ms for ms, _ in shares.kernels.values()) == pytest.approx(sum(shares.classes.values()))


def test_nothing_takes_no_time():
    shares = share_out([], [])
    assert shares.wall == shares.idle == 0 and shares.classes == {}


def test_classes_are_carried_over_by_name_and_turn():
    known = [kernel("gemm", 0, 5), kernel("add", 5, 1), kernel("gemm", 6, 5)]
    classes = ["mlp up", "copies", "projections"]
    recorded = [kernel(name, i, 1) for i, name in enumerate(["gemm", "add", "gemm", "gemm", "add", "gemm", "new"])]
    assert carry_over(recorded, known, classes, lambda kernel: f"{kernel.name} alone") == [
        "mlp up", "copies", "projections", "mlp up", "copies", "projections", "new alone",
    ]  # fmt: skip


def test_where_counts_differ_the_class_that_took_most_time_has_the_name():
    known = [kernel("gemm", 0, 1), kernel("gemm", 1, 1), kernel("gemm", 2, 5)]
    recorded = [kernel("gemm", i, 1) for i in range(4)]
    assert carry_over(recorded, known, ["a", "a", "b"], str) == ["b"] * 4
