"""The attention residuals' case: what it counts, and that its gate sees a mixing which is not the softmax's."""

import torch

from dwslm.bench import depth_mix
from dwslm.bench.case import Engine
from dwslm.bench.gate import check
from dwslm.bench.step_floor import depth_passes
from tests.bench.test_costs import work
from tests.bench.tiny import ARGUMENTS


def test_counts_what_the_floor_of_a_step_counts():
    cost = depth_mix.cost(work(100, 100, [0, 100]), 64, torch.bfloat16)
    row = 100 * 64 * 2
    # Readers 0 to 8 in blocks of 4 see 1, 2 2 2 2, 3 3 3 3 sources.
    assert cost.forward_bytes == row * (21 + 9)
    assert cost.bytes == row * depth_passes(depth_mix.SUBLAYERS // 2, depth_mix.BLOCK)


def test_the_gate_passes_the_softmax_and_fails_the_average():
    (case,) = depth_mix.cases(*ARGUMENTS)
    engine = Engine("torch", lambda: case.plain)

    def averaged(inputs, segments):
        *rows, queries, gains, norms = inputs
        return case.plain([*rows, 0 * queries, gains, norms], segments)

    def gate(run):
        return check(case, engine, run, tokens=8, context=8, generator=torch.Generator().manual_seed(1))

    assert gate(case.plain).passed
    assert any(reason.startswith("x1 misses float32") for reason in gate(averaged).reasons)
