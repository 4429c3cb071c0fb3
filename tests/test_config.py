from dataclasses import asdict, replace

import pytest
from hydra import compose, initialize_config_dir

from dwslm.cli.settings import document
from dwslm.config import (
    CONFIG_ERRORS,
    CONFIGS,
    RunConfig,
    config_hash,
    explain,
    flatten,
    from_plain,
    register,
    resume_config,
    to_object,
    to_plain,
    unflatten,
)
from dwslm.train.plan import make_plan
from dwslm.train.report import rate


def composed(*overrides: str) -> RunConfig:
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_object(compose("config", overrides=list(overrides)), RunConfig)


def refused(*overrides: str) -> str:
    """The one line that these overrides give."""
    try:
        composed(*overrides)
    except CONFIG_ERRORS as error:
        return explain(error)
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize("experiment", ["demo", "proxy_8l", "main", "main_ladder", "main_anneal"])
def test_every_experiment_composes_and_survives_json(experiment):
    config = composed(f"experiment={experiment}")
    assert from_plain(to_plain(config)) == config
    assert unflatten(flatten(to_plain(config))) == to_plain(config)


def test_main_is_the_256m_model_as_designed():
    config = composed("experiment=main")
    assert (config.model.layers, config.model.width, config.model.mlp_hidden) == (20, 1024, 4096)
    assert [i + 1 for i, kind in enumerate(config.model.kinds()) if kind == "global"] == [4, 8, 12, 16, 20]
    assert config.model.local == "kda" and config.model.depth_block == 8
    assert config.train.batch_tokens == 524_288 and config.train.tokens == 23_000_000_000


@pytest.mark.parametrize("layers", [8, 20])
def test_the_rate_of_23b_tokens_prints_as_the_published_one_at_both_depths(layers):
    config = composed("experiment=main", f"model.layers={layers}")
    plan = make_plan(config.train, config.optim, config.checkpoint, config.data.packing.context)
    assert rate(plan.lr) == "3.7e-3"


def test_the_ladder_of_the_example_comes_out_in_whole_steps_and_rows():
    config = composed("experiment=main_ladder")
    packing = config.data.packing
    plan = make_plan(config.train, config.optim, config.checkpoint, packing.context, None, packing.ladder)
    assert [context for _, context in plan.rungs] == [
        512,
        4096,
        32768,
    ] and plan.context == packing.last_context == 32768
    assert [step for step, _ in plan.rungs] == [0, 8774, 39483]  # a fifth, and nine tenths, of 43,870 steps, rounded up
    assert (plan.steps, plan.micro_batch_tokens // 32768) == (43_870, 2)


def test_the_proxy_sits_where_the_law_begins():
    config = composed("experiment=proxy_8l")
    assert rate(make_plan(config.train, config.optim, config.checkpoint, 4096).lr) == "1.0e-2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.locl=kda", "unknown setting model.locl: did you mean model.local?"),
        ("trian.tokens=5", "unknown setting trian.tokens: did you mean train.tokens?"),
        ("model.local=kdaa", "model.local='kdaa' is not one of kda, gdn, window"),
        ("model.layers=6", "model.layers=6 is not a multiple of the pattern's length 4"),
        ("model.layers=many", "'many' of type 'str' could not be converted to Integer"),
        ("train.tokens=1e6", "could not be converted to Integer: write 1_000_000"),
        ("name.path=x", "unknown setting name.path: did you mean name=x?"),
        ("model.width.least=64", "unknown setting model.width.least: did you mean model.width=64?"),
        ("main", "main is not name=value: did you mean experiment=main?"),
        ("443b1a", "443b1a is not name=value: did you mean experiment=443b1a?"),
        ("experiment=mian", "Could not find 'experiment/mian'"),
        (
            "train.micro_batch_tokens=1000",
            "train.batch_tokens=524288 is not a multiple of train.micro_batch_tokens=1000",
        ),
        ("train.micro_batch_tokens=1e5", "could not be converted to Integer: write 100_000"),
        ("train.micro_batch_tokens=all", "train.micro_batch_tokens='all' must be 1 or more, or auto"),
        ("optim.schedule=step", "optim.schedule=step is not one of"),
        ("optim.weight_decay=0.1", "has no effect with optim.matrices=muonh"),
        ("checkpoint.pin_fractions=[2]", "must lie in (0, 1]"),
        ("model.norm_eps=1e-5", "too large for the head norm of kda"),
        ("data.mixture.weights={books:1}", "a dictionary is given with a plus, +data.mixture.weights={key:value}"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(override, message):
    line = refused(override)
    assert message in line and "\n" not in line


@pytest.mark.parametrize(("given", "kept"), [("auto", "auto"), ("32_768", 32_768)])
def test_a_micro_batch_is_a_number_or_auto_and_is_stored_so(given, kept):
    config = composed("experiment=main", f"train.micro_batch_tokens={given}")
    assert config.train.micro_batch_tokens == kept and from_plain(to_plain(config)) == config


def test_a_resume_takes_what_it_may_and_refuses_the_rest_with_both_values():
    stored = to_plain(composed("experiment=demo"))
    longer = replace(RunConfig(), resume="x")
    longer.train.tokens = stored["train"]["tokens"] * 2
    longer.checkpoint.keep_last = 7
    config, changed = resume_config(
        stored,
        to_plain(longer),
        ["resume=x", f"train.tokens={longer.train.tokens}", "checkpoint.keep_last=7"],
    )
    assert config.train.tokens == longer.train.tokens and config.checkpoint.keep_last == 7
    assert changed == {"train.tokens": longer.train.tokens, "checkpoint.keep_last": 7}
    assert config.model == from_plain(stored).model  # what the command line did not name stands

    wider = replace(RunConfig(), resume="x")
    wider.model.width = 999
    with pytest.raises(ValueError, match=r"model\.width \(128 there, 999 here\)"):
        resume_config(stored, to_plain(wider), ["resume=x", "model.width=999"])
    shorter = replace(RunConfig(), resume="x")
    shorter.train.tokens = 10
    with pytest.raises(ValueError, match="lengthen the plan, not shorten it"):
        resume_config(stored, to_plain(shorter), ["resume=x", "train.tokens=10"])
    with pytest.raises(ValueError, match=r"model\.layers \(4 there, 20 here\)"):
        resume_config(stored, to_plain(composed("experiment=main")), ["resume=x", "experiment=main"])


def test_a_setting_younger_than_the_run_has_its_default_there():
    stored = to_plain(composed("experiment=demo"))
    del stored["model"]["projection_precision"]
    asked = replace(RunConfig(), resume="x")
    asked.model.projection_precision = "fp8_delayed"
    with pytest.raises(ValueError, match=r"projection_precision \('model' there, 'fp8_delayed' here\)"):
        resume_config(stored, to_plain(asked), ["model.projection_precision=fp8_delayed"])
    asked.model.projection_precision = "model"
    assert resume_config(stored, to_plain(asked), ["model.projection_precision=model"])[1] == {}


def test_the_hash_ignores_where_things_lie_and_nothing_else():
    config = composed("experiment=demo")
    assert config_hash(config) == config_hash(replace(config, runs_dir="elsewhere", dry_run=True))
    assert config_hash(config) != config_hash(composed("experiment=demo", "train.seed=1"))


def test_the_settings_page_is_current_and_complete():
    page = (CONFIGS.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == document(), "run: dwslm settings > docs/settings.md"
    for name in flatten(asdict(RunConfig())):
        assert f"`{name}`" in page, name
