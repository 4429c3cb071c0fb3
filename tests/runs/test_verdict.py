"""Verdicts: noise between seeds, tokens and hours, and what makes a comparison unfair."""

from pathlib import Path

import pytest

from dwslm.runs.folder import RunFolder
from dwslm.runs.verdict import group, unpaired, verdict
from tests.runs.made import make_run


def arm(
    root: Path, name: str, scores: list[dict[int, float]], speed: float = 1000.0, **about: object
) -> list[RunFolder]:
    return [
        make_run(root, f"{name}-{seed}", losses=[3.0] * 10, scores=score, seed=seed, speed=speed,
                 settings={"model": {"local": name}}, **about)  # type: ignore[arg-type]
        for seed, score in enumerate(scores)
    ]  # fmt: skip


def test_better_by_more_than_two_seeds_differ(tmp_path: Path) -> None:
    found = verdict(arm(tmp_path, "kda", [{10: 1.30}, {10: 1.32}]) + arm(tmp_path, "gdn", [{10: 1.35}, {10: 1.36}]))
    assert [one.name for one in found.arms] == ["model.local=kda", "model.local=gdn"]
    assert (found.metric, found.tokens) == ("bits_per_byte", 1000)
    assert found.noise == pytest.approx(0.02) and found.arms[0].values == [1.30, 1.32]
    assert found.against(found.arms[0]) == [] and found.words() == "model.local=kda is better by tokens and by hours"
    assert "0.0450 worse" in found.against(found.arms[1])[0]


def test_within_the_noise_nothing_is_better(tmp_path: Path) -> None:
    found = verdict(arm(tmp_path, "kda", [{10: 1.30}, {10: 1.32}]) + arm(tmp_path, "gdn", [{10: 1.32}, {10: 1.33}]))
    (told,) = found.against(found.arms[0])
    assert told == (
        "by tokens model.local=kda is 0.0150 better than model.local=gdn, and two seeds of one arm lie up to 0.0200 apart"
    )
    assert found.words().startswith("no arm can be called better: ")


def test_one_seed_says_nothing(tmp_path: Path) -> None:
    found = verdict(arm(tmp_path, "kda", [{10: 1.0}]) + arm(tmp_path, "gdn", [{10: 2.0}]))
    assert found.noise is None
    assert found.against(found.arms[0]) == [
        "no arm has two seeds, so nobody knows how far two runs of one arm lie apart"
    ]


def test_seeds_that_disagree(tmp_path: Path) -> None:
    found = verdict(
        arm(tmp_path, "a", [{10: 1.33}, {10: 1.30}, {10: 1.30}])
        + arm(tmp_path, "b", [{10: 1.325}, {10: 1.355}, {10: 1.355}])
    )
    assert found.noise == pytest.approx(0.03)  # the means lie 0.035 apart
    assert found.against(found.arms[0]) == ["with seed 0 model.local=a is not better than model.local=b"]


def test_a_slower_arm_has_to_win_on_the_clock(tmp_path: Path) -> None:
    """Half as fast: when the fast arm is done, the slow one is at step 5."""
    fast = arm(tmp_path, "fast", [{5: 1.50, 10: 1.36}, {5: 1.51, 10: 1.37}], speed=1000.0)
    slow = arm(tmp_path, "slow", [{5: 1.40, 10: 1.30}, {5: 1.41, 10: 1.31}], speed=500.0)
    found = verdict(fast + slow)
    best = found.arms[0]
    assert best.name == "model.local=slow" and found.hours == pytest.approx(1000 / 1000 / 3600)
    assert best.by_hours == [pytest.approx(1.40), pytest.approx(1.41)] and best.hours[0] == pytest.approx(2 / 3600)
    (told,) = found.against(best)
    assert told.startswith("by hours model.local=slow, which is slower, is 0.0400 worse than model.local=fast")
    better = arm(tmp_path, "better", [{5: 1.30, 10: 1.20}, {5: 1.31, 10: 1.21}], speed=500.0)
    assert verdict(fast + better).words() == "model.local=better is better by tokens and by hours"


def test_compared_where_all_have_come(tmp_path: Path) -> None:
    longer = arm(tmp_path, "a", [{4: 1.6, 8: 1.4}, {4: 1.6, 8: 1.4}])
    shorter = arm(tmp_path, "b", [{6: 1.6}, {6: 1.61}])
    found = verdict(longer + shorter)
    assert found.tokens == 600 and found.arms[0].values == [pytest.approx(1.5), pytest.approx(1.5)]


def test_loss_where_a_run_has_no_score(tmp_path: Path) -> None:
    found = verdict(arm(tmp_path, "a", [{10: 1.0}, {}]) + arm(tmp_path, "b", [{10: 1.0}, {10: 1.0}]))
    assert found.metric == "loss" and found.arms[0].values == [3.0, 3.0]


def test_what_makes_it_unfair(tmp_path: Path) -> None:
    base = arm(tmp_path, "a", [{10: 1.0}, {10: 1.01}])
    assert unpaired(group(base + arm(tmp_path, "b", [{10: 2.0}, {10: 2.0}]))) == []
    cases = {
        "seeds differ": arm(tmp_path, "b", [{10: 2.0}]),
        "planned tokens differ": arm(tmp_path, "b", [{10: 2.0}, {10: 2.0}], planned_tokens=5),
        "order of their data differs at seed 0": arm(tmp_path, "b", [{10: 2.0}, {10: 2.0}], stream="other"),
        "not all runs were made on the same hardware": arm(
            tmp_path, "b", [{10: 2.0}, {10: 2.0}], hardware={"host": "x"}
        ),
    }
    for expected, other in cases.items():
        found = verdict(base + other)
        assert any(expected in told for told in found.against(found.arms[0])), expected
    assert found.hours is None and found.arms[0].by_hours is None


def test_a_score_at_the_end_alone_says_nothing_about_the_clock(tmp_path: Path) -> None:
    found = verdict(
        arm(tmp_path, "a", [{10: 1.0}, {10: 1.1}]) + arm(tmp_path, "b", [{10: 2.0}, {10: 2.1}], speed=999.0)
    )
    (told,) = found.against(found.arms[0])
    assert told.endswith("has no bits_per_byte by then; scores on the way make it possible (train.eval_every_tokens)")


def test_arms_are_named_by_what_differs(tmp_path: Path) -> None:
    def run(name: str, **settings: object) -> RunFolder:
        return make_run(tmp_path, name, losses=[1.0], settings={"train": {"seed": 1, "tokens": 5}, **settings})

    runs = [run("x", optim={"lr": 0.1}, model={"layers": 8}), run("y", optim={"lr": 0.2}, model={"layers": 8})]
    assert list(group(runs)) == ["optim.lr=0.1", "optim.lr=0.2"]
    assert list(group([runs[0], run("z", optim={"lr": 0.1}, model={"layers": 8}, track={"wandb": "offline"})])) == [
        "the same settings"
    ]
    named = [run("x", proxy={"test": "t", "arm": "kda"}), run("y", proxy={"test": "t", "arm": "gdn"}, optim={"lr": 1})]
    assert list(group(named)) == ["kda", "gdn"]


def test_too_little_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only one arm among .*-a-0-"):
        verdict(arm(tmp_path, "a", [{10: 1.0}]))
    empty = make_run(tmp_path, "empty", settings={"model": {"local": "b"}})
    with pytest.raises(ValueError, match=rf"{empty.path.name} has no reports yet"):
        verdict([*arm(tmp_path, "c", [{10: 1.0}]), empty])
