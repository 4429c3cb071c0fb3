"""Ownership among ranks: who updates what, and that any number of ranks takes the step that one takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dwslm.optim.groups import MATRIX_RULES, Block, route
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.shares import ALIGNMENT, LEAST_ROWS_ELEMENTS, cut, deal, join, lay_out, mail_bytes, make_mail
from tests.optim.rank_threads import ThreadRanks, on_ranks
from tests.optim.small_model import (
    ROLES,
    SETTINGS,
    assert_equal,
    everything,
    optimizer,
    parameters,
    set_gradients,
)

WORLDS = [2, 3, 4, 8, 20]  # 6 matrices and 6 vectors and tables: with 20 ranks some own nothing


def blocks_of(rows: int, columns: int = 8, rule: str = "adam", count: int = 1) -> list[Block]:
    return [
        Block(f"w{n}", f"w{n}", 0, (rows, columns), "embedding", rule, 1.0, 0.0, in_place=True) for n in range(count)
    ]


# ---- dealing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_every_row_of_every_block_is_dealt_once_and_matrices_stay_whole(world):
    blocks = [*route(parameters(), ROLES, SETTINGS["muonh"]), *blocks_of(8192, count=2)]
    shares = deal(blocks, world)
    assert len(shares) == world
    owned = [piece for share in shares for piece in share]
    for block in blocks:
        pieces = sorted((p for p in owned if p.name.partition("@")[0] == block.name), key=lambda p: p.start)
        if block.rule in MATRIX_RULES:
            assert pieces == [block]
        rows = [row for p in pieces for row in range(p.start, p.start + (p.shape[0] if p.shape else 1))]
        assert rows == list(range(block.start, block.start + (block.shape[0] if block.shape else 1)))
    assert len({piece.name for piece in owned}) == len(owned)


def test_a_table_is_cut_by_rows_where_that_is_worth_it():
    [table] = blocks_of(8192)
    assert [(p.name, p.start, p.shape) for p in cut(table, 3)] == [
        ("w0@0", 0, (2730, 8)), ("w0@2730", 2730, (2731, 8)), ("w0@5461", 5461, (2731, 8))
    ]  # fmt: skip
    [small] = blocks_of(LEAST_ROWS_ELEMENTS // 8)  # of 8 columns
    assert cut(small, 2) == [small] and cut(small, 3) == [small]
    [few] = blocks_of(3, columns=10**6)
    assert cut(few, 4) == [few]
    [matrix] = blocks_of(8192, rule="muonh")
    assert cut(matrix, 4) == [matrix]


@pytest.mark.parametrize(("world", "uneven"), [(2, 1.1), (4, 1.2), (8, 1.5)])
def test_the_main_models_shares_are_even(world, uneven):
    """About the main model's blocks; `uneven` is how much more than the mean the largest share may hold, which is padded to."""
    shapes = [(1024, 1024)] * 80 + [(4096, 1024)] * 20 + [(1024, 4096)] * 20 + [(256, 1024)] * 10
    matrices = [Block(f"m{n}", f"m{n}", 0, s, "matrix", "muonh", 1.0, 0.0, False) for n, s in enumerate(shapes)]
    head = Block("head", "head", 0, (32768, 1024), "head", "adamh", 1.0, 0.0, False)
    tables = [Block(f"t{n}", f"t{n}", 0, (32768, 256), "embedding", "adam", 0.1, 0.0, True) for n in range(9)]
    shares = deal([*matrices, head, *tables], world)

    def elements(blocks: list[Block]) -> int:
        return sum(torch.Size(block.shape).numel() for block in blocks)

    whole = sum(elements(share) for share in shares)
    assert max(elements(share) for share in shares) <= uneven * whole / world
    orthogonal = [elements([b for b in share if b.rule == "muonh"]) for share in shares]
    assert max(orthogonal) <= 1.2 * sum(orthogonal) / world  # the slowest rank orthogonalises little more than its part


