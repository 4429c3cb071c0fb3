"""Kimi Delta Attention in Triton, by flash-linear-attention (`fla-core`), in its form for graphs.

That form lists the chunks on the device in a table of fixed shape, so nothing waits for the host and boundaries may change
in place under a recorded graph. The inner forward and backward are called rather than the public function, which
torch.compile cannot trace and which would keep the log decays besides their sums. Kernels tune themselves at the first call
of a shape, which must come before a graph is recorded; no kernel adds atomically.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dwslm.ops.segments import Segments
from dwslm.ops.tuning import compile_together

CHUNK = 64
MAX_HEAD_DIM = 256
# What fla's dispatcher could hand to other packages.
OPERATIONS = ("kda", "gla", "common", "gated_delta_rule")


def misfit(device: torch.device, dtype: torch.dtype, head_dim: int, bounded: bool) -> str | None:
    """Why the engine cannot take this case, and the way out; None where it can."""
    if device.type != "cuda":
        return f"needs a GPU of compute capability 8.0 or more, and the device is {device}: choose auto"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            "needs a GPU of compute capability 8.0 or more, and this one has "
            f"{capability[0]}.{capability[1]}: choose auto"
        )
    if dtype != torch.bfloat16:
        return f"computes in bfloat16, not in {str(dtype).removeprefix('torch.')}: choose auto"
    if not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"takes heads of 16 to {MAX_HEAD_DIM}, and head_dim is {head_dim}: choose auto"
    if not bounded:
        return "needs log decays of -5 or more: set model.delta_gate=bounded, or choose auto"
    return unavailable()


@functools.cache
def unavailable() -> str | None:
    """Why the library cannot be used, or None."""
    try:
        import fla.ops.kda  # noqa: F401
    except (ImportError, OSError) as error:
        return f"needs fla-core, which cannot be imported ({error}): pip install 'dwslm[gpu]'"
    return None


def pin() -> None:
    """Makes fla compute what it computes with no other package beside it, from boundaries as they are now.

    Raises:
        ValueError: if fla's dispatcher would hand a part to another package that happens to be installed.
    """
    import fla.backends
    import fla.utils

    # Read at every call. Tables made from boundaries are else kept by the boundaries' identity: refilling them in place would
    # bring the old table back.
    fla.utils.FLA_DISABLE_TENSOR_CACHE = True
    if fla.backends._DISPATCH_DISABLED:
        return
    for operation in OPERATIONS:
        registry = fla.backends._operation_registries.get(operation)
        other = registry.get_active() if registry else None
        if other is not None:
            raise ValueError(
                f"flash-linear-attention would hand parts of the delta rule to {other.backend_type}, because that is "
                "installed too: set FLA_DISABLE_BACKEND_DISPATCH=1 in the environment"
            )


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Forward, backward, and what lists the chunks."""
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd
    from fla.ops.utils.index import prepare_chunk_indices_static
    from fla.utils import input_guard

    pin()
    compile_together()
    return input_guard(chunk_kda_fwd), input_guard(chunk_kda_bwd), prepare_chunk_indices_static


def delta_rule_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, *, scale: float
) -> Tensor:
    """See `delta_rule`. bfloat16 q, k, v; log decays in [-5, 0].

    Raises:
        ValueError: as `pin` does.
    """
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    return _forward(q, k, v, g, beta, segments.cu_seqlens, scale)[0]


def _chunks(tokens: int, slots: int) -> int:
    """Rows of a table that holds the chunks of any `slots` segments."""
    return -(-tokens // CHUNK) + slots - 1


@torch.library.custom_op("dwslm::kda_fla", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, then what the backward reuses: running sums of g, scores q k^T, inverses of the chunks' systems, the
    table of chunks, and where each segment's begin in it."""
    forward, _, list_chunks = _library()
    chunks, offsets = list_chunks(
        cu_seqlens=cu_seqlens, chunk_size=CHUNK, nt_max=_chunks(q.shape[0], cu_seqlens.shape[0] - 1)
    )
    out, _, sums, scores, inverse, *_ = forward(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        scale=scale,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunks,
        chunk_offsets=offsets,
        chunk_size=CHUNK,
        safe_gate=True,
        use_graph=True,
    )
    return out[0], sums, scores, inverse, chunks, offsets


@torch.library.custom_op("dwslm::kda_fla_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    sums: Tensor,
    scores: Tensor,
    inverse: Tensor,
    chunks: Tensor,
    offsets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, backward, _ = _library()
    dq, dk, dv, dbeta, dg, *_ = backward(
        q=q[None],
        k=k[None],
        v=v[None],
        g=sums,
        beta=beta[None],
        Aqk=scores,
        Akk=inverse,
        scale=scale,
        initial_state=None,
        do=do[None],
        dht=None,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunks,
        chunk_offsets=offsets,
        chunk_size=CHUNK,
        safe_gate=True,
        use_graph=True,
    )
    # dq, dk and dv are views of buffers that the next backward in the process writes over.
    dq, dk, dv = (d[0].to(x.dtype, copy=True) for d, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, dg[0], dbeta[0]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, ...]:
    tokens, heads, _ = q.shape
    scores = q.new_empty(1, tokens, heads, CHUNK)
    chunks = cu_seqlens.new_empty(_chunks(tokens, cu_seqlens.shape[0] - 1), 2)
    return (
        torch.empty_like(v),
        torch.empty_like(g)[None],
        scores,
        torch.empty_like(scores),
        chunks,
        torch.empty_like(cu_seqlens),
    )


@_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, cu_seqlens: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return *(torch.empty_like(x) for x in (q, k, v)), torch.empty_like(sums[0]), torch.empty_like(beta)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, beta, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, beta, cu_seqlens, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or autograd would fill zeros for each of them


def _differentiate(ctx: Any, do: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_backward(do.contiguous(), *ctx.saved_tensors, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_save)
