"""Training on paper: bytes and seconds against numbers worked out by hand, and shapes against the optimizer itself."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dwslm.model.lm import LanguageModel, ModelSettings
from dwslm.optim.groups import Block
from dwslm.optim.newton_schulz import newton_schulz
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.scale import (
    Assumed,
    Dealt,
    Model,
    Paper,
    expected_largest,
    largest_micro_batch,
    newton_schulz_flop,
)
from dwslm.train.scale_measured import Measured, Run, read_measured
from tests.optim.rank_threads import on_ranks

TINY = ModelSettings(layers=4, width=64, heads=2, kv_heads=1, head_dim=32, delta_heads=2, delta_head_dim=32,
                     delta_gate_rank=8, mlp_hidden=128)  # fmt: skip
MATRIX = 128 * 256  # elements
FLOP = 5 * (4 * 128 * 128 * 256 + 2 * 128**3)  # of one matrix


def eight_matrices() -> SimpleNamespace:
    """8 bfloat16 matrices of 128 x 256 under MuonH, 262,144 parameters."""
    blocks = [Block(f"m{n}", f"m{n}", 0, (128, 256), "matrix", "muonh", 1.0, 0.0, False) for n in range(8)]
    parameters = {block.name: torch.empty(128, 256, dtype=torch.bfloat16, device="meta") for block in blocks}
    return SimpleNamespace(blocks=blocks, parameters=parameters, steps=5, flop_per_token=6 * 8 * MATRIX)


def measured(*runs: Run) -> Measured:
    """Round numbers: 1e12 flop a second of Newton-Schulz, 1 ns an element, 100 GB/s of sums, 50 of copies."""
    return Measured(
        device="a GPU",
        source="made up",
        settings=(),
        micro_batch_seconds=0.25,
        newton_schulz_seconds=8 * FLOP / 1e12,
        elementwise_seconds=8 * MATRIX * 1e-9,
        copy_rate=1e12,
        scatter_rate=100e9,
        gather_rate=50e9,
        runs=runs,
    )


def paper(*runs: Run, **assumed) -> Paper:
    return Paper(measured(*runs), eight_matrices(), 1000, Assumed(**{"hop": 0.0, **assumed}))


# ---- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "share", "scatter", "gather", "empty"),
    [
        (1, 8, 0, 0, 0),
        (2, 4, 4 * 131_072, 2 * 131_072, 0),  # 4 P (n-1)/n and 2 P (n-1)/n of P = 262,144
        (4, 2, 4 * 196_608, 2 * 196_608, 0),
        (8, 1, 4 * 229_376, 2 * 229_376, 0),
        (16, 1, 4 * 15 * MATRIX, 2 * 15 * MATRIX, 8),  # half of them own nothing, and everyone pads for them
        (3, 3, 4 * 2 * 3 * MATRIX, 2 * 2 * 3 * MATRIX, 0),  # 3 + 3 + 2
    ],
)
def test_bytes_through_a_rank(world, share, scatter, gather, empty):
    dealt = Dealt(eight_matrices(), world)
    assert dealt.share == share * MATRIX
    assert (dealt.scatter_bytes, dealt.gather_bytes, dealt.empty) == (scatter, gather, empty)
    assert dealt.without_matrix == empty
    assert dealt.uneven == pytest.approx(share * world / 8)
    assert dealt.buffer == 4 * world * share * MATRIX
    # Copies and their gradients, the buffer, master, momentum and direction, and a radius of 4 bytes.
    assert dealt.held == 2 * 2 * 8 * MATRIX + dealt.buffer + share * (12 * MATRIX + 4)


@pytest.mark.parametrize("world", [2, 3, 20])
def test_shares_are_those_that_the_optimizer_makes(world):
    dealt = Dealt(Model(TINY, OptimSettings(), 64), world)

    def sizes(ranks):
        model = LanguageModel(TINY, 64)
        optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01, ranks=ranks)
        storage = optimizer.gradient.untyped_storage().nbytes()
        return optimizer.gradient.numel(), storage, sum(mail.flat.nbytes for mail in optimizer._mail)

    for elements, storage, copies in on_ranks(world, sizes):
        assert elements == world * dealt.share
        assert storage == dealt.buffer
        assert copies == world * sum(dealt.sent)


@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (64, 64)])
def test_newton_schulz_is_counted_as_pytorch_counts_it(shape):
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(3, *shape), engine="plain")
    assert 3 * newton_schulz_flop(shape, 5) == counter.get_total_flops()


# ---- seconds ------------------------------------------------------------------------------------------------


def test_one_rank_sends_nothing_and_is_its_own_pieces():
    model = eight_matrices()
    step = paper().step(model, Dealt(model, 1), 1, 1000, 4)
    assert (step.scatter, step.gather, step.exchange, step.lag) == (0, 0, 0, 0)
    assert step.compute == pytest.approx(4 * 0.25)
    assert step.update == pytest.approx(8 * FLOP / 1e12 + 8 * MATRIX * 1e-9)
    assert step.tokens_per_second == pytest.approx(4000 / (step.compute + step.update))


def test_two_ranks():
    model = eight_matrices()
    step = paper().step(model, Dealt(model, 2), 2, 1000, 2)
    assert step.scatter == pytest.approx(524_288 / 100e9)
    assert step.gather == pytest.approx(262_144 / 50e9)
    # Half of the matrices; then 1 MiB of sums is cleared, and 0.5 MiB of copies read and written.
    assert step.update == pytest.approx(4 * FLOP / 1e12 + 4 * MATRIX * 1e-9 + (2**20 + 2 * 2**19) / 1e12)
    assert step.compute == pytest.approx(0.5) and step.tokens == 4000
    assert step.seconds == pytest.approx(step.compute + step.scatter + step.gather + step.update)


def test_hops_are_counted():
    model = eight_matrices()
    with_hops, without = (paper(hop=hop, node=16).step(model, Dealt(model, 16), 16, 1000, 1) for hop in (1e-6, 0.0))
    # 15 around the ring, and two small sums up and down a tree of 4 levels; one dtype of copies.
    assert with_hops.scatter - without.scatter == pytest.approx((15 + 2 * 2 * 4) * 1e-6)
    assert with_hops.gather - without.gather == pytest.approx(15e-6)


def test_more_ranks_than_matrices_take_as_long_as_one_matrix_and_send_more():
    model, p = eight_matrices(), paper(node=64)
    eight, many = (p.step(model, Dealt(model, n), n, 1000, 1) for n in (8, 64))
    one = FLOP / 1e12 + MATRIX * 1e-9
    assert eight.update == pytest.approx(one + (8 * MATRIX * 4 + 2 * 8 * MATRIX * 2) / 1e12)
    assert many.update == pytest.approx(one + (64 * MATRIX * 4 + 2 * 8 * MATRIX * 2) / 1e12)
    assert many.scatter / eight.scatter == pytest.approx(63 / 7)


def test_a_ring_over_machines_is_as_slow_as_their_adapters_together():
    model = eight_matrices()
    dealt = Dealt(model, 16)
    slow = paper(node=8, network=5e9).step(model, dealt, 16, 1000, 1)  # 40 GB/s out of a machine
    assert slow.scatter == pytest.approx(dealt.scatter_bytes / 40e9)
    assert slow.gather == pytest.approx(dealt.gather_bytes / 40e9)
    fast = paper(node=8, network=50e9).step(model, dealt, 16, 1000, 1)
    assert fast.scatter == pytest.approx(dealt.scatter_bytes / 100e9)


def test_shares_within_a_machine_are_added_up_between_machines():
    model = eight_matrices()
    dealt = Dealt(model, 8)
    step = paper(node=8, network=5e9).step(model, dealt, 32, 1000, 1)
    # An all-reduce of one matrix's float32 sums over 4 machines through one adapter each.
    between = 2 * 3 / 4 * 4 * MATRIX / 5e9
    assert step.scatter == pytest.approx(dealt.scatter_bytes / 100e9 + between)
    assert step.gather == pytest.approx(dealt.gather_bytes / 50e9)
    with pytest.raises(ValueError, match="shares among 16 of 32 ranks, 8 on a machine"):
        paper(node=8).step(model, Dealt(model, 16), 32, 1000, 1)


def test_lag_is_what_was_seen_and_grows_slowly():
    run = Run(ranks=2, tokens_per_second=1.0, rank_seconds=(1.0, 1.1))
    p = paper(Run(ranks=1, tokens_per_second=1.0), run)
    assert p.lag(1) == 0 and p.lag(2) == pytest.approx(1.1 / 1.05 - 1)
    assert p.lag(2) < p.lag(8) < p.lag(512) < 6 * p.lag(2)
    assert paper().lag(8) == 0
    model = eight_matrices()
    step = p.step(model, Dealt(model, 2), 2, 1000, 2)
    assert step.lag == pytest.approx(0.5 * (1.1 / 1.05 - 1))


def test_the_largest_of_normal_draws():
    draws = torch.randn(20_000, 100, generator=torch.Generator().manual_seed(0))
    for n in (2, 8, 100):
        assert expected_largest(n) == pytest.approx(draws[:, :n].amax(1).mean().item(), abs=0.04)


def test_the_largest_micro_batch_that_fits():
    model = Model(TINY, OptimSettings(), 64)
    dealt = Dealt(model, 2)
    need = dealt.held + model.activations(8_192)
    sizes = [12_288, 8_192, 6_144]
    assert largest_micro_batch(model, dealt, sizes, need) == 8_192
    assert largest_micro_batch(model, dealt, sizes, need - 1) == 6_144
    assert largest_micro_batch(model, dealt, sizes, dealt.held) is None
    assert largest_micro_batch(model, dealt, [], need) is None


def test_a_measured_model_without_newton_schulz_is_refused():
    model = Model(TINY, OptimSettings(matrices="adamw", head="adam", lr=0.01), 64)
    with pytest.raises(ValueError, match=r"measured model: without Newton-Schulz .* optim.matrices=muonh"):
        Paper(measured(), model, 1000, Assumed())


# ---- the file of measurements -------------------------------------------------------------------------------

FILE = {
    "device": "a GPU", "source": "made up", "settings": ["experiment=main"], "micro_batch_seconds": 0.25,
    "newton_schulz_seconds": 0.01, "elementwise_seconds": 0.01, "copy_rate": 4e12, "scatter_rate": 3e11, "gather_rate": 3e11,
    "runs": [
        {"ranks": 1, "tokens_per_second": 2e5},
        {"ranks": 2, "tokens_per_second": 4e5, "rank_seconds": [1, 1.5], "gather_seconds": None},
    ],
}  # fmt: skip


def test_measurements_are_read(tmp_path):
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(FILE))
    found = read_measured(file)
    assert found.settings == ("experiment=main",) and found.copy_rate == 4e12
    assert found.runs == (Run(1, 2e5), replace(Run(2, 4e5), rank_seconds=(1.0, 1.5)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"copy_rate": 0}, "copy_rate is 0: must be a number above 0"),
        ({"copy_rate": float("inf")}, "copy_rate is Infinity"),
        ({"device": 1}, "device is 1: must be a text"),
        ({"settings": "experiment=main"}, "settings is .* must be a list"),
        ({"settings": [1]}, r"settings\[0\] is 1: must be a text"),
        ({"speed": 1}, "unknown name speed"),
        ({"runs": [{"ranks": 2}]}, r"runs\[0\]: tokens_per_second is missing"),
        ({"runs": [{"ranks": True, "tokens_per_second": 1}]}, "ranks is true: must be a whole number above 0"),
        ({"runs": [{"ranks": 2, "tokens_per_second": 1, "rank_seconds": [1]}]}, "has 1 numbers for 2 ranks"),
        ({"runs": [{"ranks": 2, "tokens_per_second": 1, "gather_seconds": -1}]}, "must be a number above 0 or null"),
    ],
)
def test_what_is_wrong_with_measurements_is_named(tmp_path, change, said):
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(FILE | change))
    with pytest.raises(ValueError, match=said) as raised:
        read_measured(file)
    assert str(raised.value).startswith(str(file))


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: .*No such file"):
        read_measured(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"device"')
    with pytest.raises(ValueError, match=r"half\.json"):
        read_measured(tmp_path / "half.json")