def test_a_layout_keeps_blocks_apart_and_aligned():
    blocks = [*route(parameters(), ROLES, SETTINGS["muonh"]), *blocks_of(100, 7, count=3)]
    groups, size = lay_out(blocks)
    taken = torch.zeros(size, dtype=torch.int64)
    for of_group, start, begins, _ in groups:
        assert start % ALIGNMENT == 0
        for block, begin in zip(of_group, begins, strict=True):
            taken[start + begin : start + begin + torch.Size(block.shape).numel()] += 1
    assert taken.max() == 1 and taken.sum() == sum(torch.Size(block.shape).numel() for block in blocks)


# ---- the same step on any number of ranks ---------------------------------------------------------------------


def on_one(rule: str, dtype: torch.dtype, steps: int, world: int, bad: bool = False) -> dict[str, Tensor]:
    """One process that accumulates what `world` ranks would have."""
    one = optimizer(parameters(dtype), SETTINGS[rule])
    for step in range(steps):
        for rank in range(world):
            set_gradients(one.params, seed=100 * step + rank)
            if bad and step == 1 and rank == world - 1:
                one.params["out"].grad[0, 0] = torch.nan
            one.accumulate()
        norm = one.step(0.02)
    return everything(one) | {"norm": norm}


def work(rule: str, dtype: torch.dtype, steps: int, bad: bool = False):
    def of_rank(ranks: ThreadRanks) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        opt = optimizer(parameters(dtype), SETTINGS[rule], ranks=ranks)
        for step in range(steps):
            set_gradients(opt.params, seed=100 * step + ranks.rank)
            if bad and step == 1 and ranks.rank == ranks.world - 1:
                opt.params["out"].grad[0, 0] = torch.nan
            opt.accumulate()
            norm = opt.step(0.02)
        copies = {f"compute {name}": p.detach().clone() for name, p in opt.params.items()}
        return copies | opt.weights() | {"norm": norm}, opt.state(), len(opt.owned)

    return of_rank


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rule", list(SETTINGS))
def test_any_number_of_ranks_takes_the_step_of_one(rule, world):
    alone = on_one(rule, torch.bfloat16, 3, world)
    results = on_ranks(world, work(rule, torch.bfloat16, 3))
    state = join([own for _, own, _ in results])
    found = results[0][0] | state
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        # Float32 sums in another order; a bfloat16 copy may round the other way.
        tolerance = 2**-7 if tensor.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    for copies, _, _ in results[1:]:
        assert_equal(copies, results[0][0])  # every rank has the same model, bit for bit
    assert (min(owned for _, _, owned in results) == 0) == (world == 20)


def test_two_ranks_are_one_that_accumulates_twice_bit_for_bit():
    """Two numbers have one order of summation; only the norm's sum is grouped otherwise, and clipping by it is off here."""
    import dataclasses

    settings = dataclasses.replace(SETTINGS["muonh"], clip=None)
    one = optimizer(parameters(), settings)

    def of_rank(ranks: ThreadRanks) -> dict[str, Tensor]:
        opt = optimizer(parameters(), settings, ranks=ranks)
        for step in range(4):
            set_gradients(opt.params, seed=100 * step + ranks.rank)
            opt.accumulate()
            opt.step(0.02)
        return opt.weights()

    for step in range(4):
        for rank in range(2):
            set_gradients(one.params, seed=100 * step + rank)
            one.accumulate()
        one.step(0.02)
    first, second = on_ranks(2, of_rank)
    assert_equal(first, one.weights())
    assert_equal(second, one.weights())


