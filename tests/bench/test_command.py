"""`dwslm bench` as a user types it."""

import json
import sys

import pytest

from dwslm.bench.request import OPS
from dwslm.cli import bench, main


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dwslm", *arguments])
    main()


def test_the_command_knows_every_operation():
    assert bench.OPS == OPS  # written twice, so that --help need not import torch


def test_day0_on_a_cpu_at_small_sizes(tiny_data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "day0.json"
    sizes = ["--tokens", "128", "--contexts", "128", "--heads", "1", "--repeats", "1", "--device", "cpu"]
    command(monkeypatch, "bench", "day0", "--data", str(tiny_data), "--out", str(out), *sizes)
    plain = json.loads(out.read_text())
    assert plain["kind"] == "day0" and plain["complete"] and plain["command"].startswith("dwslm bench day0 --data")
    assert plain["versions"]["torch"] and plain["machine"]["cpu"]
    said = capsys.readouterr().out
    assert "no GPU: the CPU forms" in said and f"seed {plain['seed']}" in said
    assert "dwslm bench report" in said
    page = tmp_path / "page"
    command(monkeypatch, "bench", "report", str(out), "--out", str(page))
    assert (page / "report.md").is_file() and (page / "report.html").is_file()


def test_one_operation_alone(tiny_data, tmp_path, monkeypatch):
    out = tmp_path / "norm.json"
    sizes = [
        "--tokens",
        "128",
        "--contexts",
        "128",
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--seed",
        "7",
        "--clock-cap",
        "1500",
    ]
    command(monkeypatch, "bench", "norm", "--data", str(tiny_data / "train"), "--out", str(out), *sizes)
    plain = json.loads(out.read_text())
    assert {row["op"] for row in plain["rows"]} == {"norm"} and plain["kind"] == "norm"
    assert plain["seed"] == 7 and plain["machine"]["clock_cap_mhz"] == 1500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere is no prepared dataset"),
        (["--tokens", "100", "--contexts", "64"], "100 tokens are not a whole number of rows of 64"),
        (["--engines", "nothing"], "no engine of that name"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tiny_data, tmp_path, monkeypatch, capsys):
    data = [] if "--data" in arguments else ["--data", str(tiny_data)]
    sizes = [] if "--tokens" in arguments else ["--tokens", "128", "--contexts", "128"]
    with pytest.raises(SystemExit, match="1"):
        command(
            monkeypatch,
            "bench",
            "norm",
            *data,
            *sizes,
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "x.json"),
            *arguments,
        )
    (last,) = capsys.readouterr().err.strip().splitlines()
    assert message in last
