"""Attention on Hopper by cuDNN's fused kernels, as graphs of NVIDIA's cuDNN frontend (`cudnn.pygraph`).

cuDNN's batch is the slots of `cu_seqlens`: lengths and first elements of the segments are tensors on the device, made from
`cu_seqlens` in each call, so that nothing waits for the host and a recorded step follows its boundaries. q, k and v are read
where they lie, as views of one projection, and fewer key-value heads are never expanded. Outputs, log-sum-exps and gradients
are packed without padding. The backward pass gets packed q, k and v (with views cuDNN 9.19 reads beyond its scratch, by q's
strides, and dq and dk are wrong) and log-sum-exps padded to slots x heads x context, as the frontend's own operator gives them.

A graph is built for one shape, stride pattern, scale, window and number of slots, which takes the host one to three seconds, and
is kept. So a first call must come before a CUDA graph is recorded. The backward pass adds into dq by atomics; its other mode on
Hopper, up to cuDNN 9.24, wants slots x heads x context^2 x 2 bytes of scratch and is not offered.
"""

import atexit
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dwslm.ops.segments import Segments

ALIGNMENT = 16
"""Bytes to which addresses and strides must be aligned: kernels read by 16, and give wrong results otherwise."""
ROUND = 64
"""The backward pass works in tiles of this many tokens; its scratch for dq must hold a whole one at the end."""

GRAPHS = 64
"""Graphs of each kind that are kept."""


def misfit(device: torch.device, head_dim: int) -> str | None:
    """Why the engine cannot take such heads on an NVIDIA GPU, and the way out; None where it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return (
            "needs a Hopper GPU (compute capability 9.0), and this one has "
            f"{capability[0]}.{capability[1]}: choose auto or flash"
        )
    if head_dim % 16 or head_dim > 128:
        return f"takes heads of a multiple of 16 up to 128, and head_dim is {head_dim}: choose auto or flash"
    if torch.are_deterministic_algorithms_enabled():
        return "has no deterministic backward pass that fits in memory: set train.deterministic=false, or choose auto or flash"
    return unavailable()


@functools.cache
def unavailable() -> str | None:
    """Why the library cannot be used, or None."""
    try:
        _library()
    except (ImportError, OSError, AttributeError) as error:
        return f"needs nvidia-cudnn-frontend, which cannot be imported ({error}): pip install 'dwslm[gpu]'"
    return None


@functools.cache
def _library() -> Any:
    import cudnn

    cudnn.pygraph  # noqa: B018  a package of that name without it would be another one
    atexit.register(_drop_graphs)
    return cudnn


def _drop_graphs() -> None:
    """Nothing else lets go of them before the interpreter ends, and the library's bindings would call them leaks."""
    _forward_graph.cache_clear()
    _backward_graph.cache_clear()


def attention_cudnn(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """See `attention`. bfloat16 or float16.

    Views with a dense last dimension, 16-byte aligned, are read where they lie; anything else is copied first.

    Raises:
        ValueError: with the library's own words where it refuses.
    """
    seen = 0 if window is None or window >= segments.context else window
    return _forward(q, k, v, segments.cu_seqlens, segments.context, scale, seen)[0]


# ---- graphs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """All that a graph is built for. Strides are (token, head), in elements; `window` 0 is none, `tokens` 0 does not matter."""

    device: str
    dtype: torch.dtype
    tokens: int
    slots: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]
    scale: float
    window: int

    @property
    def packed_q(self) -> tuple[int, int]:
        return self.heads * self.head_dim, self.head_dim

    @property
    def packed_k(self) -> tuple[int, int]:
        return self.kv_heads * self.head_dim, self.head_dim


@dataclass(frozen=True)
class _Graph:
    """A built graph, its scratch in bytes, and the numbers of its tensors in the order in which `execute` gets them."""

    graph: Any
    scratch: int
    order: tuple[int, ...]

    def execute(self, buffers: Sequence[Tensor]) -> None:
        # Scratch comes from PyTorch's allocator, so in a recording it lies in the recorded graph's own memory.
        scratch = buffers[0].new_empty(max(self.scratch, 1), dtype=torch.uint8)
        self.graph.execute(list(buffers), scratch, handle=_handle(buffers[0].device), tensor_uids=self.order)


