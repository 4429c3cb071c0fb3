"""The float64 truth of QK-norm and rotary positions: pairs as complex numbers."""

import torch
from torch import Tensor


def qk_norm_rope_reference(
    x: Tensor, turn: Tensor, heads: int, kv_heads: int, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Results as of `qk_norm_rope`, in float64.

    Args:
        x: [T, (heads + kv_heads) * head_dim + more].
        turn: complex128 [T, head_dim / 2], of length 1: what pair i of a token's heads is multiplied by.
    """
    half = turn.shape[1]
    found = []
    for head in x.double()[:, : (heads + kv_heads) * 2 * half].split(2 * half, dim=1):
        y = head / torch.sqrt(head.square().sum(dim=1, keepdim=True) / (2 * half) + eps)
        z = torch.complex(y[:, :half], y[:, half:]) * turn
        found.append(torch.cat([z.real, z.imag], dim=1))
    turned = torch.stack(found, dim=1)
    return turned[:, :heads], turned[:, heads:], x.double()[:, (heads + kv_heads) * 2 * half :]
