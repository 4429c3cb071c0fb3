"""Pieces of `dwslm bench step` joined, and the page made of them."""

import json

import pytest

from dwslm.page import bench_step, bench_step_page


def row(name, speed=200_000.0, **more):
    middle = {"median": speed, "spread": 1500.0, "n": 3}
    health = {"power_w": {"mean": 690.0, "max": 705.0}, "sm_mhz": {"min": 1500, "median": 1800, "max": 1980},
              "throttle_reasons": {"sw_power_cap": 0.9}, "temperature_c": {"min": 50, "median": 58, "max": 61}}  # fmt: skip
    classes = [
        {"class": "mlp up", "ms": 700.0, "ms_micro_batch": 87.5, "share": 0.35, "flop": 3.5e14, "bytes": 0.0,
         "floor_ms": 490.0, "floor_share": 0.7},
        {"class": "optimizer", "ms": 20.0, "ms_micro_batch": None, "share": 0.01, "flop": None, "bytes": None,
         "floor_ms": None, "floor_share": None},
    ]  # fmt: skip
    return {
        "name": name, "meaning": "a build", "status": "ok", "overrides": ["experiment=main"], "mfu": 0.35,
        "tokens_per_second": middle, "step_ms": {"median": 2600.0, "spread": 10.0}, "micro_batch_ms": None, "update_ms": None,
        "first_step_s": 60.0, "peak_memory_bytes": 68_400_000_000, "work": {"micro_batch_tokens": 65536},
        "energy_j_per_token": {"median": 0.0034, "spread": 0.0001},
        "start": {"caches": "cold", "to_first_step_s": 80.0, "imports_s": 9.0, "build_s": 11.0},
        "second_start": {"first_step_s": 7.0, "start": {"caches": "warm", "to_first_step_s": 27.0}},
        "runs": [{"tokens_per_second": speed, "health": health}] * 3,
        "profile": {"wall_ms": 750.0, "idle_ms": 30.0, "classes": classes,
                    "kernels": [{"class": "mlp up", "kernel": "nvjet", "ms": 700.0, "count": 480.0}]},
    } | more  # fmt: skip


def piece(tmp_path, name, builds, started="2026-11-29T10:00:00+00:00", device="NVIDIA H200", commit="a" * 40, **more):
    path = tmp_path / f"{name}.json"
    plain = {"format": 1, "kind": "step", "command": f"dwslm bench step {name}", "commit": commit, "started": started,
             "seconds": 100.0, "complete": True, "versions": {"torch": "2.11.0"}, "notes": [],
             "machine": {"device": device, "clock_cap_mhz": None}, "builds": builds} | more  # fmt: skip
    path.write_text(json.dumps(plain))
    return path


def test_pieces_are_joined_and_the_later_measurement_counts(tmp_path):
    skipped = {
        "name": "plain",
        "status": "skipped",
        "reason": "the budget was used up",
        "overrides": ["experiment=main"],
    }
    old = piece(tmp_path, "old", [row("main", 170_000.0), row("plain", 200_000.0)])
    new = piece(tmp_path, "new", [row("main", 180_000.0), skipped], "2026-11-29T11:00:00+00:00", commit="b" * 40)
    steps = bench_step.join([new, old])
    speeds = {build.name: build.number("tokens_per_second", "median") for build in steps.builds}
    assert speeds == {"main": 180_000.0, "plain": 200_000.0}  # one that was not measured replaces nothing
    assert any("different commits" in note for note in steps.notes)
    assert any(note == "main stands in more than one piece; the later measurement is shown." for note in steps.notes)
    paths = bench_step_page.write([new, old], tmp_path / "page")
    assert [path.name for path in paths] == ["step.md", "step.html", "step.json"]
    joined = json.loads(paths[2].read_text())
    assert joined["seconds"] == 200.0 and [build["name"] for build in joined["builds"]] == ["main", "plain"]
    assert joined["builds"][1]["commit"] == "a" * 40
    again = bench_step.join([paths[2]])  # what was joined is a piece itself
    assert {build.name: build.commit for build in again.builds} == {"main": "b" * 40, "plain": "a" * 40}
    assert again.source == steps.source == f"dwslm bench step · commit {'b' * 12}, {'a' * 12} · NVIDIA H200"


def days(*numbers):
    return [f"2026-11-{day:02}T10:00:00+00:00" for day in numbers]


def speeds_of(steps):
    return {build.name: build.number("tokens_per_second", "median") for build in steps.builds}


