"""What stands after the recurrence of a linear-attention layer: each head normalised, then scaled by an output gate."""

import torch
from torch import Tensor

from dwslm.ops.delta_gate import check_name, resolve
from dwslm.ops.fp8 import delayed_linear, rounding
from dwslm.ops.fp8.product import MULTIPLE
from dwslm.ops.norm import rms_norm

__all__ = ["check_name", "gated_norm", "gated_norm_linear", "resolve"]


def gated_norm(o: Tensor, gate: Tensor, gain: Tensor, bias: Tensor | None, eps: float, engine: str = "auto") -> Tensor:
    """rms_norm(o) * gain * sigmoid(gate + bias), a head at a time.

    Args:
        o: [T, heads, head_dim].
        gate: [T, heads * head_dim], in o's dtype.
        gain: float32 [head_dim], shared by the heads; bias: float32 [heads * head_dim], or None for none ("torch" only).
        eps: added to the mean square.
        engine: "fused", "torch" or "auto", as for `delta_gate`, and chosen by the same rules.

    Returns:
        [T, heads * head_dim] in o's dtype.

    Raises:
        ValueError: as `resolve` does, and for "fused" without a bias.
    """
    if bias is None and engine == "fused":
        raise ValueError("gate engine 'fused' takes output gates with a bias only: choose auto or torch")
    if bias is not None and resolve(engine, o.device, o.shape[-1]) == "fused":
        from dwslm.ops.gated_norm.fused import gated_norm_fused  # Triton is there on GPU machines only

        return gated_norm_fused(o, gate, gain, bias, eps)
    opening = torch.sigmoid(gate.float() if bias is None else gate.float() + bias)
    return (rms_norm(o.float(), gain, eps).flatten(1) * opening).to(o.dtype)


def gated_norm_linear(
    o: Tensor,
    gate: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    weight: Tensor,
    peaks: Tensor | None,
    factor: float = 1.0,
    engine: str = "auto",
) -> Tensor:
    """`delayed_linear` of `gated_norm`, with the arguments of both: [T, m up to a multiple of 16].

    "fused" rounds what is gated where it is computed, if T is a multiple of 16.

    Raises:
        ValueError: as the two do.
    """
    fused = bias is not None and torch.is_grad_enabled() and resolve(engine, o.device, o.shape[-1]) == "fused"
    if bias is not None and peaks is not None and fused and len(o) % MULTIPLE == 0:
        from dwslm.ops.gated_norm.rounded import gated_norm_rounded

        x = gated_norm_rounded(o, gate, gain, bias, eps, rounding(peaks, factor))
        return delayed_linear(x, weight, peaks, factor)
    return delayed_linear(gated_norm(o, gate, gain, bias, eps, engine), weight, peaks, factor)
