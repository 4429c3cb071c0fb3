"""What stands between a softmax-attention layer's projection and its attention: weight-free QK-norm and rotary positions."""

import torch
from torch import Tensor

from dwslm.ops import choice
from dwslm.ops.qk_norm_rope.plain import qk_norm_rope_plain

ENGINES = choice.ENGINES


def check_name(engine: str) -> None:
    """Raises ValueError for a name that is neither an engine nor `auto`."""
    choice.check_name("QK-norm", engine)


def resolve(engine: str, device: torch.device, head_dim: int) -> str:
    """Name of the engine that `engine` stands for: `auto` is "fused" where that fits, else "torch".

    Raises:
        ValueError: where a named engine cannot be had.
    """
    return choice.resolve("QK-norm", engine, choice.misfit(device, head_dim))


def qk_norm_rope(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *, eps: float, engine: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys out of their projection, normalised and turned, and what else it holds.

        y = x / sqrt(mean(x^2) + eps)                                    over each head, no gain (arXiv 2010.04245, 1910.07467)
        (y_i, y_j) -> (y_i cos - y_j sin, y_i sin + y_j cos)             j = i + head_dim / 2 (arXiv 2104.09864)

    Args:
        x: [T, (heads + kv_heads) * head_dim + more]: queries, keys, and columns that pass through (values and gates).
        cos, sin: float32 [T, 1, head_dim / 2], of each token's angles; no gradient.

    Returns:
        q [T, heads, head_dim] and k [T, kv_heads, head_dim] in x's dtype, contiguous; and x's other columns, [T, more].

    Raises:
        ValueError: as `resolve` does.
    """
    if resolve(engine, x.device, 2 * cos.shape[-1]) == "torch":
        return qk_norm_rope_plain(x, cos, sin, heads, kv_heads, eps=eps)
    from dwslm.ops.qk_norm_rope.fused import qk_norm_rope_fused  # Triton is there on GPU machines only

    return qk_norm_rope_fused(x, cos, sin, heads, kv_heads, eps=eps)