def joined(tmp_path, name, *pieces):
    """The pieces' joined file."""
    return bench_step_page.write(pieces, tmp_path / name)[2]


def test_the_later_measurement_counts_whatever_was_joined_before(tmp_path):
    """Of three days' measurements the last; a joined file begins with its first day, and its rows keep theirs."""
    one, two, three = (
        piece(tmp_path, f"day{n}", [row("main", 100_000.0 + n)], started) for n, started in enumerate(days(1, 2, 3))
    )
    both = joined(tmp_path, "both", one, three)
    rows = json.loads(both.read_text())["builds"]
    assert [found["started"] for found in rows] == days(3)
    for files in ([both, two], [two, both], [one, two, three], [joined(tmp_path, "all", both, two)]):
        assert speeds_of(bench_step.join(files)) == {"main": 100_002.0}
    later = "main stands in more than one piece; the later measurement is shown."
    assert later in bench_step.join([both, two]).notes
    alone = joined(tmp_path, "alone", three)
    assert later not in bench_step.join([alone, three]).notes  # it is one measurement


def test_the_later_of_two_in_other_time_zones(tmp_path):
    utc = piece(tmp_path, "utc", [row("main", 1.0)], "2026-11-01T23:30:00+00:00")
    east = piece(tmp_path, "east", [row("main", 2.0)], "2026-11-02T00:10:00+02:00")  # 22:10 in UTC
    assert speeds_of(bench_step.join([utc, east])) == {"main": 1.0}


BROKEN = {"name": "plain", "status": "error", "reason": "out of memory", "overrides": ["experiment=main"]}


def test_what_a_later_piece_has_measured_is_missing_no_more(tmp_path):
    first, second = days(1, 2)
    half = piece(tmp_path, "half", [row("main"), BROKEN], first, complete=False)
    old = joined(tmp_path, "old", half)
    assert json.loads(old.read_text())["complete"] is False
    assert json.loads(old.read_text())["notes"] == ["Missing here: plain (error)."]
    rest = piece(tmp_path, "rest", [row("plain")], second)
    for files in ([half, rest], [old, rest]):
        steps = bench_step.join(files)
        assert steps.as_json()["complete"] is True and steps.notes == ()


def test_a_call_that_was_stopped_may_lack_builds_that_nobody_names(tmp_path):
    first, second = days(1, 2)
    killed = {"name": "plain", "status": None, "overrides": ["experiment=main"]}
    for rows in ([row("main"), killed], [row("main")]):
        cut = piece(tmp_path, "cut", rows, first, complete=False)
        steps = bench_step.join([cut, piece(tmp_path, "rest", [row("plain")], second)])
        assert steps.as_json()["complete"] is False
        assert steps.notes == (f"{cut} ended before its time: what it had not reached is missing here.",)


def test_commits_are_those_of_the_rows_that_are_shown(tmp_path):
    one = piece(tmp_path, "one", [row("main", 1.0)], days(1)[0])
    two = piece(tmp_path, "two", [row("main", 2.0), row("plain")], days(2)[0], commit="b" * 40)
    assert not any("different commits" in note for note in bench_step.join([one, two]).notes)
    three = piece(tmp_path, "three", [row("plain", 3.0)], days(3)[0], commit="c" * 40)
    again = bench_step.join([joined(tmp_path, "all", one, two), three])
    (note,) = [note for note in again.notes if "different commits" in note]
    assert "bbbbbbb" in note and "ccccccc" in note and "aaaaaaa" not in note


LARGE = ["experiment=main", "train.micro_batch_tokens=131072"]


def test_one_name_with_other_overrides_is_another_build(tmp_path):
    old = piece(tmp_path, "old", [row("main", 170_000.0), row("plain", 200_000.0)], overrides=["experiment=main"])
    builds = [row("plain", 220_000.0, overrides=LARGE), row("peer", 100_000.0, overrides=LARGE)]
    new = piece(tmp_path, "new", builds, "2026-11-29T11:00:00+00:00", overrides=LARGE)
    steps = bench_step.join([old, new])
    speeds = {build.name: build.number("tokens_per_second", "median") for build in steps.builds}
    large = "plain (train.micro_batch_tokens=131072)"
    assert speeds == {"main": 170_000.0, "plain": 200_000.0, large: 220_000.0, "peer": 100_000.0}
    assert not any("more than one piece" in note for note in steps.notes)
    (note,) = [note for note in steps.notes if note.startswith("Not all pieces share all overrides.")]
    assert f"{new}: train.micro_batch_tokens=131072" in note and str(old) not in note
    paths = bench_step_page.write([old, new], tmp_path / "page")
    text = paths[0].read_text()
    assert f"| {large} (a build) |" in text and "| plain (a build) |" in text and f"| {large} | cold |" in text
    assert f"{large} trains 2.20 times as many tokens a second as the peer." in text
    joined = json.loads(paths[2].read_text())
    assert joined["overrides"] == ["experiment=main"]  # what all builds share
    assert [build["name"] for build in joined["builds"]] == ["main", "plain", "plain", "peer"]
    again = bench_step.join([paths[2]])
    assert [build.name for build in again.builds] == [build.name for build in steps.builds]


