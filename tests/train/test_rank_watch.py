"""The judge of ranks, by a clock of its own: whom it finds lost, when, and whom it leaves alone."""

import pytest

from dwslm.train.rank_watch import LOST, Beat, Judge, RankLost, Verdict


def beat(
    rank: int, meetings: int, serial: int, *, patience: float = 10.0, quiet: float = 10.0, left: bool = False
) -> Beat:
    return Beat(rank, serial, meetings, patience, quiet, "node", pid=1000 + rank, stack=["loop.py:1 step"], left=left)


def judged(judge: Judge, beats: list[Beat], now: float, dead: int | None = None) -> Verdict | None:
    for one in beats:
        judge.hear(one, now)
    return judge.verdict(now, lambda of: of.rank == dead)


def test_ranks_that_move_together_are_left_alone():
    judge = Judge([0, 1, 2], silence=10)
    for now in range(200):
        assert judged(judge, [beat(rank, now // 5, now) for rank in range(3)], float(now)) is None


def test_a_process_that_is_gone_is_lost_at_once_and_named_with_its_last_stack():
    judge = Judge([0, 1], silence=10)
    assert judged(judge, [beat(0, 1, 1), beat(1, 1, 1)], 0.0) is None
    found = judged(judge, [beat(0, 1, 2), beat(1, 1, 1)], 0.5, dead=1)
    assert found == Verdict(LOST, 1, "rank 1 (pid 1001 on node) has died", ["loop.py:1 step"])
    assert str(found) == "rank 1 (pid 1001 on node) has died; last seen in loop.py:1 step"
    assert isinstance(RankLost(found), OSError) and str(RankLost(found)) == str(found)


def test_a_rank_that_falls_silent_is_lost_after_that_time_and_not_before():
    judge = Judge([0, 1], silence=10)
    for now in range(31):
        found = judged(judge, [beat(0, now, now), beat(1, min(now, 20), min(now, 20))], float(now))
        assert (found is None) == (now <= 30), now
    found = judged(judge, [beat(0, 31, 31), beat(1, 20, 20)], 31.0)
    assert found is not None and found.rank == 1 and "has not been heard of for 11 s" in found.reason


def test_a_rank_that_speaks_but_keeps_the_others_waiting_is_lost():
    judge = Judge([0, 1, 2], silence=10)
    for now in range(11):
        assert judged(judge, [beat(0, 5, now), beat(1, 4, now), beat(2, 5, now)], float(now)) is None
    found = judged(judge, [beat(0, 5, 11), beat(1, 4, 11), beat(2, 5, 11)], 11.0)
    assert found is not None and found.rank == 1 and "kept the others waiting for 11 s" in found.reason


def test_the_wait_begins_when_it_is_passed_and_anew_with_each_move():
    judge = Judge([0, 1], silence=10)
    for now in range(100):  # always one meeting behind, but moving
        assert judged(judge, [beat(0, 1 + now // 8, now), beat(1, now // 8, now)], float(now)) is None


def test_one_that_compiles_may_take_its_time_and_say_nothing_for_a_while():
    judge, compiling = Judge([0, 1], silence=10), {"patience": 900.0, "quiet": 300.0}
    for now in range(100):
        assert judged(judge, [beat(0, 2, now, **compiling), beat(1, 1, now, **compiling)], float(now)) is None
    still = [beat(0, 2, 100, **compiling), beat(1, 1, 99, **compiling)]
    assert judged(judge, still, 398.0) is None
    silent = judged(judge, [beat(0, 2, 101, **compiling), still[1]], 399.5)
    assert silent is not None and silent.rank == 1 and "not been heard of for 300 s" in silent.reason


def test_one_that_never_comes_is_missed():
    judge = Judge([0, 1], silence=10)
    for now in range(0, 301, 10):
        assert judged(judge, [beat(0, 1, now)], float(now)) is None
    found = judged(judge, [beat(0, 1, 301)], 301.0)
    assert found == Verdict(LOST, 1, "rank 1 has not come within 301 s", [])


def test_ranks_that_all_stand_still_are_found_by_their_own_pace():
    judge = Judge([0, 1], silence=10)
    now, meetings = 0.0, 0
    for _ in range(5):  # every three seconds a meeting
        now, meetings = now + 3, meetings + 1
        assert judged(judge, [beat(rank, meetings, int(now)) for rank in (0, 1)], now) is None
    assert judged(judge, [beat(rank, meetings, 100) for rank in (0, 1)], now + 29) is None
    found = judged(judge, [beat(rank, meetings, 101) for rank in (0, 1)], now + 31)
    assert found is not None and "no rank has moved for 31 s" in found.reason


@pytest.mark.parametrize("silent", [5.0, 1000.0])
def test_one_that_has_parted_is_judged_no_more(silent):
    judge = Judge([0, 1], silence=10)
    assert judged(judge, [beat(0, 9, 1), beat(1, 3, 1, left=True)], 0.0) is None
    assert judged(judge, [beat(0, 9, 2), beat(1, 3, 1, left=True)], silent, dead=1) is None
