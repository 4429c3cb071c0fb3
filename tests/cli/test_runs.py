"""`dwslm runs`, as a user calls it."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from dwslm import cli
from dwslm.cli.runs import differences, follow
from dwslm.cli.runs_tables import runs_table
from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.summary import summaries
from dwslm.runs.writer import RunWriter
from tests.runs.made import make_run

MARKUP = '[red]<b onclick="x">&amp;[/red] [/]'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def dwslm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What the command prints."""
    monkeypatch.setattr(sys, "argv", ["dwslm", *words])
    cli.main()
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The one line that it says instead."""
    with pytest.raises(SystemExit) as left:
        dwslm(capsys, monkeypatch, *words)
    assert left.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.fixture
def call(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*words: str) -> str:
        return dwslm(capsys, monkeypatch, "runs", *words, "--runs-dir", str(root))

    return run


def test_ls_filters_and_says_what_it_cannot_read(root: Path, call) -> None:
    make_run(
        root,
        "one",
        losses=[3.0, 2.0],
        scores={2: 1.25},
        created=1000.0,
        settings={"proxy": {"test": "lr", "arm": "half"}},
    )
    make_run(root, "two", losses=[3.0], created=2000.0, end="paused")
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    out = call("ls")
    assert out.startswith("2 runs, 1 folders unreadable") and "broken: " in out
    assert out.index("two") < out.index("one") and "1.2500" in out and "lr / half" in out and "200 (100 %)" in out
    assert "one" not in call("ls", "--state", "paused") and "two" not in call("ls", "--test", "lr")
    assert "one" not in call("ls", "--limit", "1")


def test_names_stay_text_and_may_be_long(root: Path, call) -> None:
    """Markup, and ten thousand letters."""
    make_run(root, MARKUP, losses=[3.0], settings={"proxy": {"test": MARKUP, "arm": MARKUP}})
    long = make_run(root, "x" * 10_000, losses=[3.0], created=2000.0)
    assert len(long.path.name) < 100
    for words in (["ls"], ["show", make_run(root, MARKUP, losses=[1.0], created=3.0).id]):
        out = call(*words)
        letters = "".join(part for part in out if part not in " │\n")  # cells wrap
        assert MARKUP.replace(" ", "") in letters
    out = call("ls")
    assert "x" * 20 in out and max(len(line) for line in out.splitlines()) <= 140
    assert "x" * 10_000 in call("show", long.id)


def test_names_do_not_steer_the_terminal(root: Path, call) -> None:
    run = make_run(root, "\x1b[31mred\x07 \u202edesrever", losses=[3.0])
    for words in (["ls"], ["show", run.id]):
        out = call(*words)
        assert "\ufffd[31mred\ufffd" in out and not {"\x1b", "\x07", "\u202e"} & set(out)


def test_show_puts_the_last_scores_beside_the_ones_before(root: Path, call) -> None:
    run = make_run(root, "a", losses=[3.0] * 4, scores={2: 1.5, 4: 1.25})
    out = call("show", run.id)
    assert "1.2500 at step 4" in out and "-0.2500" in out and "-0.7500" in out  # overall, and wiki in German
    assert out.index("done") < out.index("start")


def test_events_newest_first_by_kind(root: Path, call) -> None:
    run = make_run(root, "a", losses=[3.0])
    with RunWriter(run, 2) as writer:
        writer.event("skip", step=5, tokens=50, loss=float("nan"), reason="loss above its limit")
        writer.event("checkpoint", step=6, tokens=60, path="step-6", pinned=None)
    out = call("events", run.id)
    assert [out.index(word) for word in ("checkpoint", "skip", "done", "start")] == sorted(
        out.index(word) for word in ("checkpoint", "skip", "done", "start")
    )
    assert "loss=nan reason=loss above its limit" in out and "pinned" not in out
    only = call("events", run.id, "--kind", "skip", "--limit", "1")
    assert "1 of 1 events" in only and "checkpoint" not in only


def test_compare_ends_with_a_verdict(root: Path, call) -> None:
    ids = [
        make_run(root, f"{arm} {seed}", losses=[3.0] * 4, scores={4: score + seed / 100}, seed=seed,
                 settings={"model": {"local": arm}}).id
        for arm, score in (("kda", 1.30), ("gdn", 1.35)) for seed in (0, 1)
    ]  # fmt: skip
    out = call("compare", *ids)
    assert "+0.0500" in out and "Verdict: model.local=kda is better by tokens and by hours." in out
    assert "Verdict" not in call("compare", *ids[:2])


def test_diff_shows_settings_and_facts(root: Path, call) -> None:
    a, b = (
        make_run(
            root,
            name,
            losses=[1.0],
            settings={"optim": {"lr": 0.1 * (1 + other), "rule": "muonh"}},
            versions={"torch": f"2.{12 + other}"},
            engines={"MLP": "torch", "head": ("torch", "fused")[other]},
            lr=0.01 * (1 + other),
        )
        for other, name in enumerate("ab")
    )
    assert differences(a, b) == [
        ("name", "a", "b"), ("optim.lr", 0.1, 0.2), ("versions: torch", "2.12", "2.13"),
        ("engines: head", "torch", "fused"), ("lr", 0.01, 0.02),
    ]  # fmt: skip
    out = call("diff", a.id, b.id)
    assert "5 differences" in out and "optim.lr" in out and "muonh" not in out


def test_tags(root: Path, call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "a", losses=[1.0])
    before = (run.path / "run.json").read_bytes()
    assert call("tag", run.id, "keep", "best").endswith("keep, best\n")
    assert call("tag", run.id, "paper", "--remove", "best").endswith("keep, paper\n")
    assert call("tag", run.id).endswith("keep, paper\n")
    assert "keep" in call("ls", "--tag", "paper") and "keep" not in call("ls", "--tag", "best")
    assert (run.path / "run.json").read_bytes() == before
    assert "without commas" in refused(capsys, monkeypatch, "runs", "tag", run.id, "a,b", "--runs-dir", str(root))


def test_watch_follows_a_run_to_its_end(root: Path, call) -> None:
    run = make_run(root, "a", losses=[3.0], end=None, hardware={"host": "elsewhere"})

    def go_on() -> None:
        time.sleep(0.3)
        with RunWriter(run, 2) as writer:
            writer.event("resume", step=1, tokens=100)
            writer.metrics({"step": 2, "tokens": 200, "loss": 2.5})
            writer.event("done")

    going = threading.Thread(target=go_on)
    going.start()
    out = call("watch", run.id, "--every", "0.05").splitlines()
    going.join()
    assert [line.split(",")[0].split()[0] for line in out] == ["start", "step", "resume", "step", "done"]
    assert "loss 2.5000" in out[3]


def test_watch_all_tells_changes_of_state(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "a", losses=[3.0], end="paused")

    class Console:
        lines: list[str] = []

        def print(self, text: object) -> None:
            self.lines.append(str(text))

    def sleep(seconds: float) -> None:
        if len(Console.lines) == 2:
            raise KeyboardInterrupt
        with RunWriter(run, run.next_attempt()) as writer:
            writer.event("stopped", reason="enough")

    monkeypatch.setattr("dwslm.cli.runs.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        follow(Console(), None, root, 1.0)  # type: ignore[arg-type]
    assert Console.lines == [f"{run.path.name}: paused", f"{run.path.name}: stopped, enough"]


@pytest.mark.parametrize(("words", "expected"), [
    (["show", "nothing"], "no run 'nothing' in"), (["watch", "--every", "0"], "--every 0.0 must be above 0"),
    (["watch", "--every", "nan"], "--every nan must be above 0"), (["ls", "--limit", "-1"], "--limit -1 is below 0"),
    (["show", "a", "--events", "-1"], "--events -1 is below 0"), (["events", "a", "--limit", "-1"], "--limit -1 is below 0"),
    (["events", "a", "--kind", "nosuch"], "has no event nosuch: it has done, start"),
])  # fmt: skip
def test_mistakes_are_one_line(
    root: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(root, "a")
    assert expected in refused(capsys, monkeypatch, "runs", *words, "--runs-dir", str(root))


def test_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "name the folder of runs with --runs-dir" in refused(
        capsys, monkeypatch, "runs", "ls", "--runs-dir", str(tmp_path / "absent")
    )


def test_rows_that_are_not_numbers(root: Path, call) -> None:
    run: RunFolder = make_run(root, "a", losses=[float("nan"), float("inf")])
    text = (run.path / "metrics-1.jsonl").read_text()
    (run.path / "metrics-1.jsonl").write_text(text.replace("NaN", '"NaN"').replace(": Infinity", ': "Infinity"'))
    assert json.loads(text.splitlines()[0].replace("NaN", "0"))["step"] == 1
    assert len(reader.metrics(run)) == 2
    assert "nan" in call("ls") and "nan" in call("show", run.id)


def test_no_runs_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dwslm(capsys, monkeypatch, "runs", "ls") == "no runs yet in runs\n"


def test_a_narrow_terminal_cuts_neither_id_nor_state(root: Path) -> None:
    name = {"proxy": {"test": "learning rate", "arm": "half as much"}}
    ids = [
        make_run(root, "x" * 30, losses=[3.0] * 9, scores={2: 1.25}, settings=name, end=end).id
        for end in (None, "done")
    ]
    console = Console(width=80, soft_wrap=True)
    with console.capture() as caught:
        console.print(runs_table(summaries(root, 1e9), 0, 1e9))
    out = caught.get()
    assert all(f" {word} " in out for word in (*ids, "done", "lost"))
    assert "tags" not in out  # nobody has one
    assert max(len(line) for line in out.splitlines()) <= 80


def test_nested_facts_are_not_python(root: Path, call) -> None:
    run = make_run(root, "a", losses=[3.0] * 4, scores={2: 1.5})
    with RunWriter(run, 2) as writer:
        receipt = {"run": "runs/" + "x" * 90, "step": "2 of 4"}
        writer.event("resume", step=2, tokens=200, changed={"train.tokens": 512}, receipt=receipt)
        writer.event("resume", step=2, tokens=200, changed={})
    out = call("events", run.id)
    assert "changed (train.tokens=512) receipt (2 facts)" in out and "{" not in out
    scores = call("show", run.id).split("Bits per byte at step 2")[1]
    assert scores.index("overall") < scores.index("crossed")