def test_only_what_holds_tells_builds_apart(tmp_path):
    twice = ["train.micro_batch_tokens=32768", *LARGE]  # of two words for one setting the last one holds
    builds = [
        row("plain", 210_000.0, overrides=twice),
        row("main", 180_000.0, overrides=["experiment=main", "optim.lr=1"]),
    ]
    builds += [row("main", 181_000.0, overrides=["experiment=main", "optim.lr=2"])]
    first = piece(tmp_path, "first", [row("plain", 220_000.0, overrides=LARGE[::-1])])
    steps = bench_step.join([first, piece(tmp_path, "second", builds, "2026-11-29T11:00:00+00:00")])
    assert [(build.name, build.number("tokens_per_second", "median")) for build in steps.builds] == [
        ("plain", 210_000.0), ("main (optim.lr=1)", 180_000.0), ("main (optim.lr=2)", 181_000.0),
    ]  # fmt: skip


def test_a_plus_before_a_setting_makes_no_other_build(tmp_path):
    words = (["+train.seed=1"], ["train.seed=1"], ["++train.seed=1"], ["++train.seed=2", "train.seed=1"])
    pieces = [
        piece(tmp_path, f"p{n}", [row("main", 1.0 + n, overrides=own)], started, overrides=own)
        for n, (own, started) in enumerate(zip(words, days(1, 2, 3, 4), strict=True))
    ]
    steps = bench_step.join(pieces)
    assert speeds_of(steps) == {"main": 4.0} and not any("overrides" in note for note in steps.notes)


def test_one_that_broke_with_other_overrides_stands_beside_the_one_that_was_timed(tmp_path):
    broken = {"name": "plain", "status": "error", "reason": "out of memory", "overrides": LARGE}
    steps = bench_step.join([piece(tmp_path, "one", [row("plain"), broken])])
    assert [(build.name, build.timed) for build in steps.builds] == [
        ("plain", True), ("plain (train.micro_batch_tokens=131072)", False),
    ]  # fmt: skip


def test_recorded_is_compared_with_launched_of_the_same_overrides(tmp_path):
    def builds(words, fast):
        return [row("main recorded", fast, recorded=True, overrides=[*words, "train.record=true"]),
                row("main launched", 150_000.0, recorded=False, overrides=[*words, "train.record=false"])]  # fmt: skip

    text = markdown_of(tmp_path, [*builds(["experiment=main"], 165_000.0), *builds(LARGE, 180_000.0)])
    assert "main: recorded trains 10 % more tokens a second." in text
    assert "main (train.micro_batch_tokens=131072): recorded trains 20 % more tokens a second." in text


def test_the_peer_is_compared_with_builds_of_its_size_alone(tmp_path):
    def work(layers, context):
        return {"micro_batch_tokens": 65536, "layers": layers, "context": context}

    sizes = {"plain": (20, 4096), "layers_8": (8, 4096), "context_1k": (20, 1024)}
    builds = [row(name, work=work(*size)) for name, size in sizes.items()]
    text = markdown_of(tmp_path, [*builds, row("peer", 100_000.0, work=work(20, 4096))])
    assert text.count("times as many tokens a second as the peer") == 1 and "plain trains 2.00 times" in text