class _Builder:
    """A frontend graph over packed tensors of a `_Layout`. Tensors are numbered as they are made."""

    def __init__(self, layout: _Layout, handle: Any):
        self.layout, self.cudnn = layout, _library()
        kinds = self.cudnn.data_type
        self.io = kinds.BFLOAT16 if layout.dtype == torch.bfloat16 else kinds.HALF
        self.graph = self.cudnn.pygraph(
            handle=handle, io_data_type=self.io, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
        )
        self.count = 0

    def _number(self) -> int:
        self.count += 1
        return self.count

    def vector(self, name: str, size: int, kind: Any) -> Any:
        return self.graph.tensor(
            name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=self._number()
        )

    def lengths(self) -> Any:
        return self.vector("lengths", self.layout.slots, self.cudnn.data_type.INT32)

    def starts(self, name: str) -> Any:
        return self.vector(f"starts_{name}", self.layout.slots + 1, self.cudnn.data_type.INT64)

    def _place(self, heads: int, strides: tuple[int, int], width: int) -> tuple[list[int], list[int]]:
        """(sizes, strides) of [slots, heads, context, width]; where a slot begins is up to its `starts`."""
        context = self.layout.context
        return [self.layout.slots, heads, context, width], [context * strides[0], strides[1], strides[0], 1]

    def tensor(self, name: str, heads: int, strides: tuple[int, int], starts: Any) -> Any:
        dim, stride = self._place(heads, strides, self.layout.head_dim)
        made = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=self.io, uid=self._number())
        return made.set_ragged_offset(starts)

    def padded_log_sum_exps(self) -> Any:
        """float32 [slots, heads, context]."""
        heads, context, kind = self.layout.heads, self.layout.context, self.cudnn.data_type.FLOAT
        dim, stride = [self.layout.slots, heads, context, 1], [heads * context, context, 1, 1]
        return self.graph.tensor(name="stats", dim=dim, stride=stride, data_type=kind, uid=self._number())

    def output(self, made: Any, heads: int, strides: tuple[int, int], starts: Any, width: int, kind: Any) -> int:
        number = self._number()
        dim, stride = self._place(heads, strides, width)
        made.set_uid(number).set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        made.set_ragged_offset(starts)
        return number

    def mask(self, lengths: Any) -> dict[str, Any]:
        """Causal inside each slot's length, over `window` keys, the query's own included."""
        return {
            "use_padding_mask": True,
            "seq_len_q": lengths,
            "seq_len_kv": lengths,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": self.layout.window or None,
            "diagonal_band_right_bound": 0,
        }

    def build(self, order: Sequence[int]) -> _Graph:
        modes = [self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK]
        # Plans of cuDNN itself alone: the frontend's own kernels, all of that name, would step in wherever the CUTLASS DSL is
        # installed.
        self.graph.deselect_engines(["sdpa_"])
        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans(modes)
            self.graph.check_support()
            self.graph.build_plans()
        except (self.cudnn.cudnnGraphNotSupportedError, NotImplementedError) as error:
            raise ValueError(f"attention engine 'cudnn' was refused by cuDNN: {error}") from error
        return _Graph(self.graph, self.graph.get_workspace_size(), tuple(order))


@functools.lru_cache(GRAPHS)
def _forward_graph(layout: _Layout) -> _Graph:
    """Takes: lengths, starts of q, k, v, o and log-sum-exps, q, k, v, o, log-sum-exps."""
    build = _Builder(layout, _handle(torch.device(layout.device)))
    lengths, at = build.lengths(), [build.starts(name) for name in ("q", "k", "v", "o", "stats")]
    q = build.tensor("q", layout.heads, layout.q, at[0])
    k = build.tensor("k", layout.kv_heads, layout.k, at[1])
    v = build.tensor("v", layout.kv_heads, layout.v, at[2])
    o, stats = build.graph.sdpa(
        name="attention", q=q, k=k, v=v, generate_stats=True, attn_scale=layout.scale, **build.mask(lengths)
    )
    inputs = range(1, build.count + 1)
    o = build.output(o, layout.heads, layout.packed_q, at[3], layout.head_dim, build.io)
    stats = build.output(stats, layout.heads, (layout.heads, 1), at[4], 1, build.cudnn.data_type.FLOAT)
    return build.build([*inputs, o, stats])


