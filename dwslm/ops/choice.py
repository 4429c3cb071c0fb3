"""The choice that several ops have alike: kernels of our own in Triton, or plain PyTorch."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable

import torch

ENGINES = ("fused", "torch")
HEAD_DIMS = (16, 32, 64, 128, 256)  # a tile's side is a power of two
# Looked up once: a compiler cannot trace the look-up.
HAS_TRITON = importlib.util.find_spec("triton") is not None
try:
    TRITON = importlib.metadata.version("triton")
except importlib.metadata.PackageNotFoundError:
    TRITON = "none"
TRIED = ("3.6",)
"""Triton versions that the kernels which are bound to a version have been run with."""
BRINGS_IT = "torch 2.11"
"""What comes with the newest of them."""


def check_name(what: str, engine: str, engines: Iterable[str] = ENGINES) -> None:
    """Raises ValueError for a name that is neither one of `engines` nor `auto`. what: the op, in an error's words."""
    if engine != "auto" and engine not in engines:
        raise ValueError(f"unknown {what} engine {engine!r}: choose one of auto, {', '.join(engines)}")


def misfit(device: torch.device, head_dim: int | None = None) -> str | None:
    """Why "fused" cannot be had on a device, or for such heads where it goes by heads; None where it can."""
    if not (device.type == "cuda" and HAS_TRITON):
        return f"needs a GPU and Triton (it comes with torch there), not {device}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"takes heads of 16, 32, 64, 128 or 256, and head_dim is {head_dim}"
    return None


def untried_triton() -> str | None:
    """Why a kernel that has been run with the versions `TRIED` alone is not taken; None where one of them is installed."""
    if TRITON.rpartition(".")[0] in TRIED:
        return None
    return f"is for Triton {', '.join(TRIED)}, of which it uses experimental parts, and {TRITON} is installed"


def resolve(what: str, engine: str, reason: str | None, engines: Iterable[str] = ENGINES) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where there is no `reason` against it, else "torch".

    Raises:
        ValueError: for an unknown name, or "fused" where there is a reason.
    """
    check_name(what, engine, engines)
    if reason and engine == "fused":
        raise ValueError(f"{what} engine 'fused' {reason}: choose auto or torch")
    if engine == "auto":
        return "torch" if reason else "fused"
    return engine
