"""Which kernel each part of a model gets on a device, found out before anything is built or written."""

from dataclasses import replace
from typing import Any

import torch

from dwslm.model.lm import DTYPES, ModelSettings
from dwslm.ops import (
    add_norm,
    attention,
    choice,
    delta_gate,
    delta_rule,
    depth_mix,
    fp8,
    loss_head,
    mlp,
    qk_norm_rope,
    short_conv,
)

EVEN = 4096
"""Tokens that no kernel minds."""
PARTS = {
    "attention": "attention_engine",
    "QK-norm": "qk_norm_engine",
    "delta rule": "delta_engine",
    "convolution": "conv_engine",
    "gates": "gate_engine",
    "residual norm": "norm_engine",
    "MLP": "mlp_engine",
    "attention residuals": "depth_engine",
    "head": "head_engine",
}
"""Part of the model -> the setting that names its kernel."""


def engine(part: str, s: ModelSettings, device: torch.device, tokens: int = EVEN) -> str:
    """Name of the engine of one of `PARTS` for micro-batches of so many tokens, or "not used".

    Raises:
        ValueError: where the one that the settings name cannot be had.
    """
    kinds, dtype = set(s.kinds()), DTYPES[s.dtype]
    softmax, linear = bool(kinds & {"global", "window"}), bool(kinds & {"kda", "gdn"})
    if part == "attention" and softmax:
        return attention.resolve(s.attention_engine, device, dtype, s.head_dim)
    if part == "QK-norm" and softmax:
        return qk_norm_rope.resolve(s.qk_norm_engine, device, s.head_dim)
    if part == "delta rule" and linear:
        bounded, scalar_gate = s.delta_gate == "bounded", "gdn" in kinds
        return delta_rule.resolve(
            s.delta_engine,
            device=device,
            dtype=dtype,
            head_dim=s.delta_head_dim,
            bounded=bounded,
            scalar_gate=scalar_gate,
        )
    if part == "convolution" and linear:
        return short_conv.resolve(s.conv_engine, device, s.delta_head_dim)
    if part == "gates" and "kda" in kinds:
        return delta_gate.resolve(s.gate_engine, device, s.delta_head_dim)
    if part == "residual norm" and not s.depth_block:
        return add_norm.resolve(s.norm_engine, device, s.width)
    if part == "MLP" and s.mlp_precision == "model":
        return mlp.resolve(s.mlp_engine, device, dtype, tokens, s.width, s.mlp_hidden)
    if part == "MLP" and s.mlp_precision == "fp8_delayed":
        return mlp.resolve_delayed(s.mlp_engine, device, tokens, s.width, s.mlp_hidden)
    if part == "attention residuals" and s.depth_block:
        return depth_mix.resolve(s.depth_engine, device)
    if part == "head" and s.head_precision == "model":
        return loss_head.resolve(s.head_engine, device)
    return "not used"


def precision_misfit(s: ModelSettings, device: torch.device) -> str | None:
    """Why the MLP, the projections or the head cannot have their precision; None where they can."""
    kinds, dtype = set(s.kinds()), DTYPES[s.dtype]
    of_mixers = [s.heads * s.head_dim] * bool(kinds & {"global", "window"})
    of_mixers += [s.delta_heads * s.delta_head_dim] * bool(kinds & {"kda", "gdn"})
    return (
        mlp.misfit(s.mlp_precision, device, dtype, s.width, s.mlp_hidden)
        or fp8.misfit(s.projection_precision, device, dtype, s.width, *of_mixers)
        or loss_head.misfit(s.head_precision, device, dtype, s.width)
    )


def engines(s: ModelSettings, device: torch.device, tokens: int) -> dict[str, str]:
    """Part -> engine, for micro-batches of so many tokens.

    Raises:
        ValueError: as `engine` does, and where a precision cannot be had.
    """
    if reason := precision_misfit(s, device):
        raise ValueError(reason)
    return {part: engine(part, s, device, tokens) for part in PARTS}


def slower(s: ModelSettings, device: torch.device, found: dict[str, str]) -> str | None:
    """A line for a Hopper GPU whose fastest kernels `auto` leaves out for the Triton that is installed; None where it does not.

    found: as `engines` gives them.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    left = [
        f"{part} ({found[part]} is taken)"
        for part in ("delta rule", "MLP")
        if getattr(s, PARTS[part]) == "auto" and found[part] not in ("fused", "not used")
    ]
    if not left or choice.untried_triton() is None:
        return None
    return (
        f"the fastest kernels of {' and '.join(left)} are for Triton {', '.join(choice.TRIED)}, and {choice.TRITON} is "
        f"installed: {choice.BRINGS_IT} brings the former"
    )


def had_here(s: ModelSettings, device: torch.device) -> tuple[ModelSettings, list[str]]:
    """The settings with `auto` for engines that this device cannot have, and a line for each of them."""
    told = []
    for part, setting in PARTS.items():
        try:
            engine(part, s, device)
        except ValueError as error:
            other: dict[str, Any] = {setting: "auto"}
            s = replace(s, **other)
            told.append(
                f"{part}: the run's own kernel cannot be had here, {engine(part, s, device)} is taken ({error})"
            )
    return s, told