@functools.lru_cache(GRAPHS)
def _backward_graph(layout: _Layout) -> _Graph:
    """Takes: lengths, starts of q, k, v, o, dq, dk and dv, q, k, v, o, do, padded log-sum-exps, dq, dk, dv."""
    build = _Builder(layout, _handle(torch.device(layout.device)))
    lengths, at = build.lengths(), [build.starts(name) for name in ("q", "k", "v", "o", "dq", "dk", "dv")]
    q = build.tensor("q", layout.heads, layout.q, at[0])
    k = build.tensor("k", layout.kv_heads, layout.k, at[1])
    v = build.tensor("v", layout.kv_heads, layout.v, at[2])
    o = build.tensor("o", layout.heads, layout.packed_q, at[3])
    do = build.tensor("do", layout.heads, layout.packed_q, at[3])
    stats = build.padded_log_sum_exps()
    inputs = range(1, build.count + 1)
    whole = -(-layout.tokens // ROUND) * ROUND
    dq, dk, dv = build.graph.sdpa_backward(
        name="attention_backward",
        q=q,
        k=k,
        v=v,
        o=o,
        dO=do,
        stats=stats,
        attn_scale=layout.scale,
        # Without these the scratch is slots x context long instead of T.
        max_total_seq_len_q=whole,
        max_total_seq_len_kv=whole,
        use_deterministic_algorithm=False,
        **build.mask(lengths),
    )
    dq = build.output(dq, layout.heads, layout.packed_q, at[4], layout.head_dim, build.io)
    dk = build.output(dk, layout.kv_heads, layout.packed_k, at[5], layout.head_dim, build.io)
    dv = build.output(dv, layout.kv_heads, layout.packed_k, at[6], layout.head_dim, build.io)
    return build.build([*inputs, dq, dk, dv])


_handles = threading.local()  # a handle serves one thread at a time, and autograd has threads of its own


def _handle(device: torch.device) -> Any:
    """This thread's handle for a device, on PyTorch's current stream."""
    cudnn = _library()
    kept: dict[str, Any] = _handles.__dict__
    key = str(device)
    if key not in kept:
        with torch.cuda.device(device):
            kept[key] = cudnn.create_handle()
    cudnn.set_stream(handle=kept[key], stream=torch.cuda.current_stream(device).cuda_stream)
    return kept[key]


# ---- operators ------------------------------------------------------------------------------------------


def _readable(x: Tensor) -> Tensor:
    """x itself where kernels can read it in place."""
    strides = x.stride(0) * x.element_size() % ALIGNMENT == x.stride(1) * x.element_size() % ALIGNMENT == 0
    if x.stride(2) == 1 and strides and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _layout(
    q: Tensor, k: Tensor, v: Tensor, tokens: int, slots: int, context: int, scale: float, window: int
) -> _Layout:
    (_, heads, head_dim), kv_heads = q.shape, k.shape[1]
    at_q, at_k, at_v = ((x.stride(0), x.stride(1)) for x in (q, k, v))
    shape = tokens, slots, context, heads, kv_heads, head_dim
    return _Layout(str(q.device), q.dtype, *shape, at_q, at_k, at_v, scale, window)


def _segments(cu_seqlens: Tensor, strides: Sequence[int]) -> list[Tensor]:
    """Lengths of the slots, int32 [slots], then their first elements for each token stride, int64 [slots + 1]."""
    starts = cu_seqlens.long()
    made = {stride: starts * stride for stride in set(strides)}
    return [(cu_seqlens[1:] - cu_seqlens[:-1]).int(), *(made[stride] for stride in strides)]


def _by_segment(stats: Tensor, cu_seqlens: Tensor, context: int) -> Tensor:
    """[T, heads] as [slots, heads, context]; behind a segment's end stands what is finite: it is read, and masked."""
    if stats.is_cuda:
        from dwslm.ops.attention.pad import by_segment  # Triton is there on GPU machines only

        return by_segment(stats, cu_seqlens, context)
    at = cu_seqlens[:-1, None] + torch.arange(context)
    return stats[at.clamp(max=len(stats) - 1)].transpose(1, 2).contiguous()


@torch.library.custom_op("dwslm::attention_cudnn", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, context: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output [T, heads, head_dim] and log-sum-exps, float32 [T, heads]."""
    q, k, v = _readable(q), _readable(k), _readable(v)
    layout = _layout(q, k, v, 0, len(cu_seqlens) - 1, context, scale, window)
    out, stats = _shapes(q, k, v, cu_seqlens, context, scale, window)
    places = _segments(cu_seqlens, (layout.q[0], layout.k[0], layout.v[0], layout.packed_q[0], layout.heads))
    _forward_graph(layout).execute([*places, q, k, v, out, stats])
    return out, stats


@torch.library.custom_op("dwslm::attention_cudnn_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    context: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v = (x.contiguous() for x in (do, q, k, v))
    layout = _layout(q, k, v, len(q), len(cu_seqlens) - 1, context, scale, window)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    gradients = layout.packed_q[0], layout.packed_k[0], layout.packed_k[0]
    places = _segments(cu_seqlens, (layout.q[0], layout.k[0], layout.v[0], layout.packed_q[0], *gradients))
    padded = _by_segment(stats, cu_seqlens, context)
    _backward_graph(layout).execute([*places, q, k, v, out, do, padded, dq, dk, dv])
    return dq, dk, dv


@_forward.register_fake
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, context: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    context: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 7
    return *_backward(do.contiguous(), *ctx.saved_tensors, *ctx.settings), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
