"""Rotary positions (arXiv 2104.09864) and their extension to longer contexts by YaRN (arXiv 2309.00071)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RopeSettings:
    """Rotary positions of the softmax-attention layers."""

    theta: float = 10_000.0
    """Base of the rotation frequencies."""
    yarn_factor: float = 1.0
    """How many times longer than `yarn_context` the context is to become; 1 leaves the positions as they were trained."""
    yarn_context: int = 4096
    """Tokens of context that the model was last trained with; YaRN counts rotations over it."""
    yarn_beta_fast: float = 32.0
    """Pairs that turn more often than this over the trained context stay as they are."""
    yarn_beta_slow: float = 1.0
    """Pairs that turn less often than this are slowed down by the whole factor."""
    yarn_attention: float = 0.1
    """a in the softmax temperature (a ln(factor) + 1)^2."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value):
                raise ValueError(f"model.rope.{name}={value} must be a finite number")
        if self.theta <= 1 or self.yarn_factor < 1 or self.yarn_beta_fast <= self.yarn_beta_slow:
            raise ValueError(
                f"model.rope needs theta > 1, yarn_factor >= 1 and yarn_beta_fast > yarn_beta_slow, "
                f"not {self.theta}, {self.yarn_factor}, {self.yarn_beta_fast} and {self.yarn_beta_slow}"
            )


def rotation_frequencies(head_dim: int, settings: RopeSettings) -> Tensor:
    """float64 [head_dim / 2], radians a token.

    YaRN keeps a pair that turns r times over the trained context with weight g = clamp((r - slow) / (fast - slow), 0, 1) and
    divides the rest of it by the factor. The ramp runs over turns r (the paper's equation), not over the pair's index.
    """
    theta = settings.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = settings.yarn_context * theta / (2 * math.pi)
    keep = ((turns - settings.yarn_beta_slow) / (settings.yarn_beta_fast - settings.yarn_beta_slow)).clamp(0, 1)
    return theta * ((1 - keep) / settings.yarn_factor + keep)


def attention_scale(head_dim: int, settings: RopeSettings) -> float:
    """Factor on the attention logits: 1/sqrt(head_dim), times YaRN's temperature.

    The temperature is here and not in cos and sin, where a QK-norm after the rotation would erase it.
    """
    return (settings.yarn_attention * math.log(settings.yarn_factor) + 1) ** 2 / math.sqrt(head_dim)


class Rotary:
    """The rotations and the logit scale of one batch, made once and shared by all attention layers.

    Attributes:
        cos, sin: float32 [T, 1, head_dim / 2], as `qk_norm_rope` wants them.
        scale: see `attention_scale`.
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, scale: float):
        """positions int64 [T]; frequencies float64 [head_dim / 2] on the same device."""
        angle = (positions[:, None].double() * frequencies).float()[:, None, :]
        self.cos, self.sin, self.scale = angle.cos(), angle.sin(), scale
