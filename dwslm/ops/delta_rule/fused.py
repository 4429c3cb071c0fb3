"""Kimi Delta Attention in kernels of our own for Hopper, for heads of 128 in bfloat16.

Forward: `intra` (per chunk: keys and queries with their decays, inverse of the chunk's triangular system, scores), then a walk
over each document's chunks, which leaves outputs, updates and the state before each chunk. Backward: the walk back, and one
kernel of gradients. Kept from forward to backward beside the inputs: what `intra` gives, updates and states; together 14 KB a
token for 8 heads. No kernel adds atomically.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dwslm.ops.delta_rule.fused_gradient import gradient_kernel
from dwslm.ops.delta_rule.fused_intra import CHUNK, intra_kernel
from dwslm.ops.delta_rule.fused_walks import STAGES, order_kernel, walk_kernel
from dwslm.ops.segments import Segments

PART = 32  # channels that `intra` takes at a time
COLUMNS = 64  # of v, of a warpgroup's walk
CHANNELS = 32  # of k, that a warpgroup computes gradients of at a time
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def delta_rule_fused(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, *, scale: float
) -> Tensor:
    """See `delta_rule`. bfloat16 q, k, v, normalised q and k; log decays in [-5, 0], rounded to bfloat16 where they are float32;
    beta above 0 (below 1e-30 its gradient is taken as 0)."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    return _forward(q, k, v, g, beta, segments.cu_seqlens, segments.ids, scale)[0]


def _blocks(of: Tensor, width: int, height: int, across: int) -> TensorDescriptor:
    """For copies of [height, across] out of or into `of` as rows of `width`."""
    rows = of.view(-1, width)
    size = of.element_size()
    layout = gl.NVMMASharedLayout(min(size * across, 128), 8 * size, 2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [height, across], layout)


def _intra(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, ids: Tensor, scale: float) -> Six:
    """q_in, k_in, k_out, ends, system, scores."""
    (total, heads, dim), chunks = q.shape, triton.cdiv(len(q), CHUNK)
    results = q_in, k_in, k_out, ends, system, scores = _intra_shapes(q, beta, chunks)
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    intra_kernel[(min(triton.cdiv(chunks * heads, 2), programs),)](
        *(_blocks(x, heads * dim, CHUNK, PART) for x in (q, k, g.to(q.dtype))),
        *(_blocks(x, dim, CHUNK, PART) for x in (q_in, k_in, k_out)),
        *(_blocks(x, CHUNK, CHUNK, CHUNK) for x in (system, scores)), beta, ids, ends, chunks, total, scale,
        HEADS=heads, K=dim, num_warps=4,
    )  # fmt: skip
    return results


def _intra_shapes(q: Tensor, beta: Tensor, chunks: int) -> Six:
    _, heads, dim = q.shape
    q_in, k_in, k_out = (q.new_empty(chunks, heads, CHUNK, dim) for _ in range(3))
    system, scores = (q.new_empty(chunks, heads, CHUNK, CHUNK) for _ in range(2))
    return q_in, k_in, k_out, beta.new_empty(chunks, heads, dim), system, scores


def _walk(
    value: Tensor, chunks: Six, results: tuple[Tensor, Tensor, Tensor], beta: Tensor, cu_seqlens: Tensor,
    ids: Tensor, back: bool,
) -> None:  # fmt: skip
    """value: v, or do on the way back. chunks: what `_intra` gives. results: outputs, updates and states, or the gradients of
    right-hand sides, v and states; the first two go as copies forward, and by address on the way back, where a chunk's tokens may
    be written by two programs."""
    q_in, k_in, k_out, ends, system, scores = chunks
    first, second, states = results
    (total, heads, dim), slots = value.shape, len(cu_seqlens) - 1
    order = torch.empty_like(cu_seqlens)
    sizes = {"C": CHUNK, "SLOTS": triton.next_power_of_2(slots), "TILE": 16}
    order_kernel[(triton.cdiv(slots, 16),)](cu_seqlens, order, slots, **sizes)
    # A program that finds nothing to do holds a multiprocessor for a microsecond or two: not one for each spare slot.
    enough = triton.cdiv(8 * torch.cuda.get_device_properties(value.device).multi_processor_count, heads)
    walk_kernel[heads, min(slots, max(triton.cdiv(slots, 4), enough))](
        _blocks(value, heads * dim, CHUNK, COLUMNS),
        *(_blocks(x, dim, CHUNK, dim) for x in (k_in, q_in, k_out)), *(_blocks(x, CHUNK, CHUNK, CHUNK) for x in (system, scores)),
        *(_blocks(x, heads * dim, CHUNK, COLUMNS) for x in (first, second)), _blocks(states, dim, dim, COLUMNS),
        first, second, beta, ends, cu_seqlens, ids, order, total, HEADS=heads, BACK=back, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("dwslm::kda_fused", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, ids: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, and what backward wants: updates, states, and what `_intra` gives."""
    chunks = _intra(q, k, g, beta, ids, scale)
    out, updates = torch.empty_like(v), torch.empty_like(v)
    states = q.new_empty(*chunks[3].shape, v.shape[2])
    _walk(v, chunks, (out, updates, states), beta, cu_seqlens, ids, back=False)
    return out, updates, states, *chunks


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, ids: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count, (_, heads, dim) = (q.shape[0] + CHUNK - 1) // CHUNK, q.shape
    states = q.new_empty(count, heads, dim, dim)
    return torch.empty_like(v), torch.empty_like(v), states, *_intra_shapes(q, beta, count)


@torch.library.custom_op("dwslm::kda_fused_backward", mutates_args=())
def _backward(
    do: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, ids: Tensor, updates: Tensor,
    states: Tensor, q_in: Tensor, k_in: Tensor, k_out: Tensor, ends: Tensor, system: Tensor, scores: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    total, heads, dim = q.shape
    chunks, count = (q_in, k_in, k_out, ends, system, scores), len(states)
    dright, dv, dstates = torch.empty_like(do), torch.empty_like(do), torch.empty_like(states)
    _walk(do, chunks, (dright, dv, dstates), beta, cu_seqlens, ids, back=True)
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    gradient_kernel[(min(count, programs),)](
        *(_blocks(x, heads * dim, CHUNK, CHUNK) for x in (do, updates, dright)),
        *(_blocks(x, dim, CHANNELS, CHUNK) for x in (states, dstates)),
        *(_blocks(x, heads * dim, CHUNK, CHANNELS) for x in (q, k, g.bfloat16(), dq, dk, dg)),
        beta, ids, ends, dbeta, count, total, scale, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta


@_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, do, g, beta))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, g, beta, cu_seqlens, ids, ctx.scale = inputs
    ctx.save_for_backward(q, k, g, beta, cu_seqlens, ids, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or autograd would fill zeros for each of them


def _differentiate(ctx: Any, do: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_backward(do.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
