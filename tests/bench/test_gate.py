"""The gate passes what is right and catches each way of being wrong, before anything is timed."""

import math

import pytest
import torch

from dwslm.bench.case import FLOAT32_BOUND, Engine
from dwslm.bench.gate import SPARE, awkward, check_plain, check_size, make_truth, relative_error
from dwslm.ops.segments import segments
from tests.bench.tiny import (
    CONTEXT,
    TOKENS,
    attention_case,
    conv_case,
    delta_case,
    gate,
    mlp_case,
    projection_case,
    right,
    window_case,
)

CASES = [attention_case, window_case, delta_case, conv_case, mlp_case, projection_case]
PACKED = CASES[:-2]


@pytest.mark.parametrize("make", CASES)
def test_a_right_engine_passes(make):
    case = make()
    found = gate(case, right(case))
    assert found.passed, found.reasons
    learnt = {f"d{name}" for name, yes in zip(case.inputs, case.learnt, strict=True) if yes}
    assert set(found.errors) == {*case.outputs, *learnt}
    assert all(error["value"] <= FLOAT32_BOUND for error in found.errors.values())
    assert found.checks == dict.fromkeys(["twice", "neighbour", "prefix"] if case.packed else ["twice"], True)


@pytest.mark.parametrize("make", PACKED)
def test_a_wrong_boundary_is_caught(make):
    case = make()
    run = right(case)

    def broken(inputs, seg):
        # One boundary further to the right, as an off-by-one in a kernel would have it.
        moved = seg.cu_seqlens.clone()
        moved[4] = min(moved[4] + 1, moved[5])
        return run(inputs, segments(moved, seg.ids.shape[0], seg.context))

    found = gate(case, broken)
    assert not found.passed
    assert "misses float32" in found.reasons[0]


@pytest.mark.parametrize("make", PACKED)
def test_ignored_boundaries_are_caught(make):
    case = make()
    run = right(case)

    def broken(inputs, seg):
        total = seg.ids.shape[0]
        rows = torch.arange(0, total + 1, seg.context, dtype=torch.int32)
        return run(inputs, segments(rows, total, seg.context))

    assert not gate(case, broken).passed


@pytest.mark.parametrize("make", CASES)
def test_a_dropped_gradient_is_caught(make):
    case = make()
    run = right(case)

    def cut(inputs, seg):
        return run([inputs[0], inputs[1].detach(), *inputs[2:]], seg)

    found = gate(case, cut)
    assert any(f"d{case.inputs[1]}: there is no such gradient" in reason for reason in found.reasons)
    assert found.errors[f"d{case.inputs[1]}"]["value"] is None  # JSON knows no infinity

    def zeroed(inputs, seg):
        return run([inputs[0], inputs[1].detach() + 0 * inputs[1], *inputs[2:]], seg)

    assert any(reason.startswith(f"d{case.inputs[1]} misses") for reason in gate(case, zeroed).reasons)


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("scale", [1.02, 0.98, -1.0])
def test_a_scaled_output_is_caught(make, scale):
    case = make()
    run = right(case)
    engine = Engine("under test", lambda: run, bounds={"dq": 0.01, case.outputs[0]: 0.01}, same_bits=False)
    found = gate(case, lambda inputs, seg: tuple(scale * y for y in run(inputs, seg)), engine)
    assert not found.passed
    assert found.errors[case.outputs[0]]["value"] == pytest.approx(abs(scale - 1), rel=1e-3)


def test_a_part_that_is_never_written_is_caught():
    case = attention_case()
    run = right(case)

    def broken(inputs, seg):
        (out,) = run(inputs, seg)
        mask = torch.ones_like(out)
        mask[-1] = math.nan  # one token of fresh memory
        return (out * mask,)

    found = gate(case, broken)
    assert not found.passed
    assert found.errors["o"]["value"] is None


