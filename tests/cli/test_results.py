"""`dwslm results`, as a user calls it."""

import sys
from pathlib import Path

import pytest

from dwslm import cli
from tests.runs.made import make_run


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dwslm", "results", *words, "--runs-dir", str(tmp_path / "runs")])
        cli.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    ids = []
    for arm, score in (("kda", 1.313), ("gdn", 1.342)):
        for seed in (0, 1):
            run = make_run(
                tmp_path / "runs", arm, losses=[3.0, 2.0], scores={2: score + seed / 1000}, seed=seed,
                settings={"proxy": {"test": "local-layers", "arm": arm}},
            )  # fmt: skip
            ids.append(run.id)
    path = tmp_path / "decisions.toml"
    path.write_text(
        '[[decision]]\ntest = "local-layers"\ntitle = "local [layers]"\nresult = "Kimi Delta 1.313, Gated DeltaNet 1.342"\n'
        f'decision = "Kimi Delta"\nnumber = "K12"\nruns = {ids}\nwinner = "{ids[0]}"\nfigures = [\n'
        f'{{ printed = "1.313", run = "{ids[0]}", metric = "bits_per_byte" }},\n'
        f'{{ printed = "1.342", run = "{ids[2]}", metric = "bits_per_byte" }}]\n'
    )
    return path


def test_ls_and_show(call, file: Path) -> None:
    out = call("ls", "--file", str(file))
    assert "local [layers]" in out and "K12" in out
    out = call("show", "local-layers", "--file", str(file))
    assert (
        "decision: Kimi Delta" in out
        and "Verdict: kda is better by tokens and by hours." in out
        and "problem" not in out
    )


def test_check_passes_and_fails(call, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "--file", str(file)) == "1 decisions, 2 figures agree with their runs, 0 have a source\n"
    file.write_text(file.read_text().replace("1.342", "1.352"))
    with pytest.raises(SystemExit) as left:
        call("check", "--file", str(file))
    told = capsys.readouterr()
    assert left.value.code == 1 and f"error: {file}: 1 problems in 1 decisions" in told.err
    assert "figure 2: bits_per_byte of" in told.out and "is printed as 1.352, found 1.342" in told.out


def test_verdict_of_a_test_and_value_of_a_run(call, file: Path) -> None:
    assert "Verdict: kda is better" in call("verdict", "local-layers")
    assert call("value", "latest", "record.seed") in ("0.0\n", "1.0\n")
    assert float(call("value", "latest", "bits_per_byte", "--step", "2")) > 1.3


def test_a_test_that_is_not_there(call, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("show", "nothing", "--file", str(file))
    assert "no test 'nothing'; it holds local-layers" in capsys.readouterr().err