def test_the_page_says_what_was_measured(tmp_path):
    builds = [
        row("plain"),
        row(
            "peer",
            100_000.0,
            profile=None,
            second_start=None,
            peer={
                "parameters": 324_391_928,
                "attention": "FlashAttention-2",
                "compiled": False,
                "not_compiled_because": "a bug",
            },
        ),
    ]
    builds.append({"name": "window", "status": "error", "reason": "out of memory | now", "overrides": []})
    text = markdown_of(tmp_path, builds)
    assert "200,000 (1,500)" in text and "35 %" in text
    assert "plain trains 2.00 times as many tokens a second as the peer." in text
    assert "| plain | cold | 80.0 |" in text and "| plain again | warm | 27.0 |" in text
    assert "sw_power_cap 90 %" in text and "1,500 to 1,980" in text and "3.40 (0.10)" in text
    assert "| mlp up | 700 (70 %) |" in text and "| idle | 30.0 |" in text and "| whole step | 750 |" in text
    assert "plain: the floors of all classes add up to 490 of 750 ms." in text
    assert "324,391,928 parameters; FlashAttention-2; not compiled: a bug" in text
    assert "| window | error | out of memory \\| now |" in text


def test_recorded_is_compared_with_launched_by_the_spread_of_both(tmp_path):
    builds = [row("main recorded", 180_000.0, recorded=True), row("main launched", 179_000.0, recorded=False),
              row("plain recorded", 231_000.0, recorded=True), row("plain launched", 210_000.0, recorded=False)]  # fmt: skip
    text = markdown_of(tmp_path, builds)
    assert "main: recorded and launched lie within the ranges of their runs." in text
    assert "plain: recorded trains 10 % more tokens a second." in text
    assert "| main recorded (a build) | yes | 180,000 (1,500) |" in text


def markdown_of(tmp_path, builds):
    return bench_step_page.write([piece(tmp_path, "one", builds)], tmp_path / "out")[0].read_text()


def test_a_page_of_a_cpu_leaves_out_what_nobody_measured(tmp_path):
    bare = row("main", mfu=None, energy_j_per_token=None, peak_memory_bytes=None, profile=None, second_start=None,
               runs=[{"tokens_per_second": 1.0}] * 3, not_measured="a CPU: no power")  # fmt: skip
    text = markdown_of(tmp_path, [bare])
    assert "Sustained speed" in text and "Power and clock" not in text and "Where the time goes" not in text
    assert "a CPU: no power" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is of format 2, and this version reads format 1"),
        ({"kind": "day0"}, "not a report of `dwslm bench step`"),
        ({"builds": [{"status": "ok"}]}, "`builds` is no list of named builds"),
        ({"builds": [{"name": "a", "status": "fine"}]}, "status 'fine' is none of ok"),
        ({"overrides": "a=b"}, "`overrides` is no list of settings"),
        ({"builds": [row("main", overrides="a=b")]}, "main: `overrides` is no list of settings"),
        ({"builds": [row("main", config=[])]}, "main: `config` is no object"),
        ({"builds": [row("main", work="65536")]}, "main: `work` is no object"),
        ({"builds": [row("main", runs=[None])]}, "main: `runs` is no list of objects"),
        ({"builds": [row("main", peer={})]}, "main: `peer` lacks one of parameters, attention, compiled"),
        (
            {"builds": [row("main", profile={"classes": [{"class": "mlp up"}]})]},
            "`profile.classes` is no list of objects with",
        ),
        (
            {"builds": [row("main", profile={"kernels": [{"class": "a", "kernel": "b", "ms": "1", "count": 1}]})]},
            "`profile.kernels` is no list of objects with kernel, class, ms, count",
        ),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(change, message, tmp_path):
    with pytest.raises(ValueError, match=message.replace("`", ".")) as caught:
        bench_step.join([piece(tmp_path, "wrong", **{"builds": [], **change})])
    assert "wrong.json" in str(caught.value)


def test_a_row_without_classes_has_no_section_of_them(tmp_path):
    text = markdown_of(tmp_path, [row("main", profile={}, runs=[{"health": {"throttle_reasons": None}}] * 3)])
    assert "| main (a build) |" in text and "Where the time goes" not in text and "## Kernels" not in text


def test_one_page_is_one_device_and_one_kind(tmp_path):
    one, two = piece(tmp_path, "one", []), piece(tmp_path, "two", [], device="NVIDIA H100")
    with pytest.raises(ValueError, match="one page is one device"):
        bench_step.join([one, two])
    capped = piece(tmp_path, "three", [], machine={"device": "NVIDIA H200", "clock_cap_mhz": 1500})
    with pytest.raises(ValueError, match="one page is one clock cap"):
        bench_step.join([one, capped])
    torn = tmp_path / "torn.json"
    torn.write_text('{"kind": "step", ')
    assert bench_step.is_step(one) and not bench_step.is_step(torn)
    with pytest.raises(ValueError, match=r"torn.json: not whole JSON"):
        bench_step.join([one, torn])
