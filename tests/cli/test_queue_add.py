"""What does not go into the queue, since a start would refuse it."""

import sys

import hydra
import pytest

from dwslm.config import CONFIGS, register


@pytest.fixture
def multirun(monkeypatch, tmp_path):
    """`python train.py WORDS` in an empty folder, in this process."""
    register()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def start(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(lambda config: None)()

    return start


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+optim.lrr=0.5", r"^unknown setting optim.lrr: did you mean optim.lr\?$"),
        ('+hydra.launcher.arms={a: ["+optim.lrr=3"]}', r"^unknown setting optim.lrr: did you mean optim.lr\?$"),
        (
            'hydra.launcher.then=[["+evaluate.sed=1"]]',
            r"^hydra.launcher.then=\['\+evaluate.sed=1'\]: unknown setting evaluate.sed: did you mean evaluate.seed\?$",
        ),
        (
            'hydra.launcher.then=[["spelling_tests.itms=1"]]',
            r"unknown setting .*: did you mean spelling_tests.items\?$",
        ),
        ('hydra.launcher.then=[["yarn_factor=2"]]', r"then=.*: yarn_factor=2.0 is of the bands: give bands=true too"),
        ('hydra.launcher.then=[["evaluate.bands=[3]"]]', r"then=.*: evaluate bands \[3\]: must be two or more"),
    ],
)
def test_what_a_job_or_its_scoring_would_be_refused_for_does_not_go_into_the_queue(tmp_path, multirun, word, message):
    with pytest.raises(ValueError, match=message):
        multirun("--multirun", "experiment=proxy_cpu", word)
    assert not list(tmp_path.rglob("queue/log/*"))
