"""The engines that need a GPU, and the choice among them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dwslm.ops.delta_rule import cudnn, fla, fla_gdn, hopper
from dwslm.ops.segments import Segments


class Engine(NamedTuple):
    """`misfit` says why a case (device, dtype, head_dim, whether the gate is bounded) cannot be taken, or None."""

    run: Callable[..., Tensor]
    misfit: Callable[[torch.device, torch.dtype, int, bool], str | None]


def _fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, *, scale: float) -> Tensor:
    if reason := hopper.unreadable(q, k, v, g, beta):
        raise ValueError(f"delta-rule engine 'fused' {reason}: choose auto or torch")
    from dwslm.ops.delta_rule.fused import delta_rule_fused  # Triton is there on GPU machines only

    return delta_rule_fused(q, k, v, g, beta, segments, scale=scale)


ENGINES = {
    "fused": Engine(_fused, hopper.fused_misfit),
    "cudnn": Engine(cudnn.delta_rule_cudnn, cudnn.misfit),
    "fla": Engine(fla.delta_rule_fla, fla.misfit),
    "fla_gdn": Engine(fla_gdn.gated_delta_rule_fla, fla_gdn.misfit),
}
FASTEST_FIRST = ("fused", "cudnn", "fla")


# The compiler calls this while it traces and keeps the name it returns: what is installed does not change during a run.
@torch.compiler.assume_constant_result
def choose(engine: str, device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> str:
    """`resolve`, for a GPU or for an engine that needs one."""
    case = (device, dtype, head_dim, bounded)
    if engine == "auto":
        return next((name for name in FASTEST_FIRST if ENGINES[name].misfit(*case) is None), "torch")
    if reason := ENGINES[engine].misfit(*case):
        raise ValueError(f"delta-rule engine {engine!r} {reason}")
    return engine
