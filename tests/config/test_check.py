"""What a composed configuration may hold: every name must be a setting, every value of the setting's kind."""

import argparse
import dataclasses
import typing

import pytest
from hydra import compose, initialize_config_dir

from dwslm.cli import data_mix, preflight, queue_search
from dwslm.config import CONFIGS, RunConfig, ScoreConfig, register, to_object, to_request
from dwslm.config.check import names, unknown

PROGRAMS = {"train.py": ("config", RunConfig), "eval.py": ("score", ScoreConfig)}


def composed(program: str, *words: str):
    register()
    name, kind = PROGRAMS[program]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_object(compose(name, overrides=list(words)), kind)


def parts(kind: type, prefix: str = ""):
    """Every dataclass of settings that has a name of its own, with that name."""
    yield prefix, kind
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from parts(inner, f"{prefix}{name}.")


PARTS = [(program, prefix, kind) for program, (_, root) in PROGRAMS.items() for prefix, kind in parts(root)]


@pytest.mark.parametrize("plus", ["+", "++"])
@pytest.mark.parametrize(("program", "prefix", "kind"), PARTS)
def test_a_name_that_a_part_lacks_is_refused_with_the_nearest_whatever_stands_before_it(program, prefix, kind, plus):
    known = max((field.name for field in dataclasses.fields(kind)), key=len)
    name = f"{prefix}{known[:-2]}{known[-1]}{known[-2]}"  # its last two letters swapped
    with pytest.raises(ValueError, match="unknown setting") as told:
        composed(program, f"{plus}{name}=1")
    assert str(told.value) == f"unknown setting {name}: did you mean {prefix}{known}?"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_name_that_is_like_none_is_refused_with_where_all_are(program):
    with pytest.raises(ValueError, match=r"^unknown setting zzz; see docs/settings\.md$"):
        composed(program, "+zzz=1")


def test_keys_of_the_users_own_are_taken():
    config = composed("train.py", "+data.mixture.weights={books: 1, web/en: 2}", "+data.mixture.max_epochs.every=4",
                      "++data.mixture.rephrased={new: old}", "data.mixture.phases=[{start: 0.5, scale: {books: 2}}]")  # fmt: skip
    assert config.data.mixture.weights == {"books": 1.0, "web/en": 2.0} and config.data.mixture.max_epochs == {
        "every": 4
    }
    assert config.data.mixture.rephrased == {"new": "old"} and config.data.mixture.phases[0].scale == {"books": 2}


def test_a_resume_with_a_name_that_is_none_is_refused_and_values_are_not_looked_at():
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        given = [compose("config", overrides=["resume=x", word]) for word in ("+train.log_evry=3", "train.log_every=0")]
    with pytest.raises(ValueError, match=r"^unknown setting train.log_evry: did you mean train.log_every\?$"):
        to_request(given[0])
    assert to_request(given[1])["train"]["log_every"] == 0


WRONG = "+data.mixture.wieghts={books: 1}"
TOLD = r"^unknown setting data\.mixture\.wieghts: did you mean data\.mixture\.weights\?$"


def test_whoever_composes_a_run_refuses_it():
    with pytest.raises(ValueError, match=TOLD):
        data_mix.composed([WRONG], None)
    with pytest.raises(ValueError, match=TOLD):
        preflight.composed([WRONG], None)

    class Study:
        def ask(self):
            return None

    with pytest.raises(ValueError, match=TOLD):
        queue_search.propose(Study(), [], argparse.Namespace(words=[WRONG], study="s", priority=0), None)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.pattern=[{}]", "model.pattern[0]={} must be a word"),
        ("model.pattern=[local,[global]]", "model.pattern[1]=['global'] must be a word"),
        ("proxy.varies=[{}]", "proxy.varies[0]={} must be a word"),
        ("proxy.varies=[[1]]", "proxy.varies[0]=[1] must be a word"),
        ("data.mixture.anneal.sources=[{}]", "data.mixture.anneal.sources[0]={} must be a word"),
        ("checkpoint.pin_fractions=[0.5,{}]", "checkpoint.pin_fractions[1]={} must be a number"),
        ("evaluate.bands=[[1]]", "evaluate.bands[0]=[1] must be a whole number"),
        ("+data.mixture.weights={books: {a: 1}}", "data.mixture.weights.books={'a': 1} must be a number"),
        ("+data.mixture.rephrased={a: [b]}", "data.mixture.rephrased.a=['b'] must be a word"),
        (
            "data.mixture.phases=[{start: 0.5, scale: {books: [1]}}]",
            "data.mixture.phases[0].scale.books=[1] must be a number",
        ),
    ],
)
def test_a_list_or_dictionary_where_one_value_belongs_is_named(word, message):
    with pytest.raises(ValueError, match="must be") as told:
        composed("train.py", word)
    assert str(told.value) == message


def test_lists_of_words_and_numbers_are_all_looked_into():
    inside = [f"{prefix}{name}" for program, prefix, kind in PARTS for name, inner in typing.get_type_hints(kind).items()
              if program == "train.py" and typing.get_origin(inner) is list
              and not dataclasses.is_dataclass(typing.get_args(inner)[0])]  # fmt: skip
    assert "model.pattern" in inside and "evaluate.bands" in inside
    for name in inside:
        with pytest.raises(ValueError, match=rf"^{name}\[0\]={{}} must be a "):
            composed("train.py", f"{name}=[{{}}]")


def of_kind(wanted: type):
    """(program, setting) of every setting that may hold such a value."""
    return [
        (program, f"{prefix}{name}")
        for program, prefix, kind in PARTS
        for name, inner in typing.get_type_hints(kind).items()
        if wanted in (inner, *(typing.get_args(inner) if typing.get_origin(inner) not in (list, dict) else ()))
    ]


@pytest.mark.parametrize(("program", "name"), of_kind(float))
def test_every_number_must_be_finite(program, name):
    for value in ("-inf", "nan"):
        with pytest.raises(ValueError, match=rf"^{name}={value} must be a finite number"):
            composed(program, f"{name}={value}")


@pytest.mark.parametrize(("program", "name"), of_kind(int))
def test_every_whole_number_must_fit_64_bits(program, name):
    for value in (2**63, -(10**40)):
        with pytest.raises(ValueError, match=rf"^{name}={value} is out of range: whole numbers go up to {2**63 - 1}$"):
            composed(program, f"{name}={value}")


def test_numbers_inside_lists_and_dictionaries_are_finite_and_fit():
    for word, message in {
        "checkpoint.pin_fractions=[nan]": r"checkpoint.pin_fractions\[0\]=nan must be a finite number",
        f"evaluate.bands=[2,{2**64}]": r"evaluate.bands\[1\]=18446744073709551616 is out of range",
        "+data.mixture.weights.books=inf": "data.mixture.weights.books=inf must be a finite number",
    }.items():
        with pytest.raises(ValueError, match=message):
            composed("train.py", word)


def test_the_nearest_name():
    assert unknown("lr", RunConfig) == "unknown setting lr: did you mean optim.lr?"
    assert unknown("trian.tokens", RunConfig) == "unknown setting trian.tokens: did you mean train.tokens?"
    assert unknown("optim.seed", RunConfig) == "unknown setting optim.seed: did you mean train.seed?"
    assert unknown("experimnt", RunConfig) == "unknown setting experimnt: did you mean experiment?"
    assert unknown("evaluate.foo", RunConfig) == "unknown setting evaluate.foo; see docs/settings.md"
    assert "experiment" not in names(ScoreConfig) and {"data.mixture", "model.rope.theta"} <= set(names(RunConfig))
