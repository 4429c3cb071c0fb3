"""One line of what Hydra, OmegaConf and YAML raise, at the command lines themselves."""

import runpy
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from dwslm.cli.errors import one_line_errors
from dwslm.cli.queue import REPOSITORY
from dwslm.config import CONFIG_ERRORS, CONFIGS, RunConfig, ScoreConfig, explain, register, to_object

HEADER = "# @package _global_\n"


def said(capsys, *words: str, folder=None, program: str = "train.py") -> str:
    """The line that a command with these words leaves with."""
    register()
    search = [f"hydra.searchpath=[file://{folder}]"] if folder else []
    name, kind, wanted = (
        ("config", RunConfig, "experiment") if program == "train.py" else ("score", ScoreConfig, "checkpoint")
    )
    with (
        pytest.raises(SystemExit) as left,
        one_line_errors(wanted),
        initialize_config_dir(str(CONFIGS), version_base="1.3"),
    ):
        to_object(compose(name, overrides=[*search, *words]), kind)
    told = capsys.readouterr().err
    assert left.value.code == 1 and told.startswith("error: ") and told.count("\n") == 1
    return told.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def experiment(tmp_path, capsys):
    """What an experiment file of one's own is answered with."""

    def start(text: str | bytes) -> str:
        (tmp_path / "experiment").mkdir(exist_ok=True)
        (tmp_path / "experiment" / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return said(capsys, "experiment=mine", folder=tmp_path)

    return start


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("name: x\ntrain:\n  seed: 3\n tokens: 4\n", 5, "expected <block end>"),
        ("name: [x\n", 3, "expected ',' or ']'"),
        ("name: x\nname: y\n", 3, "duplicate key name"),
        ("name: 'x\n", 3, "found unexpected end of stream"),
        ("name: x\n\ttrain: 3\n", 3, "cannot start any token"),
    ],
)
def test_a_file_that_is_not_yaml_is_named_with_the_line(experiment, tmp_path, text, line, problem):
    told = experiment(HEADER + text)
    assert told.startswith(f"{tmp_path}/experiment/mine.yaml, line {line}: not YAML") and problem in told


def test_a_file_that_holds_no_text_is_named(experiment, tmp_path):
    assert experiment(f'{HEADER}name: "\x01"\n').startswith(
        f"{tmp_path}/experiment/mine.yaml: not YAML: character 28 is"
    )
    assert "is no UTF-8 text" in experiment(HEADER.encode() + b"name: \xff\n")


@pytest.mark.parametrize(
    "text", ["", "name: x\n", "train:\n  seed: 3\n", "# @package _gloabl_\nname: x\n", "# mine\n\n"]
)
def test_a_file_without_its_first_line_is_told_which(experiment, text):
    assert experiment(text).startswith("the first line of experiment/mine.yaml must be # @package _global_")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  sed: 3\n", "train.sed in experiment/mine.yaml: did you mean train.seed?"),
        ("trian:\n  seed: 3\n", "trian in experiment/mine.yaml: did you mean train?"),
        (
            "data:\n  mixture:\n    wieghts: {books: 1}\n",
            "data.mixture.wieghts in experiment/mine.yaml: did you mean data.mixture.weights?",
        ),
        ("zzz: 3\n", "zzz in experiment/mine.yaml; see docs/settings.md"),
        (
            "data:\n  mixture:\n    phases:\n      - start: 0.5\n        scael: {books: 2}\n",
            "scael in experiment/mine.yaml: did you mean scale?",
        ),
    ],
)
def test_a_misspelt_name_in_a_file_is_told_with_the_file_and_the_nearest(experiment, text, expected):
    assert experiment(HEADER + text) == f"unknown setting {expected}"


