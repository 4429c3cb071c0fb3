"""Arms of a test that could not be compared are refused, with the difference."""

import copy
from dataclasses import replace

import pytest

from dwslm.runs.queue_job import JobSpec
from dwslm.runs.queue_pairs import ProxySettings, check_paired, unpaired_runs

PLAIN = {
    "name": "x",
    "data": {"path": "data/a", "verify": "size", "stochastok": {"proportion": 0.0}},
    "model": {"local": "kda"},
    "train": {"seed": 0, "tokens": 1000, "batch_tokens": 100, "micro_batch_tokens": 50, "eval_documents": None},
    "evaluate": {"bands": []},
    "proxy": {"varies": [], "job": "j"},
}


def flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def job(arm: str, seed: int, **changes) -> JobSpec:
    config = copy.deepcopy(PLAIN)
    config["train"]["seed"], config["model"]["local"] = seed, arm
    for name, value in changes.items():
        *groups, leaf = name.split("__")
        node = config
        for group in groups:
            node = node[group]
        node[leaf] = value
    return JobSpec(f"{arm}{seed}", f"{arm}-s{seed}", "train.py", config=config, test="local", arm=arm, seed=seed)


def test_equal_but_for_the_arm_is_paired():
    check_paired([job("kda", 0), job("kda", 1), job("gdn", 0), job("gdn", 1)], flatten)
    # Memory is each arm's own business, and so is how thoroughly files are checked.
    check_paired([job("kda", 0), job("gdn", 0, train__micro_batch_tokens=25, data__verify="sha256")], flatten)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([job("gdn", 0, train__tokens=2000)], "train.tokens is 1000 in the first and 2000 in the second"),
        ([job("gdn", 0, data__path="data/b")], "arms kda and gdn are not paired, data.path is 'data/a' in the first"),
        ([job("gdn", 0, train__batch_tokens=50)], "train.batch_tokens"),
        ([job("gdn", 0, evaluate__bands=[1, 2])], "evaluate.bands"),
        ([job("gdn", 0, data__stochastok={"proportion": 0.1})], "data.stochastok.proportion"),
        ([job("gdn", 0), job("gdn", 1)], "arm kda has no run of seed 1, which arm gdn has"),
        ([job("gdn", 1)], "has no run of seed"),
        ([job("kda", 0)], "arm kda has seed 0 already, as job kda0"),
        ([job("kda", 1, model__local="window")], "arm kda may differ in the seed alone, and do in model.local"),
    ],
)
def test_what_cannot_be_compared_is_refused(other, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        check_paired([job("kda", 0), *other], flatten)


def test_a_folder_that_was_prepared_anew_between_two_arms_is_not_the_same_text():
    one, other = replace(job("kda", 0), data="f"), replace(job("gdn", 0), data="g")
    with pytest.raises(ValueError, match="data/a was prepared anew after the first was added"):
        check_paired([one, other], flatten)
    for each in (one, other):
        each.config["proxy"]["varies"] = ["data.path"]
    check_paired([one, other], flatten)


def test_a_test_may_be_about_the_data_and_says_so():
    arms = [job("kda", 0), job("gdn", 0, data__stochastok={"proportion": 0.1})]
    for one in arms:
        one.config["proxy"]["varies"] = ["data.stochastok."]
    check_paired(arms, flatten)
    with pytest.raises(ValueError, match="data.path"):
        check_paired([arms[0], job("gdn", 0, data__path="data/b", proxy__varies=["data.stochastok."])], flatten)


def test_settings_of_a_place_in_a_test():
    ProxySettings(test="t", arm="a", varies=["data.stochastok.", "train.tokens", "data.mixture.phases", "data."])
    with pytest.raises(ValueError, match=r"proxy\.arm=a needs proxy\.test"):
        ProxySettings(arm="a")
    with pytest.raises(ValueError, match=r"proxy\.varies names optim\.lr, in which arms may differ anyhow"):
        ProxySettings(test="t", varies=["optim.lr"])


def test_runs_that_read_other_text_are_found_though_settings_agree():
    one = {"planned_tokens": 10, "stream": "s", "dataset": {"fingerprint": "f", "valid": "v"}}
    other = {**one, "stream": "z", "dataset": {"fingerprint": "g", "valid": "v"}}
    assert unpaired_runs({("kda", 0): one, ("gdn", 0): dict(one), ("kda", 1): other, ("gdn", 1): dict(other)}) == []
    told = unpaired_runs({("kda", 0): one, ("gdn", 0): other})
    assert told == [
        "seed 0: training text is f in arm kda and g in arm gdn",
        "seed 0: order of the data is s in arm kda and z in arm gdn",
    ]
    assert unpaired_runs({("kda", 0): one, ("gdn", 0): other}, varies=["data.path"]) == []
    assert "held-out text" in unpaired_runs({("a", 0): one, ("b", 0): {**one, "dataset": {}}}, ["data.path"])[0]
