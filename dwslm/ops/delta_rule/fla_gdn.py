"""Gated DeltaNet's own kernels, one decay a head, by flash-linear-attention.

They have no form for graphs: the table of chunks has as many rows as there are chunks, which the host must wait for twice a
layer, and which cannot be recorded. On Hopper, fla itself refuses the backward under Triton 3.4 to 3.7.0.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dwslm.ops.delta_rule import fla as kda
from dwslm.ops.segments import Segments

CHUNK = 64


def misfit(device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> str | None:
    """Why the engine cannot take this case, and the way out; None where it can. Any gate will do."""
    reason = kda.misfit(device, dtype, head_dim, bounded=True)
    if reason is None and _miscompiled():
        # fla's own words; it says them only in the backward.
        reason = (
            "is refused by fla-core: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for gated "
            "chunk_bwd_dqkwg (see #640). Please upgrade Triton to >= 3.7.1, or choose auto"
        )
    return reason


def _miscompiled() -> bool:
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Tensor]]:
    """Forward, backward, and what lists the chunks."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    from fla.ops.utils.index import prepare_chunk_indices
    from fla.utils import input_guard

    kda.pin()
    return input_guard(chunk_gated_delta_rule_fwd), input_guard(chunk_gated_delta_rule_bwd), prepare_chunk_indices


def gated_delta_rule_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, *, scale: float
) -> Tensor:
    """See `gated_delta_rule`. bfloat16 q, k, v.

    Raises:
        ValueError: as `fla.pin` does, or while a CUDA graph is recorded.
    """
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    return _forward(q, k, v, g, beta, segments.cu_seqlens, scale)[0]


def _list_chunks(cu_seqlens: Tensor) -> Tensor:
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "delta-rule engine 'fla_gdn' waits for the host at every call and cannot be recorded: use another engine"
        )
    return _library()[2](cu_seqlens, CHUNK)


@torch.library.custom_op("dwslm::gdn_fla", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, then what the backward reuses: running sums of g and inverses of the chunks' systems."""
    sums, out, inverse, *_ = _library()[0](
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        scale=scale,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
        chunk_indices=_list_chunks(cu_seqlens),
        chunk_size=CHUNK,
    )
    return out[0], sums, inverse


@torch.library.custom_op("dwslm::gdn_fla_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    sums: Tensor,
    inverse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dbeta, dg, *_ = _library()[1](
        q=q[None],
        k=k[None],
        v=v[None],
        g=sums,
        beta=beta[None],
        A=inverse,
        scale=scale,
        initial_state=None,
        do=do[None],
        dht=None,
        cu_seqlens=cu_seqlens,
        chunk_indices=_list_chunks(cu_seqlens),
        chunk_size=CHUNK,
    )
    dq, dk, dv = (d[0].to(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, dg[0], dbeta[0].to(beta.dtype)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, ...]:
    tokens, heads, _ = q.shape
    return torch.empty_like(v), torch.empty_like(g)[None], q.new_empty(1, tokens, heads, CHUNK)


@_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, cu_seqlens: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return *(torch.empty_like(x) for x in (q, k, v)), torch.empty_like(sums[0]), torch.empty_like(beta)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, beta, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, beta, cu_seqlens, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_backward(do.contiguous(), *ctx.saved_tensors, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_save)
