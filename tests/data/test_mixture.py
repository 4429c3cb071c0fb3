import math

import numpy as np
import pytest

from dwslm.data.mixture import Anneal, MixtureSettings, Past, Phase
from dwslm.data.packing_settings import PackingSettings
from dwslm.data.shares import check_sources, epoch_caps, make_streams, phase_shares, stream_of
from dwslm.data.stretches import make_stretches
from tests.data.in_memory import dataset, stream

TEXT = dataset([("books", 100), ("code", 180, "c"), ("code", 120, "py"), ("web", 600)])


def resolved(mixture: MixtureSettings) -> tuple[list[str], np.ndarray]:
    """Names of the streams, and shares [phases, streams]."""
    streams = make_streams(TEXT, mixture.names())
    tokens = np.bincount(stream_of(TEXT, streams), TEXT.docs["tokens"], len(streams)).astype(int).tolist()
    return [stream.name for stream in streams], phase_shares(mixture, streams, tokens)


def named(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "data.mixture.weights")


def test_natural_shares_follow_the_tokens() -> None:
    names, shares = resolved(MixtureSettings())
    assert names == ["books", "code", "web"]
    np.testing.assert_allclose(shares, [[0.1, 0.3, 0.6]])


def test_weights_are_normalised_and_unnamed_sources_left_out() -> None:
    _, shares = resolved(MixtureSettings(weights={"web": 3.0, "books": 1.0}))
    np.testing.assert_allclose(shares, [[0.25, 0.0, 0.75]])


def test_a_phase_doubles_a_source_and_normalises_again() -> None:
    mixture = MixtureSettings(phases=[Phase(start=0.75, scale={"books": 2.0})])
    assert [phase.start for phase in mixture.all_phases()] == [0.0, 0.75]
    # 0.2 : 0.3 : 0.6 over a sum of 1.1
    np.testing.assert_allclose(resolved(mixture)[1], [[0.1, 0.3, 0.6], [2 / 11, 3 / 11, 6 / 11]])


def test_an_anneal_is_that_phase_in_short() -> None:
    long = MixtureSettings(phases=[Phase(0.5, {"web": 0.5}), Phase(0.75, {"books": 2.0, "code/py": 2.0})])
    short = MixtureSettings(phases=[Phase(0.5, {"web": 0.5})], anneal=Anneal(["books", "code/py"]))
    assert short.all_phases() == long.all_phases()
    names, shares = resolved(short)
    assert names == ["books", "code/py", "code, rest", "web"]
    np.testing.assert_allclose(shares, resolved(long)[1])
    assert MixtureSettings(anneal=Anneal()).all_phases() == [Phase()]


def test_each_phase_scales_the_base_weights_not_the_phase_before() -> None:
    phases = [Phase(start=0.0, scale={"web": 0.0}), Phase(start=0.5, scale={"books": 3.0})]
    np.testing.assert_allclose(resolved(MixtureSettings(phases=phases))[1], [[0.25, 0.75, 0.0], [0.25, 0.25, 0.5]])


def test_base_weights_hold_where_a_phase_has_ended() -> None:
    mixture = MixtureSettings(phases=[Phase(0.2, {"web": 0.0}, end=0.4), Phase(0.6, {"books": 3.0}, end=0.9)])
    starts = [(phase.start, phase.scale) for phase in mixture.all_phases()]
    assert starts == [(0.0, {}), (0.2, {"web": 0.0}), (0.4, {}), (0.6, {"books": 3.0}), (0.9, {})]
    touching = MixtureSettings(phases=[Phase(0.2, {"web": 0.0}, end=0.4), Phase(0.4, {"books": 3.0}, end=1.0)])
    assert [phase.start for phase in touching.all_phases()] == [0.0, 0.2, 0.4]


def test_a_slice_has_a_weight_of_its_own_and_its_source_the_rest() -> None:
    names, shares = resolved(MixtureSettings(weights={"code": 3.0, "code/py": 1.0, "web": 4.0}))
    assert names == ["books", "code/py", "code, rest", "web"]
    np.testing.assert_allclose(shares, [[0, 1 / 8, 3 / 8, 4 / 8]])


def test_a_slice_that_only_a_phase_names_starts_with_its_part_of_the_source() -> None:
    mixture = MixtureSettings(
        weights={"code": 5.0, "web": 5.0},
        phases=[Phase(0.5, {"code/py": 3.0}), Phase(0.8, {"code": 2.0, "code/py": 0.0})],
    )
    _, shares = resolved(mixture)
    # py holds 120 of the 300 tokens of code: 2 of its weight of 5.
    np.testing.assert_allclose(shares[0], [0, 2 / 10, 3 / 10, 5 / 10])
    np.testing.assert_allclose(shares[1], [0, 6 / 14, 3 / 14, 5 / 14])
    np.testing.assert_allclose(shares[2], [0, 0, 6 / 11, 5 / 11])  # the slice's own factor, not its source's


