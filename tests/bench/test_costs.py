"""What a case costs at least, against counts made another way."""

import numpy as np
import pytest
import torch

from dwslm.bench import attention, delta_rule, elementwise, gates, head, mlp, newton_schulz, projection, short_conv
from dwslm.bench.case import Cost
from dwslm.bench.figures import blank_row, fill_figures
from dwslm.bench.request import Request
from dwslm.bench.timing import Stat
from dwslm.bench.work import Work

BF16 = torch.bfloat16
MAIN = Request(data="x", seed=0).shape(32_768)


def work(tokens, context, offsets):
    cu = np.array(offsets, dtype=np.int32)
    empty = np.zeros(0, dtype=np.int64)
    return Work(tokens, context, len(cu) - 1, [cu], [empty], empty, 0.0)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_visible_pairs_one_by_one(window):
    lengths = [1, 2, 7, 8, 9, 30]
    pairs = sum(
        1 for n in lengths for query in range(n) for key in range(query + 1) if window is None or query - key < window
    )
    assert attention.visible_pairs(lengths, window) == pairs


def test_attention_by_hand():
    """8 query and 2 key-value heads of 128, one segment of 4 tokens: 10 pairs."""
    cost = attention.cost(work(4, 4, [0, 4, 4]), MAIN, None, BF16)
    assert cost.forward_flop == 2 * 2 * 10 * 8 * 128
    assert cost.flop == cost.forward_flop * 3.5
    query, key = 4 * 8 * 128 * 2, 4 * 2 * 128 * 2
    assert cost.forward_bytes == 2 * query + 2 * key
    assert cost.bytes == cost.forward_bytes + (query + 2 * key) + 2 * query + (query + 2 * key)


def test_a_multi_layer_perceptron_is_twelve_operations_a_weight_pair_and_token():
    cost = mlp.cost(work(16_384, 4096, [0, 16_384]), 1024, 4096, BF16)
    # Six operations a parameter and token, 8.39M parameters: 0.82 TFLOP (the anchors' 5.24 ms at 65,536 are 630 TFLOP/s).
    assert cost.flop == 6 * 2 * 1024 * 4096 * 16_384
    assert 4 * cost.flop / 5.24e-3 == pytest.approx(630e12, rel=0.01)
    assert cost.forward_flop * 3 == cost.flop


def test_a_projection_is_three_products_that_share_their_tensors():
    cost = projection.cost(work(100, 100, [0, 100]), 1024, 3336, BF16)
    assert cost.flop == 3 * cost.forward_flop == 6 * 100 * 1024 * 3336
    x, y, weight = 2 * 100 * 1024, 2 * 100 * 3336, 2 * 1024 * 3336
    assert cost.forward_bytes == x + weight + y
    assert cost.bytes - cost.forward_bytes == (x + weight + y) + x + weight


def test_projections_are_those_of_the_main_model():
    """q, k, v, two ranks of 128 and beta of a KDA layer; q, k, v of a global one; both outputs."""
    assert [case.name for case in projection.cases(MAIN, BF16, torch.device("cpu"))] == [
        "1024-3336", "1024-1536", "1024-1024",
    ]  # fmt: skip


def test_the_head_is_three_products():
    """26.5 ms at 65,536 tokens are 499 TFLOP/s by the anchors' count."""
    cost = head.cost(work(65_536, 4096, [0, 65_536]), 1024, 32_768, BF16)
    assert cost.flop / 26.5e-3 == pytest.approx(499e12, rel=0.01)


def test_the_delta_rule_moves_each_tensor_once():
    cost = delta_rule.cost(work(65_536, 4096, [0, 65_536]), 8, 128, BF16, scalar=False)
    value, gate, beta = 65_536 * 1024 * 2, 65_536 * 1024 * 4, 65_536 * 8 * 4
    forward = 3 * value + gate + beta + value
    assert cost.forward_bytes == forward
    assert cost.bytes == forward + (4 * value + gate + beta) + (3 * value + gate + beta)
    # Less than the 3.5 GB and 0.35 TFLOP of an implementation that passes states through memory, and not by much.
    assert 2e9 < cost.bytes < 3.5e9
    assert 0.2e12 < cost.flop < 0.35e12
    half = delta_rule.cost(work(65_536, 4096, [0, 65_536]), 8, 128, BF16, scalar=False, decays=BF16)
    assert half.bytes == cost.bytes - 3 * gate // 2  # in twice, their gradient out
    scalar = delta_rule.cost(work(65_536, 4096, [0, 65_536]), 8, 128, BF16, scalar=True)
    assert scalar.bytes < cost.bytes and scalar.flop == cost.flop


