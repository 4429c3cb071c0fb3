"""Attention residuals: a softmax over the depth of the network decides what a sublayer reads (arXiv 2603.15031).

a_i = softmax_i( query . (gain * rmsnorm(v_i)) )        h = sum_i a_i v_i
"""

import torch
from torch import Tensor

from dwslm.ops import choice

ENGINES = choice.ENGINES


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("depth", engine)


def resolve(engine: str, device: torch.device) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    return choice.resolve("depth", engine, choice.misfit(device))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """float32 [T, 1]: 1 / sqrt(mean(x^2) + eps). A finished block is read many times, so callers keep this beside it."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def depth_mix(sources: list[Tensor], inverse: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """Mixes residual blocks by depth.

    Args:
        sources: n tensors [T, width]: the embedding, the finished blocks and, inside a block, its partial sum.
        inverse: their `inverse_rms`, float32 [T, 1] each.
        query: float32 [width]; zero gives the plain average.
        gain: float32 [width], the key norm's gain.

    Returns:
        [T, width] in the sources' dtype; softmax and sum are float32.
    """
    key = query * gain
    # Products and sums, not a matrix product: a compiler fuses them with what reads the sources anyway.
    scores = [(v.float() * key).sum(-1, keepdim=True) * r for v, r in zip(sources, inverse, strict=True)]
    weights = torch.softmax(torch.cat(scores, dim=1), dim=1)
    mixed = weights[:, :1] * sources[0].float()
    for i in range(1, len(sources)):
        mixed = torch.addcmul(mixed, weights[:, i : i + 1], sources[i].float())
    return mixed.to(sources[0].dtype)
