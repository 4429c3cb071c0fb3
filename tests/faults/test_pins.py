"""Any sequence of save, crash, resume, longer and shorter plan keeps every pin and the newest valid checkpoint."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwslm.train import checkpoint
from tests.faults.pins import BATCH, BY_HAND, Life

ACTIONS = st.one_of(
    st.tuples(st.just("crash"), st.integers(1, 60)),
    st.tuples(st.just("train"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["resume", "pin"]), st.just(0)),
    st.tuples(st.sampled_from(["longer", "shorter"]), st.integers(1, 9)),
)


@given(st.lists(ACTIONS, min_size=1, max_size=9))
@settings(max_examples=30)
def test_any_life_keeps_every_pin_and_the_newest(memory_folder: Path, actions: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(dir=memory_folder) as folder:
        Life(Path(folder)).live(actions)


def test_the_check_sees_a_pin_that_is_gone_and_a_newest_that_is(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.live([("train", 8)])
    assert life.pinned == {4: {"at-50-percent"}, 6: {"at-75-percent"}} and life.newest == (8, 4)
    checkpoint.unpin(tmp_path, 4, "at-50-percent")
    with pytest.raises(AssertionError, match="step 4 has lost a pin"):
        life.check()
    life.pinned.pop(4)
    (tmp_path / "step-00000008" / "manifest.json").unlink()
    with pytest.raises(AssertionError, match=r"the newest checkpoint is \(6, 3\), not \(8, 4\)"):
        life.check()


def test_a_pin_outlives_a_longer_plan_and_a_shorter_one_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.live([("train", 5), ("pin", 0), ("crash", 3), ("longer", 12), ("train", 50), ("shorter", 9)])
    assert life.crashes == 1 and life.config.train.tokens == 20 * BATCH and life.step == 20
    assert life.pinned[4] == {"at-50-percent", BY_HAND} and {10, 15} <= life.pinned.keys()