def test_a_value_of_another_kind_in_a_file_is_told_with_the_file(experiment):
    assert experiment(f"{HEADER}train: 3\n").startswith("experiment/mine.yaml: ")
    assert experiment(f"{HEADER}- a\n").startswith("experiment/mine.yaml: ")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "data.mixture.phases=[{start: 0.5, scael: {books: 2}}]",
            "unknown setting scael in data.mixture.phases: did you mean scale?",
        ),
        (
            "data.packing.ladder=[{start: 0.5, kontext: 512}]",
            "unknown setting kontext in data.packing.ladder: did you mean context?",
        ),
        (
            "data.packing.ladder=[{start: 0.5, zz: 512}]",
            "unknown setting zz in data.packing.ladder: there are start, context, segments_per_row",
        ),
        ("train={sed: 3}", "unknown setting train.sed: did you mean train.seed?"),
        ("+train={sed: 3}", "unknown setting train.sed: did you mean train.seed?"),
        (
            "data.mixture.weights.books=1",
            "data.mixture.weights.books: a key of a dictionary is given with a plus, +data.mixture.weights.books=VALUE",
        ),
        ("é=3", "unknown setting é; see docs/settings.md"),
        ("experiment={a: 3}", "the value of experiment must be a file's name in configs/experiment"),
        ("optim.lr=1" + 400 * "0", "optim.lr: int too large to convert to float"),
        ("", "the command line holds an empty word: leave it out, or give a setting as name=value"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_line(capsys, word, expected):
    assert said(capsys, word) == expected


@pytest.mark.parametrize("value", ["é中", "/tmp/odü", "a=b", "a=b=c", 'ä"b', "x\\ü", "ü\\", 'ü\\"x', "it's=b", "a;b"])
@pytest.mark.parametrize("name", ["name", "data.path", "++name"])
def test_a_value_that_must_be_quoted_is_told_how_and_is_taken_so(capsys, name, value):
    told = said(capsys, f"{name}={value}")
    begin, _, way_out = told.partition(" must be quoted: ")
    assert begin == f"the value of {name}={value}" and "http" not in told
    word = subprocess.run(
        ["sh", "-c", f"printf %s {way_out}"], capture_output=True, text=True
    ).stdout  # as a shell reads it
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = to_object(compose("config", overrides=[word]), RunConfig)
    assert (config.data.path if name == "data.path" else config.name) == value


@pytest.mark.parametrize("word", ["name='a", 'name="a', "name=[é]", "name={a: b", "data.mixture.phases=[{start: 0.5}"])
def test_brackets_and_quotes_that_stay_open_are_told(capsys, word):
    told = said(capsys, word)
    assert told.startswith(f"{word} does not read as a value: ") and "http" not in told


@pytest.mark.parametrize("word", ["=3", "+=3", "~=3", "experiment=3", "experiment=true", "test=3", "test=null", "@=3"])
def test_a_word_without_a_name_or_a_group_without_a_file(capsys, monkeypatch, word):
    monkeypatch.setattr(sys, "argv", ["train.py", "experiment=main", "name=x", word])
    assert said(capsys, "experiment=main", word).startswith(f"{word}: a setting is name=value")


def test_settings_of_a_scoring(capsys):
    assert (
        said(capsys, "evaluate.sed=1", program="eval.py") == "unknown setting evaluate.sed: did you mean evaluate.seed?"
    )
    assert (
        said(capsys, "train.seed=1", program="eval.py") == "train.seed is a setting of train.py; see docs/settings.md"
    )
    assert said(capsys, "text=x") == "text is a setting of eval.py; see docs/settings.md"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "=3"], "=3: a setting is name=value"),
        (["train.py", "+optim.lrr=0.5"], "unknown setting optim.lrr: did you mean optim.lr?"),
        (["eval.py", "+evaluate.foo=1"], "unknown setting evaluate.foo; see docs/settings.md"),
        (["train.py", "name=é中"], "the value of name=é中 must be quoted: 'name=\"é中\"'"),
        (["train.py", "--config-dir", ".", "experiment=mine"], "./experiment/mine.yaml, line 2: not YAML"),
    ],
)
def test_the_entry_points_leave_with_it(tmp_path, words, expected):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{HEADER}a: b: c\n")
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / words[0]), *words[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.replace(str(tmp_path), ".").startswith(f"error: {expected}")


def test_what_is_no_mistake_of_the_user_is_not_told_as_one(tmp_path):
    library = tmp_path / "hydra" / "fault.py"  # a folder of that name makes it none of Hydra's
    library.parent.mkdir()
    library.write_text("raise ValueError('theirs')")
    with pytest.raises(ValueError, match="theirs"), one_line_errors():
        runpy.run_path(str(library))
    with pytest.raises(TypeError), one_line_errors():
        raise TypeError("ours")
    with pytest.raises(OverflowError), one_line_errors():
        raise OverflowError("ours")
    assert not issubclass(TypeError, CONFIG_ERRORS) and explain(ValueError("a"), words=["name=3"]) == "a"
