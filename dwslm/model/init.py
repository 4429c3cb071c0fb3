"""How every tensor of the model starts. MuonH keeps a matrix's initial norm for good, so this is a lasting choice."""

import math

import torch
from torch import nn

from dwslm.model.block import DepthQuery
from dwslm.model.delta import DeltaAttention
from dwslm.model.projection import Norm, Projection, Table


@torch.no_grad()
def initialize(model: nn.Module, width: int, scale: float, seed: int) -> None:
    """Fills all parameters in place, drawing in float32 on the CPU so that every device and dtype starts from the same values.

    ============================  ==========================================================================
    projections, head             normal, std scale / sqrt(fan_in); zero where the block says so (value gates)
    embedding                     normal, std 1 (normalised right after the lookup)
    value tables                  normal, std scale / sqrt(width)
    norm gains                    1
    depth queries, their gains    0 (required: an equal-weight average), 1
    convolutions                  uniform in +-1/sqrt(conv width)
    A_log                         0 (bounded gate); log of uniform 1 to 16 (softplus gate)
    dt_bias                       inverse softplus of a log-uniform draw from 0.001 to 0.1
    output-gate bias              0
    ============================  ==========================================================================

    Args:
        width: of the residual stream.
        scale: 0.5 is the "half scale", 1 the plain one.
        seed: of the one generator all draws come from, in module order.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def uniform(parameter: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.rand(parameter.shape, generator=generator) * (high - low) + low

    for module in model.modules():
        match module:
            case Projection():
                std = scale / math.sqrt(module.weight.shape[1])
                for block, rows in zip(module.blocks, module.weight.split(module.rows), strict=True):
                    normal(rows, 0.0 if block.init == "zero" else std)
            case Table():
                normal(module.weight, 1.0 if module.role == "embedding" else scale / math.sqrt(width))
            case Norm():
                module.gain.fill_(1.0)
            case DepthQuery():
                module.query.zero_()
                module.gain.fill_(1.0)
            case DeltaAttention():
                bound = 1 / math.sqrt(module.conv.shape[1])
                module.conv.copy_(uniform(module.conv, -bound, bound))
                module.A_log.copy_(
                    torch.zeros_like(module.A_log) if module.gate == "bounded" else uniform(module.A_log, 1, 16).log()
                )
                dt = uniform(module.dt_bias, math.log(1e-3), math.log(1e-1)).exp()
                module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                module.head_gain.fill_(1.0)
                if module.kind == "kda":
                    module.gate_bias.zero_()