def test_a_look_at_later_tokens_is_caught_though_it_is_within_the_bound():
    case = attention_case()
    run = right(case)

    def broken(inputs, seg):
        (out,) = run(inputs, seg)
        return (out + 1e-6 * torch.roll(out.detach(), -1, 0),)

    found = gate(case, broken)
    assert found.checks["prefix"] is False
    assert any("later tokens changed earlier ones" in reason for reason in found.reasons)


def test_a_leak_from_a_neighbour_is_caught_though_it_is_within_the_bound():
    case = attention_case()
    run = right(case)

    def broken(inputs, seg):
        (out,) = run(inputs, seg)
        return (out + 1e-6 * out.detach().mean(),)

    found = gate(case, broken)
    assert found.checks["neighbour"] is False
    assert any("a changed neighbour changed o" in reason for reason in found.reasons)


def test_other_bits_the_second_time_fail_unless_the_library_has_no_other_mode():
    case = mlp_case()
    run = right(case)
    calls = []

    def unsteady(inputs, seg):
        calls.append(1)
        return tuple(y * (1 + 1e-6 * len(calls)) for y in run(inputs, seg))

    found = gate(case, unsteady)
    assert not found.passed and found.checks == {"twice": False}
    found = gate(case, unsteady, Engine("under test", lambda: run, repeatable=False))
    assert found.passed and found.checks == {"twice": False}
    assert "two calls differ" in found.notes[0]


def test_the_checks_on_bits_run_in_the_given_context():
    case, entered = mlp_case(), []

    class Exact:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.append(False)

    from dwslm.bench.gate import check

    run = right(case)
    generator = torch.Generator().manual_seed(0)
    check(case, Engine("x", lambda: run), run, tokens=16, context=16, generator=generator, exact=Exact)
    assert entered == [True, False]


def test_boundaries_of_the_gate_hold_every_awkward_kind():
    for seed in range(20):
        offsets = awkward(TOKENS, CONTEXT, torch.Generator().manual_seed(seed))
        sizes = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
        assert offsets[0] == 0 and offsets[-1] == TOKENS and min(sizes) == 0
        assert sizes.count(0) >= 2 + SPARE  # inside a row too, and at the end
        assert 1 in sizes and CONTEXT in sizes
        assert len({size for size in sizes if 1 < size < CONTEXT}) >= 2
        assert all(row in offsets for row in range(0, TOKENS + 1, CONTEXT))


def test_inputs_are_fresh_for_every_seed():
    case = attention_case()
    one, two = (make_truth(case, "random", 16, 16, torch.Generator().manual_seed(s)).inputs[0] for s in (1, 2))
    assert not torch.equal(one, two)


def test_relative_error_by_hand():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.25]), torch.tensor([0.0])) == 0.25
    assert relative_error(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf


@pytest.mark.parametrize("make", PACKED)
def test_the_plain_form_is_held_to_the_reference_and_is_then_a_truth_for_larger_sizes(make):
    case = make()
    trial = make_truth(case, case.kinds[0], TOKENS, CONTEXT, torch.Generator().manual_seed(0))
    assert check_plain(case, trial) is None
    seg = segments(torch.tensor([0, 50, 64, 100, 128, 128], dtype=torch.int32), 128, 64)
    truth = make_truth(case, case.kinds[0], 128, 64, torch.Generator().manual_seed(1), seg)
    found = {}
    run = right(case)
    engine = Engine("under test", lambda: run)
    assert check_size(case, engine, run, truth, found) == []
    assert found["size"]["passed"] and found["size"]["tokens"] == 128

    def wrong_beyond_a_hundred_tokens(inputs, seg):
        return tuple(torch.cat([y[:100], y[100:] * 1.1]) for y in run(inputs, seg))

    reasons = check_size(case, engine, wrong_beyond_a_hundred_tokens, truth, found)
    assert reasons and reasons[0].startswith("at 128 tokens")
    assert not found["size"]["passed"]
