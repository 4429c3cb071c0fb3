"""Settings stand wherever a user puts them; what is no setting is named."""

import argparse

import pytest

from dwslm.cli import bench_step, data_mix, demo, parse, preflight, scale


def parser(add):
    made = argparse.ArgumentParser()
    commands = made.add_subparsers(required=True)
    add(commands.add_parser("it") if add.__name__ != "add_parser" else commands)
    return made


ADD = {
    "step": bench_step.add_arguments,
    "mix": data_mix.add_arguments_mix,
    "demo": demo.add_parser,
    "preflight": preflight.add_parser,
    "scale": scale.add_parser,
}
OPTION = {"step": ["--warm", "3"], "mix": ["--json"], "demo": [], "preflight": [], "scale": ["--vocab", "512"]}


@pytest.mark.parametrize("command", ADD)
def test_settings_before_between_and_after_options(command):
    made, name = parser(ADD[command]), command if ADD[command].__name__ == "add_parser" else "it"
    words = [name, "a=1", *OPTION[command], "b=2", "c=[x,y]"]
    assert parse(made, words).overrides == ["a=1", "b=2", "c=[x,y]"]
    assert parse(made, [name, *OPTION[command], "b=2"]).overrides == ["b=2"]


@pytest.mark.parametrize("word", ["--waarm=3", "-x"])
def test_what_is_no_setting_is_refused(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(parser(bench_step.add_arguments), ["it", "a=1", "--warm", "3", "b=2", word])
    assert f"unrecognized arguments: b=2 {word}" in capsys.readouterr().err


def test_a_command_without_settings_refuses_them(capsys):
    made = argparse.ArgumentParser()
    made.add_argument("--x")
    with pytest.raises(SystemExit, match="2"):
        parse(made, ["a=1"])
    assert "unrecognized arguments: a=1" in capsys.readouterr().err