@pytest.mark.parametrize("world", [2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(world):
    alone = on_one("muonh", torch.float32, 2, world, bad=True)
    results = on_ranks(world, work("muonh", torch.float32, 2, bad=True))
    state = join([own for _, own, _ in results])
    assert int(state["skipped"]) == int(alone["skipped"]) == 1 and int(state["step"]) == 1
    for name in SHAPED:
        torch.testing.assert_close(results[-1][0][name], alone[name], rtol=2e-5, atol=2e-5)


Sizes = list[tuple[tuple[int, int], int, torch.dtype]]


def assert_one_step_is_that_of_one(sizes: Sizes, world: int) -> None:
    """One step of matrices of these shapes, counts and dtypes: by `world` ranks, all with the same copies, and by one."""
    made = {
        f"m{n}-{k}": torch.randn(shape, generator=torch.Generator().manual_seed(100 * n + k)).to(dtype)
        for n, (shape, count, dtype) in enumerate(sizes)
        for k in range(count)
    }
    roles = {name: [("", len(tensor), "matrix")] for name, tensor in made.items()}

    def step(ranks: ThreadRanks | None, seeds: list[int]) -> dict[str, Tensor]:
        params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in made.items()}
        opt = Optimizer(params, roles, SETTINGS["muonh"], lr=0.02, ranks=ranks)
        for seed in seeds:
            set_gradients(params, seed)
            opt.accumulate()
        opt.step(0.02)
        return {name: p.detach().clone() for name, p in params.items()}

    alone = step(None, list(range(world)))
    results = on_ranks(world, lambda ranks: step(ranks, [ranks.rank]))
    for copies in results:
        assert_equal(copies, results[0])
    for name, tensor in alone.items():
        tolerance = 2**-7 if tensor.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(results[0][name], tensor, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("count", "world"), [(3, 2), (5, 2), (8, 2), (15, 2), (3, 3), (7, 4)])
def test_copies_take_more_room_than_a_stack_of_odd_sizes(count, world):
    """20 x 50 is no multiple of 32 elements: a stack has no gaps, and an exchange has one after each matrix."""
    assert_one_step_is_that_of_one([((20, 50), count, torch.float32)], world)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SOME = st.lists(
    st.tuples(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 6), DTYPES), min_size=1, max_size=3
)


@settings(max_examples=30, deadline=None)
@given(SOME, st.integers(2, 5))
def test_any_sizes_and_dtypes_are_exchanged_whole(sizes, world):
    assert_one_step_is_that_of_one(sizes, world)


