"""The learning-rate law and the schedules, against values worked out by hand."""

import math

import pytest

from dwslm.optim.schedule import learning_rate, schedule
from dwslm.optim.settings import OptimSettings


@pytest.mark.parametrize(
    ("tokens", "batch", "expected"),
    [
        (1_000_000_000, 524_288, 1e-2),
        (1_000_000_000, 131_072, 0.5e-2),  # a quarter of the batch, half the rate
        (23_000_000_000, 524_288, 3.6665e-3),  # exp(-0.32 ln 23) = exp(-0.32 x 3.135494) = 0.366649
        (200_000_000, 524_288, 1.67364e-2),  # exp(0.32 ln 5) = exp(0.515020)
        (200_000_000_000, 524_288, 1.83510e-3),  # exp(-0.32 x 5.298317) = exp(-1.695462)
    ],
)
def test_law(tokens: int, batch: int, expected: float) -> None:
    assert learning_rate(tokens, batch, OptimSettings()) == pytest.approx(expected, rel=1e-4)


def test_the_main_run_prints_as_3_7e_3() -> None:
    assert f"{learning_rate(23_000_000_000, 524_288, OptimSettings()):.1e}" == "3.7e-03"


@pytest.mark.parametrize("tokens", [0, 1_000_000, 199_999_999, 200_000_000_001])
def test_outside_the_law(tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"{tokens:,} planned tokens .* 0\.2B to 200B: give optim\.lr"):
        learning_rate(tokens, 524_288, OptimSettings())


def test_given_rate_wins_everywhere() -> None:
    assert learning_rate(1000, 10, OptimSettings(lr=0.02)) == 0.02


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_only_muonh_has_a_law(matrices: str) -> None:
    with pytest.raises(ValueError, match=rf"optim\.matrices={matrices} has no learning-rate law"):
        learning_rate(10**9, 524_288, OptimSettings(matrices=matrices, head="adam"))
    assert learning_rate(10**9, 524_288, OptimSettings(matrices=matrices, head="adam", lr=0.01)) == 0.01


def test_empty_batch() -> None:
    with pytest.raises(ValueError, match="batch of 0 tokens"):
        learning_rate(10**9, 0, OptimSettings())


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (OptimSettings(), {0: 0, 0.005: 0.5, 0.01: 1, 0.4: 1, 0.75: 1, 0.875: 0.5, 0.95: 0.2, 1: 0}),
        (OptimSettings(final_lr=0.1), {0: 0, 0.01: 1, 0.75: 1, 0.875: 0.55, 1: 0.1, 1.01: 0.1}),
        (OptimSettings(warmup=0.2, schedule="linear"), {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 0.5, 0.8: 0.25, 1: 0}),
        (OptimSettings(warmup=0, schedule="linear", final_lr=0.1), {0: 1, 0.5: 0.55, 1: 0.1}),
        # (1 + cos(pi / 4)) / 2 = 0.853553
        (OptimSettings(warmup=0.2, schedule="cosine"), {0: 0, 0.2: 1, 0.4: 0.853553, 0.6: 0.5, 1: 0}),
        (OptimSettings(warmup=0, schedule="cosine", final_lr=0.2), {0: 1, 0.5: 0.6, 1: 0.2}),
        (OptimSettings(warmup=0, decay_start=0), {0: 1, 0.25: 0.75, 1: 0}),
    ],
)
def test_schedules(settings: OptimSettings, values: dict[float, float]) -> None:
    for fraction, expected in values.items():
        assert schedule(fraction, settings) == pytest.approx(expected, abs=1e-6), fraction


@pytest.mark.parametrize("fraction", [-0.1, math.nan])
def test_impossible_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match="planned tokens"):
        schedule(fraction, OptimSettings())
