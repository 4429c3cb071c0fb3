"""Kernels are found out before anything is written, and a score on another machine takes what that one has."""

from dataclasses import replace

import pytest
import torch

from dwslm.cli.engines import PARTS, engines, had_here, slower
from dwslm.config import RunConfig, from_plain, resume_config, to_plain
from dwslm.model.lm import ModelSettings
from dwslm.ops import choice
from tests.model.small import ARMS, SMALL

CPU = torch.device("cpu")
GPU_ONLY = {
    "attention": "cudnn",
    "QK-norm": "fused",
    "delta rule": "cudnn",
    "convolution": "fused",
    "gates": "fused",
    "residual norm": "fused",
    "attention residuals": "fused",
}


@pytest.mark.parametrize("part", GPU_ONLY)
def test_a_kernel_that_cannot_be_had_is_refused_with_the_way_out(part):
    without = {"depth_block": 0} if part == "residual norm" else {}
    with pytest.raises(ValueError, match="choose|needs a GPU"):
        engines(replace(SMALL, **{PARTS[part]: GPU_ONLY[part]}, **without), CPU, 64)


@pytest.mark.parametrize("local", ARMS)
def test_every_part_has_one_and_what_is_not_there_none(local):
    found = engines(replace(SMALL, local=local, depth_block=0), CPU, 64)
    assert found.keys() == PARTS.keys() and found["attention residuals"] == "not used"
    assert (found["delta rule"] == "not used") == (local == "window") and (found["gates"] == "torch") == (
        local == "kda"
    )
    assert found["residual norm"] == "torch" and engines(SMALL, CPU, 64)["residual norm"] == "not used"
    assert engines(replace(SMALL, pattern=["local"]), CPU, 64)["attention"] == "not used"


def test_a_precision_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"multiples of 16, not \(60, 32\): set model.mlp_precision=model"):
        engines(replace(SMALL, mlp_precision="fp8", mlp_hidden=60), CPU, 64)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"delta_head_dim": 12}, r"\(32, 32, 24\)"),
        ({"local": "window", "heads": 5, "kv_heads": 5}, r"\(32, 40\)"),
    ],
)
def test_projections_that_do_not_fit_are_refused(changes, told):
    """The width, and the inner widths of the mixers that there are; the MLP is in the compute dtype."""
    settings = replace(SMALL, projection_precision="fp8_delayed", **changes)
    with pytest.raises(ValueError, match=f"multiples of 16, not {told}: set model.projection_precision=model"):
        engines(settings, CPU, 60)
    engines(replace(settings, projection_precision="model"), CPU, 60)


def test_a_head_that_does_not_fit_is_refused_and_has_kernels_of_its_own():
    settings = replace(SMALL, head_precision="fp8_delayed")
    assert engines(settings, CPU, 64)["head"] == "not used"
    with pytest.raises(ValueError, match=r"multiples of 16, not \(40,\): set model.head_precision=model"):
        engines(replace(settings, width=40), CPU, 64)


def test_what_another_mixer_would_have_is_no_matter():
    settings = replace(SMALL, projection_precision="fp8_delayed", local="window", delta_head_dim=12)
    engines(settings, CPU, 64)


def test_another_machine_takes_what_it_has_and_says_so():
    used = {PARTS[part]: name for part, name in GPU_ONLY.items() if part != "residual norm"}
    settings, told = had_here(replace(SMALL, **used), CPU)
    assert settings == SMALL and len(told) == len(used)
    plain = replace(SMALL, depth_block=0)
    assert had_here(replace(plain, norm_engine="fused"), CPU)[0] == plain
    assert told[0].startswith(
        "attention: the run's own kernel cannot be had here, torch is taken (attention engine 'cudnn'"
    )
    assert had_here(SMALL, CPU) == (SMALL, [])


@pytest.mark.parametrize(("proportion", "enabled", "kept"), [(0.1, True, 0.1), (0.0, False, None)])
def test_a_run_from_before_the_switch_splits_as_it_did(proportion, enabled, kept):
    stored = to_plain(RunConfig())
    stored["data"]["stochastok"] = {"proportion": proportion}
    split = from_plain(stored).data.stochastok
    assert (split.enabled, split.proportion, split.splits_per_token) == (enabled, kept, proportion)


def test_a_resume_may_turn_recording_off():
    stored, given = to_plain(RunConfig()), to_plain(RunConfig())
    given["train"]["record"] = False
    config, changed = resume_config(stored, given, ["train.record=false"])
    assert config.train.record is False and changed == {"train.record": False}


def test_the_settings_named_here_are_all_there_are():
    named = {name for name in vars(ModelSettings()) if name.endswith("_engine")}
    assert named == set(PARTS.values())


def test_a_hopper_gpu_without_its_fastest_kernels_is_told_so(monkeypatch):
    """Only there, only for what `auto` chose, and only where Triton is why."""
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(choice, "TRITON", "3.7.1")
    gpu = torch.device("cuda")
    found = {"delta rule": "cudnn", "MLP": "torch"}
    told = slower(ModelSettings(), gpu, found) or ""
    assert told.startswith(
        "the fastest kernels of delta rule (cudnn is taken) and MLP (torch is taken) are for Triton 3.6"
    )
    assert "and 3.7.1 is installed: torch 2.11 brings" in told
    assert "MLP" not in (slower(replace(ModelSettings(), mlp_engine="torch"), gpu, found) or "")
    assert slower(ModelSettings(), gpu, {"delta rule": "not used", "MLP": "fused"}) is None
    assert slower(ModelSettings(), CPU, found) is None
    monkeypatch.setattr(choice, "TRITON", "3.6.0")
    assert slower(ModelSettings(), gpu, found) is None  # left out for another reason
    monkeypatch.setattr(choice, "TRITON", "3.7.1")
    capability[0] = 10
    assert slower(ModelSettings(), gpu, found) is None
