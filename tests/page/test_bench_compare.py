"""Two runs side by side: what moved, what broke, what came and went."""

from copy import deepcopy

from dwslm.page.bench_compare import compare_files, lines
from tests.page.bench_json import find, report, row, save, stat


def compared(tmp_path, before, after, slack=0.0):
    return compare_files(save(tmp_path, before, "a.json"), save(tmp_path, after, "b.json"), slack)


def test_a_run_compared_with_itself_has_nothing_to_say(tmp_path):
    found = compared(tmp_path, report(), report())
    assert not (found.warnings or found.moved or found.broken or found.mended or found.new or found.gone or found.worse)
    assert found.same == len(report()["rows"])
    assert lines(found) == [f"unchanged: {found.same}", "Nothing got worse."]


def test_what_moved_beyond_both_spreads_is_flagged_and_nothing_else(tmp_path):
    after = report()
    find(after, "attention", "global", "flash", 4096)["forward_backward_ms"] = stat(2.5)
    find(after, "attention", "global", "flash", 512)["forward_backward_ms"] = stat(1.53)  # 0.005 further, spread 0.01
    find(after, "mlp", "1024-4096-1024", "compiled")["forward_backward_ms"] = stat(1.1)
    found = compared(tmp_path, report(), after)
    assert [(m.row.engine, m.row.op, m.slower) for m in found.moved] == [
        ("flash", "attention", True),
        ("compiled", "mlp", False),
    ]
    assert found.worse
    text = "\n".join(lines(found))
    assert "more, beyond both spreads: 1" in text and "2.40 to 2.50 ms (+4.2 %" in text
    assert "less, beyond both spreads: 1" in text and text.endswith("Something got worse.")


def test_faster_alone_is_not_worse(tmp_path):
    after = report()
    find(after, "mlp", "1024-4096-1024", "compiled")["forward_backward_ms"] = stat(1.1)
    assert not compared(tmp_path, report(), after).worse


def test_a_large_spread_hides_a_move_and_slack_does_too(tmp_path):
    after = report()
    find(after, "attention", "global", "flash", 4096)["forward_backward_ms"] = stat(2.5, spread=0.2)
    assert not compared(tmp_path, report(), after).moved
    find(after, "attention", "global", "flash", 4096)["forward_backward_ms"] = stat(2.5)
    assert compared(tmp_path, report(), after).moved
    assert not compared(tmp_path, report(), after, slack=0.05).moved


def test_memory_counts_too(tmp_path):
    after = report()
    find(after, "head", "softcap 20", "compiled")["peak_bytes"] = 1_800_000_000
    (moved,) = compared(tmp_path, report(), after).moved
    assert (moved.what, moved.unit, moved.slower) == ("peak memory", "MB", True)


def test_what_newly_fails_is_broken_and_the_other_way_round_is_mended(tmp_path):
    after = report()
    find(after, "attention", "global", "flash", 4096).update(status="failed", reason="dk misses the reference")
    find(after, "attention", "global", "flex", 4096)["record"].update(
        status="differs", reason="replay kept old boundaries"
    )
    find(after, "delta_rule", "kda", "fla", 512)["gate"]["checks"]["neighbour"] = False
    find(after, "delta_rule", "kda", "fla", 4096)["record"]["padding_identical"] = False
    found = compared(tmp_path, report(), after)
    assert found.worse and len(found.broken) == 4
    text = "\n".join(found.broken)
    for words in ("dk misses", "kept old boundaries", "check neighbour fails", "padding changes bits"):
        assert words in text
    back = compared(tmp_path, after, report())
    assert len(back.mended) == 4 and not back.broken and not back.worse


def test_new_and_gone_rows_are_named_and_not_worse(tmp_path):
    before, after = report(), report()
    before["rows"].append(row("norm", "old", "eager"))
    after["rows"].append(row("norm", "new", "eager"))
    find(after, "head", "softcap 20", "cce").update(status="missing", reason="not installed")
    found = compared(tmp_path, before, after)
    assert found.new == ("norm new, 16,384 tokens: eager",)
    assert found.gone == (
        "loss head softcap 20, 16,384 tokens: cce: ok before, missing after",
        "norm old, 16,384 tokens: eager",
    )
    assert not found.worse


def test_other_seeds_are_warned_of(tmp_path):
    (warning,) = compared(tmp_path, report(), report(seed=2)).warnings
    assert warning == "different seeds, 1 and 2: the microbatches hold other documents"


def test_another_machine_is_warned_of(tmp_path):
    after = deepcopy(report())
    after["machine"].update(device="Another GPU", driver="999", clock_cap_mhz=1500)
    after["versions"] = {"torch": "2.12.0", "triton": "3.7.1"}
    after["data"]["fingerprint"] = "beef"
    text = "\n".join(compared(tmp_path, report(), after).warnings)
    assert "different devices: Made-Up GPU and Another GPU" in text
    for words in (
        "clock caps",
        "torch 2.11.0 and 2.12.0",
        "triton none and 3.7.1",
        "different drivers",
        "different datasets",
    ):
        assert words in text
