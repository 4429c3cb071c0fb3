"""How fast: the peak learning rate by law, and its course over a run."""

import math

from .settings import OptimSettings

# MuonH's law: 1e-2 at a billion tokens, falling as tokens^-0.32 (measured from 10B to 166B tokens, arXiv
# 2603.28743) and rising with the square root of the batch.
BASE_LR = 1e-2
BASE_TOKENS = 1e9
TOKENS_EXPONENT = -0.32
BASE_BATCH_TOKENS = 524_288
BATCH_EXPONENT = 0.5
LEAST_TOKENS, MOST_TOKENS = 0.2e9, 200e9


def learning_rate(tokens: int, batch_tokens: int, settings: OptimSettings) -> float:
    """Peak rate of the matrices: `settings.lr` if given, else by MuonH's law.

    1e-2 (tokens / 1e9)^-0.32 (batch_tokens / 524,288)^0.5, where tokens are planned for the whole run and
    batch_tokens make one optimizer step. The same at every depth, since the
    residual factor min(1, base_depth / L) carries the depth. Raises ValueError where there is no law: for
    `muon` and `adamw`, and outside 0.2B to 200B tokens.
    """
    if settings.lr is not None:
        return settings.lr
    if settings.matrices != "muonh":
        raise ValueError(f"optim.matrices={settings.matrices} has no learning-rate law: give optim.lr")
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        raise ValueError(f"{tokens:,} planned tokens are outside the learning-rate law's 0.2B to 200B: give optim.lr")
    if batch_tokens <= 0:
        raise ValueError(f"a batch of {batch_tokens} tokens has no learning rate")
    return BASE_LR * (tokens / BASE_TOKENS) ** TOKENS_EXPONENT * (batch_tokens / BASE_BATCH_TOKENS) ** BATCH_EXPONENT


def schedule(fraction: float, settings: OptimSettings) -> float:
    """Multiplier of the peak rate, in [0, 1], at a fraction of the planned tokens.

    It is 0 at 0 and `final_lr` at 1, so evaluate it in the middle of a step: then neither the first nor the
    last step is lost. A last step that ends past the plan (fraction above 1) gets `final_lr`. Raises
    ValueError below 0.
    """
    if not fraction >= 0:
        raise ValueError(f"schedule at {fraction} of the planned tokens: must be 0 or more")
    if fraction < settings.warmup:
        return fraction / settings.warmup
    decay_start = settings.decay_start if settings.schedule == "wsd" else settings.warmup
    progress = min(max((fraction - decay_start) / (1 - decay_start), 0.0), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.final_lr + (1 - settings.final_lr) * shape
