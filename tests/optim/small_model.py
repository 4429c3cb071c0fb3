"""A small set of parameters with every role, fused and whole, and what the optimizer's tests do with it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings

Roles = dict[str, list[tuple[str, int, str]]]

ROLES: Roles = {
    "embedding": [("", 20, "embedding")],
    "qkv": [("q", 8, "matrix"), ("k", 4, "matrix"), ("v", 4, "matrix"), ("beta", 3, "vector")],
    "out": [("", 8, "matrix")],
    "up": [("", 16, "matrix")],
    "gain": [("", 8, "vector")],
    "convolution": [("", 8, "vector")],
    "values": [("", 20, "value_table")],
    "scale": [("", 1, "vector")],
    "head": [("", 20, "head")],
}
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (20, 8),
    "qkv": (19, 8),
    "out": (8, 8),
    "up": (16, 8),
    "gain": (8,),
    "convolution": (8, 1, 4),
    "values": (20, 4),
    "scale": (),
    "head": (20, 8),
}
SETTINGS = {
    "muonh": OptimSettings(),
    "muon": OptimSettings(matrices="muon", head="adam", weight_decay=0.1),
    "adamw": OptimSettings(matrices="adamw", head="adam", weight_decay=0.1),
}


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    """Matrices in `dtype`, everything else float32, as a model holds them."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {"qkv", "out", "up", "head"}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype if name in matrices else None))
        for name, shape in SHAPES.items()
    }


def optimizer(params: dict[str, nn.Parameter], settings: OptimSettings | None = None, **arguments: Any) -> Optimizer:
    return Optimizer(params, ROLES, settings or OptimSettings(), lr=0.02, **arguments)


def set_gradients(params: dict[str, nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in params.values():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = gradient.to(parameter.dtype)


def train(opt: Optimizer, seeds: Iterable[int], lr: float = 0.02) -> None:
    for seed in seeds:
        set_gradients(opt.params, seed)
        opt.accumulate()
        opt.step(lr)


def everything(opt: Optimizer) -> dict[str, Tensor]:
    compute = {f"compute {name}": p.detach().clone() for name, p in opt.params.items()}
    return compute | opt.weights() | opt.state()


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
