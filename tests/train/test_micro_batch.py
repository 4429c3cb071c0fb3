"""Which micro-batches a plan allows and which of them fits, against sizes worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dwslm.data.packing_settings import Rung
from dwslm.optim.settings import OptimSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.micro_batch import candidates, largest_that_fits
from dwslm.train.plan import Plan, make_plan
from dwslm.train.settings import TrainSettings

GB = 10**9
H200 = 150 * GB  # of which 135 may be filled


def plan(batch_tokens: int, context: int, ladder: tuple[Rung, ...] = (), world: int = 1) -> Plan:
    train = TrainSettings(tokens=10 * batch_tokens, batch_tokens=batch_tokens, micro_batch_tokens="auto")
    return make_plan(train, OptimSettings(lr=0.1), CheckpointSettings(), context, None, ladder, world)


@pytest.mark.parametrize(
    ("batch", "contexts", "world", "expected"),
    [
        (524_288, [4096], 1, [131_072, 65_536, 32_768, 16_384, 8192, 4096]),
        (524_288, [4096], 8, [65_536, 32_768, 16_384, 8192, 4096]),
        (524_288, [4096, 16_384], 8, [65_536, 32_768, 16_384]),
        (393_216, [4096], 1, [131_072, 98_304, 65_536, 49_152, 32_768, 24_576, 16_384, 12_288, 8192, 4096]),
        (1200, [100, 150], 2, [600, 300]),
        (524_288, [262_144], 1, [262_144]),  # one row is over the most that is of use
        (524_288, [4096], 3, []),
        (524_288, [4000], 1, []),
        (4096, [4096, 8192], 1, []),
    ],
)
def test_candidates(batch, contexts, world, expected):
    assert candidates(batch, contexts, world) == expected


@given(st.integers(1, 5000), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 8))
def test_candidates_are_all_that_a_plan_takes_and_no_others(batch, contexts, world):
    """The rules as `make_plan` states them, tried on every number."""
    taken = [n for n in range(1, batch + 1) if batch % (world * n) == 0 and all(n % slots == 0 for slots in contexts)]
    assert sorted(candidates(batch, contexts, world)) == taken


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [
        (150, 65_536),  # 10 + 65.536 of 135; twice the tokens would need 141.072
        (156.75, 131_072),  # 141.075
        (156.7, 65_536),  # 141.03
        (80, 32_768),  # 42.768 of 72, and 75.536 are too much
        (16, 4096),  # 14.096 of 14.4
        (15, None),
    ],
)
def test_the_largest_that_stays_under_nine_tenths(gigabytes, expected):
    """A device that holds 10 GB whatever the micro-batch, and a megabyte a token."""
    sizes = candidates(524_288, [4096], 1)
    assert largest_that_fits(sizes, lambda n: 10 * GB + n * 10**6, round(gigabytes * GB)) == expected


@pytest.mark.parametrize(
    ("batch", "context", "expected"), [(524_288, 1024, 4096), (2048, 256, 2048), (524_288, 8192, 8192)]
)
def test_a_cpu_takes_at_most_4096_and_a_row_at_least(batch, context, expected):
    def never(tokens: int) -> int:
        raise AssertionError("a CPU's memory is not asked for")

    assert largest_that_fits(candidates(batch, [context], 1), never, None) == expected


def test_a_plan_begins_with_the_least_and_takes_what_it_is_told():
    made = plan(524_288, 4096, (Rung(start=0.5, context=16_384),), world=2)
    assert (made.micro_batch_tokens, made.grad_accum) == (16_384, 16)
    assert made.candidates() == [131_072, 65_536, 32_768, 16_384]
    more = made.with_micro_batch(65_536)
    assert (more.micro_batch_tokens, more.grad_accum, more.batch_tokens, more.steps) == (65_536, 4, 524_288, made.steps)


def test_sizes_that_no_micro_batch_divides_are_named():
    with pytest.raises(
        ValueError, match=r"auto finds none: train.batch_tokens=524288 can't be dealt to 3 ranks .* 4096;"
    ):
        plan(524_288, 4096, world=3)
    with pytest.raises(ValueError, match=r"context 4096 and 6144; make it a multiple of 12288"):
        plan(524_288, 4096, (Rung(start=0.5, context=6144),))


def test_a_resume_is_told_of_ranks_alone():
    """Its batch may not change; 128 rows can be dealt to 2, 4, 8 and so on."""
    train = TrainSettings(batch_tokens=524_288, micro_batch_tokens="auto")
    with pytest.raises(ValueError, match=r"context 4096; take ranks that divide its 128 rows$"):
        make_plan(train, OptimSettings(), CheckpointSettings(), 4096, lr=0.1, world=3)


@pytest.mark.parametrize("value", ["4096", "4_096"])
def test_a_number_in_quotes_is_a_number(value):
    assert TrainSettings(micro_batch_tokens=value).micro_batch_tokens == 4096


@pytest.mark.parametrize("value", ["fast", "", "-4096", "4096.0", "_4", True, 0, -4])
def test_neither_a_number_nor_auto(value):
    with pytest.raises(ValueError, match=rf"train.micro_batch_tokens={value!r} must be 1 or more, or auto"):
        TrainSettings(micro_batch_tokens=value)