def test_documents_are_in_the_stream_of_their_slice() -> None:
    assert stream_of(TEXT, make_streams(TEXT, named("code/py"))).tolist() == [0, 2, 1, 3]
    assert stream_of(TEXT, make_streams(TEXT, named("code/py", "code/c"))).tolist() == [0, 1, 2, 3]
    assert [s.name for s in make_streams(TEXT, named("code/py", "code/c"))] == ["books", "code/c", "code/py", "web"]


def test_unknown_source_names_it_and_lists_the_others() -> None:
    for mixture in (
        MixtureSettings(weights={"bokos": 1.0}),
        MixtureSettings(phases=[Phase(start=0.5, scale={"bokos": 2.0})]),
        MixtureSettings(anneal=Anneal(["bokos"])),
        MixtureSettings(max_epochs={"bokos": 2.0}),
        MixtureSettings(weights={"bokos/en": 2.0}),
    ):
        with pytest.raises(ValueError, match=r"'bokos.*books, code, web"):
            resolved(mixture)
    with pytest.raises(ValueError, match=r"'code/rust'.*'code' c, py"):
        resolved(MixtureSettings(weights={"code/rust": 1.0}))
    with pytest.raises(ValueError, match=r"'bokos'.*books, code, web"):
        check_sources(MixtureSettings(rephrased={"web": "bokos"}), TEXT.sources)
    check_sources(MixtureSettings(rephrased={"web": "books"}), TEXT.sources)


@pytest.mark.parametrize(
    ("mixture", "setting", "way_out"),
    [
        (MixtureSettings(weights={"books": 1.0, "bokos": 1.0}), "weights", "'~data.mixture.weights.bokos'"),
        (MixtureSettings(weights={"bokos/en": 1.0}), "weights", "name what is there"),
        (
            MixtureSettings(phases=[Phase(0.5, {"web": 2.0}), Phase(0.7, {"bokos": 2.0})]),
            "phases[1].scale",
            "data.mixture.phases=[]",
        ),
        (MixtureSettings(phases=[Phase(0.5, {"code/rust": 2.0})]), "phases[0].scale", "data.mixture.phases=[]"),
        (MixtureSettings(anneal=Anneal(["bokos"])), "anneal.sources", "data.mixture.anneal.sources=[]"),
        (MixtureSettings(max_epochs={"every": 2.0, "bokos": 2.0}), "max_epochs", "'~data.mixture.max_epochs.bokos'"),
    ],
)
def test_an_unknown_name_is_told_with_its_setting_and_the_way_out(mixture, setting, way_out) -> None:
    """It may stand in the experiment and not in what the user wrote."""
    with pytest.raises(ValueError) as caught:
        resolved(mixture)
    assert str(caught.value).startswith(f"data.mixture.{setting} names ") and str(caught.value).endswith(way_out)


def test_a_name_of_a_past_mixture_is_told_as_such() -> None:
    past = MixtureSettings(weights={"bokos": 1.0})
    with pytest.raises(ValueError, match=r"^data\.past\[0\]\.mixture\.weights names source 'bokos'"):
        make_stretches(TEXT, PackingSettings(context=8), MixtureSettings(), [Past(2, past)], 80, None)


def test_caps_are_of_the_slice_else_of_its_source_else_of_all() -> None:
    mixture = MixtureSettings(max_epochs={"code": 3.0, "code/py": 2.0, "every": 4.0})
    assert epoch_caps(mixture, make_streams(TEXT, mixture.names())) == [4.0, 2.0, 3.0, 4.0]
    assert epoch_caps(MixtureSettings(max_epochs={"web": 1.0}), make_streams(TEXT, {})) == [math.inf, math.inf, 1.0]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_weights(weight: float) -> None:
    with pytest.raises(ValueError, match=f"'code' is {weight}"):
        MixtureSettings(weights={"code": weight})
    with pytest.raises(ValueError, match=f"'code' is {weight}"):
        Phase(scale={"code": weight})
    with pytest.raises(ValueError, match=f"anneal factor {weight}"):
        Anneal(factor=weight)
    with pytest.raises(ValueError, match=f"max_epochs of 'code' is {weight}"):
        MixtureSettings(max_epochs={"code": weight})


