"""Attention residuals and the norm after them in Triton, with each block's gradient gathered once.

A finished block is read by every later reader. Two things follow. Its scores for all of them are one small matrix product, made
when it is finished (`close`), since keys are parameters. And its gradient needs every reader's dh: autograd would have each
reader write a gradient for each source and then add them up, three passes a pair. Here a reader hands back its dh as the
gradient of a *carrier*, a tensor without memory that `close` gives out for each later reader, and the backward of `close`
reads every dh once.

    close     v_b = p + y;  r_b = 1 / rms(v_b);  s_bj = r_b (v_b . key_j)  for all later readers j
    read      p' = p + y;  a_b = softmax_b(s_bj);  h = sum_b a_b v_b;  x = gain * h / rms(h)
    read'     dh;  D = dh . h, the softmax's inner sum;  dp = dy = dp' + (a dh + ...)  as for dv_b
    close'    ds_bj = a_bj (dh_j . v_b - D_j);  dp = dy = dv_b;  dkey_j = sum_t ds_bj r_b v_b
              dv_b = sum_j a_bj dh_j + ds_bj (r_b key_j - s_bj r_b^2 v_b / width)

The block in progress, p, is scored inside `read`, which also adds the last sublayer's output y to it. The sum has two uses, the
next addition and this reader, whose gradients autograd would add in a pass of its own. So p is handed on as a value alone, and
its gradient by a carrier too, the *link*: what comes back through it is added in the pass that is made anyway. h is not kept,
since the next product keeps x.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dwslm.ops.depth_mix.kernels import (
    addresses_kernel,
    close_backward_kernel,
    close_kernel,
    keys_backward_kernel,
    read_backward_kernel,
    read_kernel,
)

ROW = 1024  # columns of a row that one warp, or four in read', keep in registers; longer rows get more
RESIDENT = 4  # programs of read' on a multiprocessor: all at once, each with its share of the tokens
STAGES = 3  # of read': rows of the next two tokens are on their way through shared memory
MOST_REGISTERS = 128  # of a thread, for 16 warps on a multiprocessor
CLOSE_REGISTERS = 144  # of close': 14 warps with two rows each on their way
MOST_WARPS = 16  # of a program, where rows are long: more would leave a thread fewer than 128 registers
REGISTER_FILE = 65_536  # registers of a multiprocessor: a program that asks for more does not start
KEY_PROGRAMS = 64  # over which the tokens are spread in keys'


class Partial(NamedTuple):
    """The block in progress: its value [T, width], without gradient, and the link that brings it."""

    value: Tensor
    link: Tensor


class Closed(NamedTuple):
    """A finished block: its value [T, width], scores float32 [readers, T], and for each reader its two carriers."""

    value: Tensor
    scores: Tensor
    rows: list[Tensor]
    pairs: list[Tensor]


def close(partial: Partial | None, y: Tensor, keys: Tensor, eps: float) -> Closed:
    """Finishes a block and scores it for its readers.

    Args:
        partial: the block so far, or None where y is all of it.
        y: output of its last sublayer, [T, width].
        keys: float32 [readers, width], of all readers to come.
    """
    y = y.contiguous()
    value, scores, _, *carriers = _close(*(partial or (None, None)), y, keys, eps)
    return Closed(y if partial is None else value, scores, carriers[: len(keys)], carriers[len(keys) :])


def read(
    sources: list[Tensor],
    scores: list[Tensor],
    rows: list[Tensor],
    pairs: list[Tensor],
    partial: Partial | None,
    y: Tensor | None,
    key: Tensor,
    gain: Tensor,
    eps: float,
) -> tuple[Tensor, Partial | None]:
    """rms_norm(mix of the sources) * gain, [T, width] in the sources' dtype, and the block in progress with y added.

    Args:
        sources: finished blocks, [T, width] each; scores: this reader's, float32 [T] each; rows, pairs: its carriers.
        partial: the block in progress as the last reader left it, None before its first sublayer is added.
        y: output of the last sublayer, [T, width]; None where no block is in progress.
        key, gain: float32 [width], the reader's query times its key gain, and the gain of the norm that follows.
    """
    y = None if y is None else y.contiguous()
    x, _, value, link = _read(sources, scores, rows, pairs, *(partial or (None, None)), y, key, gain, eps)
    if y is None:
        return x, None
    # A value alone: with its gradient it would come back twice.
    return x, Partial(y.detach() if partial is None else value, link)


def _threads(width: int, warps: int, registers: int) -> dict[str, int]:
    """Launch arguments of a kernel that keeps a row in registers: `warps` for `ROW` columns, and `registers` of a thread."""
    warps = min(MOST_WARPS, warps * max(1, triton.next_power_of_2(width) // ROW))
    return {"num_warps": warps, "maxnreg": min(registers, REGISTER_FILE // (32 * warps))}


@torch.library.custom_op("dwslm::depth_close", mutates_args=())
def _close(previous: Tensor | None, link: Tensor | None, y: Tensor, keys: Tensor, eps: float) -> list[Tensor]:
    value, scores, inverse, *carriers = _close_shapes(previous, link, y, keys, eps)
    (total, width), readers = y.shape, len(keys)
    # float32 products have no matrix unit.
    tokens, columns, most = (64, 64, 64) if y.dtype == torch.bfloat16 else (32, 32, 32)
    tile = min(most, max(16, triton.next_power_of_2(readers)))
    close_kernel[triton.cdiv(total, tokens), triton.cdiv(readers, tile)](
        y if previous is None else previous, y, keys, value, scores, inverse, total, width, readers, eps,
        ADD=previous is not None, TOKENS=tokens, COLUMNS=columns, READERS=tile, num_warps=4,
    )  # fmt: skip
    return [value, scores, inverse, *carriers]


@_close.register_fake
def _close_shapes(previous: Tensor | None, link: Tensor | None, y: Tensor, keys: Tensor, eps: float) -> list[Tensor]:
    readers, total = len(keys), len(y)
    return [
        y.new_empty(0 if previous is None else y.shape),
        keys.new_empty(readers, total),
        keys.new_empty(total),
        *(y.new_empty_strided(y.shape, (0, 0)) for _ in range(readers)),
        *(keys.new_empty_strided((2, total), (0, 0)) for _ in range(readers)),
    ]


@torch.library.custom_op("dwslm::depth_close_backward", mutates_args=())
def _close_backward(
    v: Tensor, keys: Tensor, scores: Tensor, inverse: Tensor, rows: list[Tensor], pairs: list[Tensor]
) -> tuple[Tensor, Tensor]:
    (total, width), readers = v.shape, len(rows)
    dv, ds = torch.empty_like(v), torch.empty_like(scores)
    assert all(dh.data_ptr() % 16 == 0 for dh in rows), "the kernel moves 16 bytes at once"
    table = torch.empty(2, readers, dtype=torch.int64, device=v.device)
    addresses_kernel[(1,)]((*rows, *pairs), table, COUNT=2 * readers)
    close_backward_kernel[(total,)](
        v, inverse, scores, keys, table[0], table[1], dv, ds, total, width, readers,
        BLOCK=triton.next_power_of_2(width), **_threads(width, 1, CLOSE_REGISTERS),
    )  # fmt: skip
    tokens, columns, most = (64, 128, 64) if v.dtype == torch.bfloat16 else (32, 32, 32)
    tile = min(most, max(16, triton.next_power_of_2(readers)))
    share = triton.cdiv(triton.cdiv(total, KEY_PROGRAMS), tokens) * tokens
    programs = triton.cdiv(total, share)
    sums = keys.new_empty(programs, readers, width)
    keys_backward_kernel[programs, triton.cdiv(width, columns), triton.cdiv(readers, tile)](
        v, ds, sums, total, width, readers, share, READERS=tile, COLUMNS=columns, TOKENS=tokens, num_warps=4
    )
    return dv, sums.sum(0)


@_close_backward.register_fake
def _(
    v: Tensor, keys: Tensor, scores: Tensor, inverse: Tensor, rows: list[Tensor], pairs: list[Tensor]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(keys)


def _close_save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    previous, _, y, keys, _ = inputs
    ctx.added, ctx.readers = previous is not None, len(keys)
    ctx.save_for_backward(output[0] if ctx.added else y, keys, output[1], output[2])
    ctx.set_materialize_grads(False)


def _close_differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    handed = [x.contiguous() for x in grads[3:] if x is not None]
    assert grads[0] is None, "a block is read through `read` alone"
    assert len(handed) == 2 * ctx.readers, "a reader of this block has no gradient"
    dv, dkeys = _close_backward(*ctx.saved_tensors, handed[: ctx.readers], handed[ctx.readers :])
    return None, dv if ctx.added else None, dv, dkeys, None


_close.register_autograd(_close_differentiate, setup_context=_close_save)


@torch.library.custom_op("dwslm::depth_read", mutates_args=())
def _read(
    sources: list[Tensor],
    scores: list[Tensor],
    rows: list[Tensor],
    pairs: list[Tensor],
    previous: Tensor | None,
    link: Tensor | None,
    y: Tensor | None,
    key: Tensor,
    gain: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, stats, value, onward = _read_shapes(sources, scores, rows, pairs, previous, link, y, key, gain, eps)
    total, width = x.shape
    read_kernel[(total,)](
        tuple(sources), tuple(scores), x if previous is None else previous, x if y is None else y, key, gain, x,
        value, stats, total, width, eps, COUNT=len(sources), PARTIAL=y is not None, ADD=previous is not None,
        BLOCK=triton.next_power_of_2(width), **_threads(width, 1, MOST_REGISTERS),
    )  # fmt: skip
    return x, stats, value, onward


@_read.register_fake
def _read_shapes(
    sources: list[Tensor],
    scores: list[Tensor],
    rows: list[Tensor],
    pairs: list[Tensor],
    previous: Tensor | None,
    link: Tensor | None,
    y: Tensor | None,
    key: Tensor,
    gain: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = sources[0]
    value = like.new_empty(0 if previous is None else like.shape)
    onward = like.new_empty(0) if y is None else like.new_empty_strided(like.shape, (0, 0))
    return like.new_empty(like.shape), key.new_empty(4, len(like)), value, onward


@torch.library.custom_op("dwslm::depth_read_backward", mutates_args=())
def _read_backward(
    dx: Tensor, x: Tensor, stats: Tensor, value: Tensor | None, incoming: Tensor | None, key: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh, pair, dvalue, _ = _read_backward_shapes(dx, x, stats, value, incoming, key, gain)
    total, width = x.shape
    block = triton.next_power_of_2(width)
    sized = torch.cuda.get_device_properties(x.device).multi_processor_count * RESIDENT if x.is_cuda else RESIDENT
    programs = min(sized, total)
    sums = key.new_empty(1 if value is None else 2, programs, width)
    read_backward_kernel[(programs,)](
        dx, x, stats, x if value is None else value, x if incoming is None else incoming, key, gain, dh, pair, dvalue,
        sums, total, width, PARTIAL=value is not None, INCOMING=incoming is not None, BLOCK=block, STAGES=STAGES,
        **_threads(width, 4, MOST_REGISTERS),
    )  # fmt: skip
    return dh, pair, dvalue, sums.sum(1)


@_read_backward.register_fake
def _read_backward_shapes(
    dx: Tensor, x: Tensor, stats: Tensor, value: Tensor | None, incoming: Tensor | None, key: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dvalue = x.new_empty(0 if value is None else x.shape)
    return torch.empty_like(x), stats.new_empty(2, len(x)), dvalue, key.new_empty(1 if value is None else 2, len(key))


def _read_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, _, _, _, previous, _, y, key, gain, _ = inputs
    x, stats, value, onward = output
    ctx.count, ctx.added, ctx.partial = len(sources), previous is not None, y is not None
    ctx.save_for_backward(x, stats, value if ctx.added else y, key, gain)
    ctx.mark_non_differentiable(stats, value, *(() if ctx.partial else (onward,)))
    ctx.set_materialize_grads(False)


def _read_differentiate(ctx: Any, dx: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    x, stats, value, key, gain = ctx.saved_tensors
    incoming = others[2].contiguous() if others[2] is not None else None
    dh, pair, dvalue, sums = _read_backward(dx.contiguous(), x, stats, value, incoming, key, gain)
    none = [None] * ctx.count
    through_link, through_y = dvalue if ctx.added else None, dvalue if ctx.partial else None
    dkey = sums[1] if ctx.partial else None
    return none, none, [dh] * ctx.count, [pair] * ctx.count, None, through_link, through_y, dkey, sums[0], None


_read.register_autograd(_read_differentiate, setup_context=_read_save)
