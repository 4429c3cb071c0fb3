"""Softmax attention: global layers, and the sliding window of the window arm."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dwslm.bench import engines_attention as others
from dwslm.bench.case import Case, Cost, Engine, Run, Shape
from dwslm.bench.work import Work
from dwslm.ops.attention import attention, resolve
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import Segments


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [_case(shape, window, dtype, device) for window in (None, shape.window)]


def _case(shape: Shape, window: int | None, dtype: torch.dtype, device: torch.device) -> Case:
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    scale = head_dim**-0.5

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        # After QK-norm q and k have entries of size 1, as normal numbers have.
        return [
            torch.randn(tokens, n, head_dim, device=generator.device, generator=generator).to(dtype)
            for n in (heads, kv_heads, kv_heads)
        ]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        q, k, v = inputs
        return (attention_reference(q, k, v, cu_seqlens, scale=scale, window=window),)

    def own(name: str) -> Run:
        resolve(name, device, dtype, head_dim)

        def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            q, k, v = inputs
            return (attention(q, k, v, segments, scale=scale, window=window, engine=name),)

        return run

    def plain(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        q, k, v = inputs
        return (attention(q, k, v, segments, scale=scale, window=window, engine="torch"),)

    def mask(segments: Segments) -> object:
        from dwslm.ops.attention.flex import block_mask

        return block_mask(segments, window)

    make = functools.partial
    # Two windows below 1,024 tokens, where the second row of the gate holds one segment: the window must cut it.
    return Case(
        op="attention",
        name="global" if window is None else f"window {window}",
        heads=heads,
        inputs=("q", "k", "v"),
        tokenwise=(True, True, True),
        learnt=(True, True, True),
        outputs=("o",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        plain=plain,
        cost=lambda work: cost(work, shape, window, dtype),
        gate_tokens=4 * shape.window,
        gate_context=2 * shape.window,
        engines=(
            Engine("flash", make(own, "flash"), ask=True),
            Engine(
                "cudnn",
                make(own, "cudnn"),
                "cudnn",
                "pip install 'dwslm[gpu]'",
                repeatable=False,
                same_bits=False,
                new_slots="graph",
                patience=60,
            ),
            Engine(
                "flash4",
                make(own, "flash4"),
                "flash_attn.cute",
                "pip install 'dwslm[flash4]'",
                ask=True,
                patience=60,
            ),
            Engine("flex", make(own, "flex"), extra={"mask": mask}, patience=90),
            Engine("torch", make(own, "torch"), ask=True),
            Engine(
                "flash_attn",
                make(own, "flash_attn"),
                "flash_attn",
                "pip install 'dwslm[flash-attn]' (it compiles for long)",
                ask=True,
            ),
            Engine(
                "fa3",
                make(others.flash_attention_3, scale, window),
                "flash_attn_interface",
                "build the folder hopper/ of the flash-attention repository (pip install . there), or take the wheel "
                "flash-attn-3 from PyTorch's own index",
                ask=True,
            ),
        ),
    )


def visible_pairs(lengths: Sequence[int] | np.ndarray, window: int | None) -> int:
    """Pairs of a query and a key that it sees, over segments of these lengths."""
    n = np.asarray(lengths, dtype=np.int64)
    if window is None:
        return int((n * (n + 1) // 2).sum())
    full = np.maximum(n - window, 0)  # queries that see a whole window
    ramp = np.minimum(n, window)
    return int((ramp * (ramp + 1) // 2 + full * window).sum())


def cost(work: Work, shape: Shape, window: int | None, dtype: torch.dtype) -> Cost:
    """Forward: two products over the visible pairs (q k^T, p v), 2 operations a multiply-add: 4 heads head_dim pairs.
    Backward: five (q k^T again, do v^T, p^T do, ds k, ds^T q): 10 heads head_dim pairs.
    Bytes: forward q, k, v in, o out; backward q, k, v, o, do in, dq, dk, dv out. The log-sum-exp is left out.
    """
    pairs = visible_pairs(work.lengths(), window)
    product = shape.heads * shape.head_dim * pairs
    query = work.tokens * shape.heads * shape.head_dim * dtype.itemsize
    keys = 2 * work.tokens * shape.kv_heads * shape.head_dim * dtype.itemsize
    forward = 2 * query + keys
    return Cost(4.0 * product, 14.0 * product, forward, forward + 4 * query + 2 * keys)