def test_memory_that_is_too_short_for_the_copies_is_an_error():
    params = {f"w{n}": torch.nn.Parameter(torch.zeros(20, 50)) for n in range(3)}
    shares = deal(blocks_of(20, 50, rule="muonh", count=3), 2)
    needed = mail_bytes(shares, params)
    assert needed == 2 * 2 * 1024 * 4  # two ranks, the larger share of two, 1000 elements each that are padded to 1024
    make_mail(shares, 0, params, torch.zeros(needed // 4))
    with pytest.raises(AssertionError, match=f"{needed - 4} bytes for copies that need {needed}"):
        make_mail(shares, 0, params, torch.zeros(needed // 4 - 1))


SHAPED = ("out", "qkv", "head", "embedding", "gain")


def test_a_step_that_one_rank_does_not_allow_is_taken_by_none():
    def of_rank(ranks: ThreadRanks) -> dict[str, Tensor]:
        opt = optimizer(parameters(), ranks=ranks)
        set_gradients(opt.params, seed=ranks.rank)
        opt.accumulate()
        opt.step(0.02, allowed=torch.tensor(ranks.rank != 1))
        assert not opt.accepted and int(opt.skipped) == 1
        return opt.weights()

    for weights in on_ranks(3, of_rank):
        assert_equal(weights, optimizer(parameters()).weights())


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 20)])
def test_state_of_any_number_of_ranks_is_dealt_to_any_other(before, after):
    """Weights, momentum, moments, radii and counts of a run on `before` ranks, continued on `after`, and back again."""

    def begin(ranks: ThreadRanks | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        opt = optimizer(parameters(torch.bfloat16), ranks=ranks)
        for step in range(2):
            set_gradients(opt.params, seed=step)
            opt.accumulate()
            opt.step(0.02)
        return opt.weights(), opt.state()

    def go_on(weights: dict[str, Tensor], state: dict[str, Tensor]):
        def of_rank(ranks: ThreadRanks | None) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
            opt = optimizer(parameters(torch.bfloat16, seed=7), ranks=ranks)
            set_gradients(opt.params, seed=99)
            opt.accumulate()  # dropped by load
            opt.load(weights, state)
            assert all(torch.equal(p, weights[name].to(p.dtype)) for name, p in opt.params.items())
            first, second = opt.weights(), opt.state()
            if ranks is None or ranks.rank == 0:
                set_gradients(opt.params, seed=5)
            else:
                set_gradients(opt.params, seed=5, scale=0.0)
            opt.accumulate()
            opt.step(0.02)
            return first, second, opt.weights()

        return of_rank

    begun = [begin(None)] if before == 1 else on_ranks(before, begin)
    weights, state = begun[0][0], join([own for _, own in begun])
    alone = go_on(weights, state)(None)
    went_on = [alone] if after == 1 else on_ranks(after, go_on(weights, state))
    assert_equal(went_on[0][0], weights)
    assert_equal(join([own for _, own, _ in went_on]), state)
    for name, tensor in alone[2].items():
        torch.testing.assert_close(went_on[-1][2][name], tensor, rtol=2e-5, atol=2e-5, msg=name)


def test_a_long_tables_state_is_split_and_joined():
    params = {"table": torch.nn.Parameter(torch.randn(4096, 8)), "m": torch.nn.Parameter(torch.randn(8, 8))}
    roles = {"table": [("", 4096, "embedding")], "m": [("", 8, "matrix")]}
    from dwslm.optim.optimizer import Optimizer

    def of_rank(ranks: ThreadRanks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
        opt = Optimizer(mine, roles, SETTINGS["muonh"], lr=0.02, ranks=ranks)
        for name, p in mine.items():
            p.grad = (
                torch.full_like(p, 1.0 + ranks.rank) if name == "m" else torch.arange(4096.0)[:, None].expand(-1, 8)
            )
        opt.accumulate()
        opt.step(0.02)
        return opt.weights(), opt.state()

    (weights, first), (_, second) = on_ranks(2, of_rank)
    names = sorted(name for name in [*first, *second] if name.startswith("table"))
    assert names == ["table@0.exp_avg", "table@0.exp_avg_sq", "table@2048.exp_avg", "table@2048.exp_avg_sq"]
    whole = join([first, second])
    clip = 1 / float(
        torch.cat([(2 * torch.arange(4096.0))[:, None].expand(-1, 8).flatten(), torch.full((64,), 3.0)]).norm()
    )
    expected = (
        0.1 * 2 * torch.arange(4096.0)[:, None].expand(-1, 8) * clip
    )  # (1 - beta1) of the summed, clipped gradient
    torch.testing.assert_close(whole["table.exp_avg"], expected, rtol=1e-4, atol=1e-9)
    assert weights["table"].shape == (4096, 8)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([{"a@0.m": torch.zeros(4)}, {"a@5.m": torch.zeros(3)}], "rows 4 to 5 of a.m"),
        ([{"a@0.m": torch.zeros(4)}, {"a@0.m": torch.zeros(4)}], "rows 4 to 0 of a.m"),
        ([{"a.m": torch.zeros(4)}, {"a.m": torch.zeros(4)}], "a.m is in the files of two ranks"),
        ([{"a.m": torch.zeros(4)}, {"a@0.m": torch.zeros(4)}], "of a.m are in no rank's file, or in two"),
    ],
)
def test_state_that_does_not_fit_together_is_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        join(shares)


def test_one_rank_that_is_given_ranks_and_one_that_is_not_are_the_same():
    plain = optimizer(parameters())
    [of_ranks] = on_ranks(1, lambda ranks: optimizer(parameters(), ranks=ranks))
    assert [b.name for b in of_ranks.owned] == [b.name for b in plain.owned]
    assert of_ranks.gradient.shape == plain.gradient.shape
