import pytest

from dwslm.optim.settings import OptimSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.plan import Plan, make_plan
from dwslm.train.settings import TrainSettings


def plan(tokens: int, pins: list[float], every: int = 10, score: int = 0) -> Plan:
    """A plan of steps of one token, so that tokens are steps."""
    return make_plan(
        TrainSettings(tokens=tokens, batch_tokens=1, micro_batch_tokens=1, eval_every_tokens=score),
        OptimSettings(lr=0.1),
        CheckpointSettings(every_tokens=every, pin_fractions=pins),
        context=1,
    )


def test_pins_are_at_their_fractions_exactly():
    """0.07 of 100 is 7, though 0.07 * 100 is a little more in floating point."""
    assert sorted(plan(100, [0.07, 0.55, 0.75, 1.0]).pins) == [7, 55, 75, 100]
    assert sorted(plan(10, [0.75]).pins) == [8]


def test_what_is_scored_is_saved_and_the_end_is_both():
    made = plan(100, [0.75], every=40, score=30)
    assert [step for step in range(101) if made.scores(step)] == [30, 60, 90, 100]
    assert [step for step in range(101) if made.saves(step)] == [30, 40, 60, 75, 80, 90, 100]


def test_a_plan_of_any_length_costs_nothing():
    made = plan(9 * 10**18, [0.75])
    assert made.steps == 9 * 10**18 and made.saves(10) and not made.saves(11)


def test_a_last_step_is_whole():
    made = make_plan(TrainSettings(tokens=1000, batch_tokens=256, micro_batch_tokens=128), OptimSettings(lr=1.0),
                     CheckpointSettings(), context=64)  # fmt: skip
    assert (made.steps, made.tokens, made.grad_accum, made.micro_batch_tokens) == (4, 1024, 2, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval_documents": 0}, "train.eval_documents=0"),
        ({"seed": -1}, "train.seed=-1"),
        ({"seed": 10**23}, "train.seed="),
        ({"batch_tokens": 100, "micro_batch_tokens": 64}, "train.batch_tokens=100 is not a multiple"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**change)
