"""What the optimizer keeps: radii over many steps, state by logical block, saving, loading, resuming."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.small_model import (
    SETTINGS,
    assert_equal,
    everything,
    optimizer,
    parameters,
    set_gradients,
    train,
)


def logical(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of the matrices on a sphere, by logical name, cut by hand."""
    return {
        "qkv/q": weights["qkv"][0:8],
        "qkv/k": weights["qkv"][8:12],
        "qkv/v": weights["qkv"][12:16],
        "out": weights["out"],
        "up": weights["up"],
        "head": weights["head"],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_radius_kept_for_200_steps_and_across_a_load(dtype: torch.dtype) -> None:
    opt = optimizer(parameters(dtype))
    radii = {name: block.double().norm() for name, block in logical(opt.weights()).items()}
    train(opt, range(120))
    resumed = optimizer(parameters(dtype, seed=9))
    resumed.load(opt.weights(), opt.state())
    train(resumed, range(120, 200))
    for name, block in logical(resumed.weights()).items():
        assert abs(block.double().norm() / radii[name] - 1) < 1e-5, name


@pytest.mark.parametrize("rule", list(SETTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit(rule: str, dtype: torch.dtype) -> None:
    straight = optimizer(parameters(dtype), SETTINGS[rule])
    train(straight, range(5))
    resumed = optimizer(parameters(dtype, seed=5), SETTINGS[rule])
    set_gradients(resumed.params, 77)
    resumed.accumulate()  # dropped by load
    resumed.load(straight.weights(), straight.state())
    assert_equal(everything(resumed), everything(straight))
    train(straight, range(5, 10))
    train(resumed, range(5, 10))
    assert_equal(everything(resumed), everything(straight))


def test_state_names_and_copies() -> None:
    opt = optimizer(parameters())
    state = opt.state()
    expected = {"step", "skipped", "head.radius"}
    expected |= {f"{n}.{kind}" for n in ("qkv/q", "qkv/k", "qkv/v", "out", "up") for kind in ("momentum", "radius")}
    adam = ("qkv/beta", "embedding", "gain", "convolution", "values", "scale", "head")
    expected |= {f"{name}.{kind}" for name in adam for kind in ("exp_avg", "exp_avg_sq")}
    assert state.keys() == expected
    assert state["qkv/k.momentum"].shape == (4, 8) and state["qkv/k.radius"].shape == ()
    assert state["convolution.exp_avg"].shape == (8, 1, 4) and state["scale.exp_avg"].shape == ()
    assert {tensor.dtype for name, tensor in state.items() if "." in name} == {torch.float32}
    before = everything(opt)
    for tensor in [*state.values(), *opt.weights().values()]:
        tensor.add_(1)
    assert_equal(before, everything(opt))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, s: w.pop("out"), "weights lack out"),
        (lambda w, s: w.update(extra=torch.zeros(1)), "weights hold extra, unknown here"),
        (
            lambda w, s: w.update(out=torch.ones(8, 9)),
            r"weights out is torch.float32 \[8, 9\], expected .* \[8, 8\]",
        ),
        (
            lambda w, s: w.update(out=w["out"].bfloat16()),
            "weights out is torch.bfloat16 .* expected torch.float32",
        ),
        (lambda w, s: s.pop("qkv/k.radius"), "optimizer state lack qkv/k.radius"),
        (lambda w, s: [s.pop("out.radius"), s.pop("step")], "optimizer state lack out.radius and 1 more"),
        (lambda w, s: s.update({"q.momentum": torch.ones(1)}), "optimizer state hold q.momentum, unknown"),
        (lambda w, s: s.update({"gain.exp_avg": torch.ones(7)}), r"gain.exp_avg is torch.float32 \[7\]"),
        (lambda w, s: s.update(step=torch.tensor(1.0)), "optimizer state step is torch.float32"),
        (lambda w, s: s.update({"out.radius": torch.tensor(0.0)}), "out.radius is 0.0: a radius is above 0"),
        (lambda w, s: s.update({"up.radius": torch.tensor(torch.nan)}), "up.radius is nan"),
    ],
)
def test_load_refuses_and_changes_nothing(change: Any, message: str) -> None:
    source, opt = optimizer(parameters(seed=1)), optimizer(parameters())
    train(source, range(2))
    before = everything(opt)
    weights, state = source.weights(), source.state()
    change(weights, state)
    with pytest.raises(ValueError, match=message):
        opt.load(weights, state)
    assert_equal(before, everything(opt))


def test_load_weights_starts_afresh() -> None:
    source = optimizer(parameters(seed=1))
    train(source, range(3))
    opt = optimizer(parameters(torch.bfloat16))
    train(opt, range(2))
    opt.load_weights(source.weights())
    fresh = optimizer({name: nn.Parameter(w) for name, w in source.weights().items()})
    assert_equal(opt.weights(), fresh.weights())  # full float32, though the parameters are bfloat16
    assert_equal(opt.state(), fresh.state())
    empty = source.weights()
    empty["out"].zero_()
    before = everything(opt)
    with pytest.raises(ValueError, match="matrix out has norm 0.0"):
        opt.load_weights(empty)
    assert_equal(before, everything(opt))