def test_weights_that_choose_nothing() -> None:
    with pytest.raises(ValueError, match="all 0"):
        MixtureSettings(weights={"code": 0.0, "web": 0.0})
    with pytest.raises(ValueError, match=r"phase at 0\.5.*sum to 0"):
        resolved(MixtureSettings(weights={"code": 1.0}, phases=[Phase(start=0.5, scale={"code": 0.0})]))
    with pytest.raises(ValueError, match=r"'code'.*no text of it"):  # all of it is in slices of their own
        resolved(MixtureSettings(weights={"code": 1.0, "code/c": 1.0, "code/py": 1.0}))
    streams = make_streams(TEXT, {})
    with pytest.raises(ValueError, match=r"'code'.*no text of it"):
        phase_shares(MixtureSettings(weights={"code": 1.0}), streams, [100, 0, 600])
    with pytest.raises(ValueError, match="holds no text"):
        phase_shares(MixtureSettings(), streams, [0, 0, 0])


def test_a_factor_without_effect_is_refused() -> None:
    mixture = MixtureSettings(weights={"code": 1.0}, phases=[Phase(start=0.5, scale={"web": 2.0})])
    with pytest.raises(ValueError, match=r"phase at 0\.5 scales source 'web', whose weight is 0"):
        resolved(mixture)


@pytest.mark.parametrize("start", [-0.1, 1.0, 75.0, math.nan])
def test_phase_start_out_of_range(start: float) -> None:
    with pytest.raises(ValueError, match=f"phase start {start}"):
        Phase(start=start)
    with pytest.raises(ValueError, match=f"anneal start {start}"):
        Anneal(start=start)


@pytest.mark.parametrize("end", [0.5, 0.4, 1.1, math.nan])
def test_phase_end_out_of_range(end: float) -> None:
    with pytest.raises(ValueError, match=f"phase at 0.5: its end is {end}"):
        Phase(0.5, end=end)


@pytest.mark.parametrize("starts", [(0.5, 0.25), (0.5, 0.5)])
def test_phases_out_of_order(starts: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=f"must rise: {starts[0]} is followed by {starts[1]}"):
        MixtureSettings(phases=[Phase(start=start) for start in starts])


def test_overlapping_phases_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"overlap: the one from 0\.25 to 0\.6 goes on for 0\.1 .* after 0\.5"):
        MixtureSettings(phases=[Phase(0.25, end=0.6), Phase(0.5)])
    with pytest.raises(
        ValueError, match=r"to 0\.8 goes on for 0\.05 .* after 0\.75, where the anneal begins; .*anneal\.start"
    ):
        MixtureSettings(phases=[Phase(0.25, end=0.8)], anneal=Anneal(["books"]))


@pytest.mark.parametrize("start", [0.75, 0.8])
def test_an_anneal_that_does_not_come_after_the_phases_is_told_as_such(start: float) -> None:
    message = rf"^the anneal begins at 0\.75, and the last phase at {start}.*anneal\.start.*data\.mixture\.phases=\[\]"
    with pytest.raises(ValueError, match=message):
        MixtureSettings(phases=[Phase(0.5), Phase(start)], anneal=Anneal(["books"]))
    with pytest.raises(ValueError, match=r"^phase starts must rise: 0\.9 is followed by 0\.1"):
        MixtureSettings(phases=[Phase(0.9), Phase(0.1)], anneal=Anneal(["books"]))


@pytest.mark.parametrize("caps", [{"every": 4.0}, {"every": 4.0, "books": 2.0}])
def test_a_source_named_every_leaves_no_cap_for_all_others(caps: dict[str, float]) -> None:
    text = dataset([("books", 100), ("every", 100)])
    stream(text, mixture=MixtureSettings(max_epochs={"books": 4.0}))
    stream(dataset([("books", 100)]), mixture=MixtureSettings(max_epochs={"every": 4.0}))
    with pytest.raises(ValueError, match="max_epochs: 'every' is .* and a source of the dataset: .*--source"):
        stream(text, mixture=MixtureSettings(max_epochs=caps))


def test_a_source_with_a_slash_comes_before_a_slice_of_that_name() -> None:
    text = dataset([("code", 50, "c"), ("code", 50, "py"), ("code/c", 100)])
    streams = make_streams(text, named("code/c"))
    assert [one.name for one in streams] == ["code", "code/c"]
    shares = phase_shares(MixtureSettings(weights={"code": 1.0, "code/c": 3.0}), streams, [100, 100])
    np.testing.assert_allclose(shares, [[0.25, 0.75]])


def test_other_mistakes() -> None:
    with pytest.raises(ValueError, match="books twice"):
        Anneal(["books", "books"])
    with pytest.raises(ValueError, match="'web' was rephrased from itself"):
        MixtureSettings(rephrased={"web": "web"})
    with pytest.raises(ValueError, match="until_row 0"):
        Past(0)
