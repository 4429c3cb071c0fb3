import math

import numpy as np
import pytest

from dwslm.data.mixture import MixtureSettings, Phase, phase_shares

SOURCES = ["books", "code", "web"]
TOKENS = [100, 300, 600]


def test_natural_shares_follow_the_tokens() -> None:
    starts, shares = phase_shares(MixtureSettings(), SOURCES, TOKENS)
    assert starts == [0.0]
    np.testing.assert_allclose(shares, [[0.1, 0.3, 0.6]])


def test_weights_are_normalised_and_unnamed_sources_left_out() -> None:
    _, shares = phase_shares(MixtureSettings(weights={"web": 3.0, "books": 1.0}), SOURCES, TOKENS)
    np.testing.assert_allclose(shares, [[0.25, 0.0, 0.75]])


def test_anneal_doubles_a_source_and_normalises_again() -> None:
    mixture = MixtureSettings(phases=[Phase(start=0.75, scale={"books": 2.0})])
    starts, shares = phase_shares(mixture, SOURCES, TOKENS)
    assert starts == [0.0, 0.75]
    # 0.2 : 0.3 : 0.6 over a sum of 1.1
    np.testing.assert_allclose(shares, [[0.1, 0.3, 0.6], [2 / 11, 3 / 11, 6 / 11]])


def test_each_phase_scales_the_base_weights_not_the_phase_before() -> None:
    phases = [Phase(start=0.0, scale={"web": 0.0}), Phase(start=0.5, scale={"books": 3.0})]
    starts, shares = phase_shares(MixtureSettings(phases=phases), SOURCES, TOKENS)
    assert starts == [0.0, 0.5]
    np.testing.assert_allclose(shares, [[0.25, 0.75, 0.0], [0.25, 0.25, 0.5]])


def test_unknown_source_names_it_and_lists_the_others() -> None:
    for mixture in (
        MixtureSettings(weights={"bokos": 1.0}),
        MixtureSettings(phases=[Phase(start=0.5, scale={"bokos": 2.0})]),
    ):
        with pytest.raises(ValueError, match=r"'bokos'.*books, code, web"):
            phase_shares(mixture, SOURCES, TOKENS)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_weights(weight: float) -> None:
    with pytest.raises(ValueError, match=f"'code' is {weight}"):
        MixtureSettings(weights={"code": weight})
    with pytest.raises(ValueError, match=f"'code' is {weight}"):
        Phase(scale={"code": weight})


def test_weights_that_choose_nothing() -> None:
    with pytest.raises(ValueError, match="all 0"):
        MixtureSettings(weights={"code": 0.0, "web": 0.0})
    with pytest.raises(ValueError, match=r"phase at 0\.5.*sum to 0"):
        mixture = MixtureSettings(weights={"code": 1.0}, phases=[Phase(start=0.5, scale={"code": 0.0})])
        phase_shares(mixture, SOURCES, TOKENS)
    with pytest.raises(ValueError, match=r"'code'.*no text"):
        phase_shares(MixtureSettings(weights={"code": 1.0, "web": 1.0}), SOURCES, [100, 0, 600])
    with pytest.raises(ValueError, match="no text"):
        phase_shares(MixtureSettings(), SOURCES, [0, 0, 0])


def test_a_factor_without_effect_is_refused() -> None:
    mixture = MixtureSettings(weights={"code": 1.0}, phases=[Phase(start=0.5, scale={"web": 2.0})])
    with pytest.raises(ValueError, match=r"phase at 0\.5 scales source 'web', whose weight is 0"):
        phase_shares(mixture, SOURCES, TOKENS)


@pytest.mark.parametrize("start", [-0.1, 1.0, 75.0, math.nan])
def test_phase_start_out_of_range(start: float) -> None:
    with pytest.raises(ValueError, match=f"phase start {start}"):
        Phase(start=start)


@pytest.mark.parametrize("starts", [(0.5, 0.25), (0.5, 0.5)])
def test_phases_out_of_order(starts: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=f"must rise: {starts[0]} is followed by {starts[1]}"):
        MixtureSettings(phases=[Phase(start=start) for start in starts])