def test_twice_the_heads_are_twice_the_work():
    some = work(1024, 512, [0, 1024])
    eight, sixteen = (delta_rule.cost(some, heads, 128, BF16, False) for heads in (8, 16))
    assert (sixteen.flop, sixteen.bytes) == (2 * eight.flop, 2 * eight.bytes)


def test_the_convolution_reads_and_writes_every_value_once_a_pass():
    cost = short_conv.cost(work(100, 100, [0, 100]), 3072, BF16)
    assert cost.forward_bytes == 2 * 100 * 3072 * 2
    assert cost.bytes == cost.forward_bytes + 3 * 100 * 3072 * 2


def test_gates_read_and_write_every_value_once_a_pass():
    """Eight heads of 128. Decay: 2 bytes in and 4 out forward, 4 and 2 in and 2 out backward. Norm: 2 in, 1 out; 3 in, 2 out."""
    some, values = work(100, 100, [0, 100]), 100 * 8 * 128
    decay, norm = (case.cost(some) for case in gates.cases(MAIN, BF16, torch.device("cpu")))
    assert (decay.forward_bytes, decay.bytes) == (6 * values, 14 * values)
    assert (norm.forward_bytes, norm.bytes) == (3 * 2 * values, 8 * 2 * values)


def test_addition_and_norm_read_and_write_every_value_once_a_pass():
    """Two in, two out; backward two gradients and the sum in, one gradient out."""
    (cost,) = (
        case.cost(work(100, 100, [0, 100])) for case in elementwise.residual_cases(MAIN, BF16, torch.device("cpu"))
    )
    assert (cost.forward_bytes, cost.bytes) == (4 * 2 * 100 * MAIN.width, 8 * 2 * 100 * MAIN.width)


def test_newton_schulz_by_its_products():
    m, n = 1024, 4096
    products = 2 * m * m * n + 2 * m * m * m + 2 * m * m * n
    assert newton_schulz.cost((20, 4096, 1024)).flop == 20 * 5 * products
    # Two symmetric forms of one stack cost the same.
    assert newton_schulz.cost((20, 4096, 1024)) == newton_schulz.cost((20, 1024, 4096))


def test_rates_and_floor_follow_from_cost_and_ceilings():
    row = blank_row(dict.fromkeys(("op", "case", "engine", "tokens", "context", "heads"))) | {"dtype": "bfloat16"}
    ceilings = {"copy_gb_s": {"median": 4000.0}, "bf16_tflops": {"median": 500.0}, "fp8_tflops": {"median": 1000.0}}
    cost = Cost(forward_flop=0.5e12, flop=2e12, forward_bytes=1e9, bytes=4e9)
    fill_figures(row, cost, Stat(2.0, 0.1, 20), Stat(8.0, 0.2, 20), ceilings)
    assert row["forward_tflops"] == 250 and row["tflops"] == 250 and row["gb_s"] == 500
    assert row["floor_ms"] == 4.0 and row["floor_share"] == 0.5  # 2e12 / 500e12 s is more than 4e9 / 4e12 s
    row["dtype"] = "float8_e4m3fn"
    fill_figures(row, cost, None, Stat(8.0, 0.2, 20), ceilings)
    assert row["floor_ms"] == 2.0
    fill_figures(row, Cost(0, 0, 0, 16e9), None, Stat(8.0, 0.2, 20), ceilings)
    assert row["floor_ms"] == 4.0


def test_a_floor_that_no_ceiling_gives_is_left_out():
    row = blank_row(dict.fromkeys(("op", "case", "engine", "tokens", "context", "heads"))) | {"dtype": "float8_e4m3fn"}
    ceilings = {"copy_gb_s": {"median": 40.0}, "float32_tflops": {"median": 0.1}, "fp8_tflops": None}
    fill_figures(row, Cost(1, 1, 1, 1), None, Stat(1.0, 0.0, 1), ceilings)
    assert row["floor_ms"] is None and row["floor_share"] is None and row["tflops"] is not None
