"""The loss head with its three products in float8: hidden states and weight in e4m3, the logits' gradient in e5m2.

    logits = h W^T        d_hidden = D W        d_weight = D^T h        D = d nats / d logits, at most 1 in magnitude

h and W have a delayed scale each (`dwslm.ops.fp8`); D has a fixed one, since it is bounded. Most of its values are probabilities,
which e4m3 would drop under 1 / 200,000 of the largest, and with them what pushes rare tokens down; e5m2 goes down to 2^-31 here.
Logits are kept in the compute dtype, a chunk of tokens at a time; D is rounded where it is computed, as it is for a chunk and
transposed for all tokens, so that the weight's gradient is one product, whose sum nothing cuts into parts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dwslm.ops.fp8 import product as fp8_product
from dwslm.ops.fp8 import quantize
from dwslm.ops.fp8.formats import BOUNDED, BOUNDED_STEPS
from dwslm.ops.loss_head.compiled import CHUNK_BYTES, loss_and_gradient

SETTING = "model.head_precision"
PRECISIONS = ("model", "fp8_delayed")

PEAKS = ("hidden", "weight")
"""What has a delayed scale, in the order of the state (`new_peaks(len(PEAKS))`)."""
HIDDEN, WEIGHT = range(len(PEAKS))

TILE = 128
"""Tokens of a chunk are a multiple of this, but for the last."""

Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int], Tensor]


def misfit(precision: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why a precision cannot be had for a head of such a width, and the way out; None where it can."""
    return None if precision == "model" else fp8_product.misfit(SETTING, device, dtype, width)


def total_nats_delayed(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, peaks: Tensor, *, ignore: int = -100
) -> Tensor:
    """As `total_nats`, with delayed scales.

    Args:
        hidden: [T, width]; weight: [vocabulary, width]; width a multiple of 16. Where T or the vocabulary
            is none, they are copied.
        peaks: state, see `PEAKS`. It is read; `remember` writes it after the backward pass.

    Raises:
        ValueError: where the device, the dtype or the width cannot do FP8.
    """
    if reason := misfit("fp8_delayed", hidden.device, hidden.dtype, hidden.shape[1]):
        raise ValueError(reason)
    return _Nats.apply(hidden, weight, peaks, targets, softcap, ignore)


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, peaks: Tensor, targets: Tensor, softcap: float, ignore: int
    ) -> Tensor:
        gradient_of = _formulas if not hidden.is_cuda else _kernels()
        total, vocab = len(hidden), len(weight)
        full_hidden, full_weight = fp8_product.filled(hidden.contiguous()), fp8_product.filled(weight)
        h8, h8_t, h_scale, h_seen = quantize.both(full_hidden, None, False, peaks, HIDDEN)
        w8, w8_t, w_scale, w_seen = quantize.both(full_weight, None, False, peaks, WEIGHT)
        d_scale = torch.full_like(h_scale, 1 / BOUNDED_STEPS)
        rows, columns = len(h8), len(w8)
        size = max(TILE, CHUNK_BYTES // (hidden.element_size() * columns) // TILE * TILE)
        nats = hidden.new_zeros(rows, dtype=torch.float32)
        d8_t = hidden.new_empty(columns, rows, dtype=BOUNDED)
        d_hidden = torch.empty_like(full_hidden)
        aims = torch.nn.functional.pad(targets, (0, rows - total), value=ignore)
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            logits = fp8_product.product(h8[part], h_scale, w8, w_scale, hidden.dtype, True)
            d8 = gradient_of(logits, aims[part], nats[part], d8_t[:, part], vocab, softcap, ignore)
            # Sums over the vocabulary or all tokens are too long for short registers.
            d_hidden[part] = fp8_product.product(d8, d_scale, w8_t, w_scale, hidden.dtype, False)
        d_weight = fp8_product.product(d8_t, d_scale, h8_t, h_scale, weight.dtype, False)
        ctx.made = d_hidden[:total], d_weight[:vocab], quantize.largest([h_seen, w_seen])
        return nats.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("the loss head's gradients have been handed out already: call total_nats_delayed again")
        (d_hidden, d_weight, seen), ctx.made = ctx.made, None
        return d_hidden.mul_(grad), d_weight.mul_(grad), seen, None, None, None


def _formulas(
    logits: Tensor, targets: Tensor, nats: Tensor, d8_t: Tensor, vocab: int, softcap: float, ignore: int
) -> Tensor:
    """Writes nats, which sum up to the chunk's, and D's transpose, rounded; returns D rounded. Columns past `vocab` are zero."""
    nats[0], gradient = loss_and_gradient(logits[:, :vocab].float(), targets, softcap, ignore)
    d8 = torch.nn.functional.pad(gradient * BOUNDED_STEPS, (0, logits.shape[1] - vocab)).to(BOUNDED)
    d8_t.copy_(d8.t())
    return d8


def _kernels() -> Gradient:
    from dwslm.ops.loss_head.fp8_kernels import gradient  # Triton is there on GPU machines only

    return gradient
