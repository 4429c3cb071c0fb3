"""Attention residuals and the norm after them in Triton, with each block's gradient gathered once.

A finished block is read by every later reader. Two things follow. Its scores for all of them are one small matrix product, made
when it is finished (`close`), since keys are parameters. And its gradient needs every reader's dh: autograd would have each
reader write a gradient for each source and then add them up, three passes a pair. Here a reader hands back its dh as the
gradient of a *carrier*, a tensor without memory that `close` gives out for each later reader, and the backward of `close`
reads every dh once.

    close     r_b = 1 / rms(v_b);  s_bj = r_b (v_b . key_j)  for all later readers j
    read      a_b = softmax_b(s_bj);  h = sum_b a_b v_b;  x = gain * h / rms(h)
    read'     dh;  D = dh . h                                        the softmax's inner sum
    close'    ds_bj = a_bj (dh_j . v_b - D_j)
              dv_b = sum_j a_bj dh_j + ds_bj (r_b key_j - s_bj r_b^2 v_b / width);  dkey_j = sum_t ds_bj r_b v_b

The block in progress, which one reader sees, is scored inside `read`. Nothing is added atomically.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
"""Of the reader's backward pass: each walks over tokens and keeps the sums for gain and key in registers."""


@triton.jit
def _row(base, t, c, width):
    return tl.load(base + t * tl.cast(width, tl.int64) + c, mask=c < width, other=0.0).to(tl.float32)


@triton.jit
def _store_row(base, t, c, width, value):
    tl.store(base + t * tl.cast(width, tl.int64) + c, value.to(base.dtype.element_ty), mask=c < width)


@triton.jit
def _vector(base, c, width):
    return tl.load(base + c, mask=c < width, other=0.0)


@triton.jit
def _read_kernel(
    sources, scores, partial, key, gain, x, h, stats, total, width, eps,
    COUNT: tl.constexpr, PARTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stats [3, T]: log-sum-exp of the scores, and score and inverse rms of the block in progress."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    largest = -float("inf")
    own = tl.zeros((BLOCK,), tl.float32)
    score = 0.0
    if PARTIAL:
        own = _row(partial, t, c, width)
        inverse = tl.math.rsqrt(tl.sum(own * own, axis=0) / width + eps)
        score = inverse * tl.sum(own * _vector(key, c, width), axis=0)
        largest = score
        tl.store(stats + total + t, score)
        tl.store(stats + 2 * total + t, inverse)
    for i in tl.static_range(COUNT):
        largest = tl.maximum(largest, tl.load(scores[i] + t))
    sum = 0.0
    mixed = tl.zeros((BLOCK,), tl.float32)
    if PARTIAL:
        sum = tl.exp(score - largest)
        mixed = sum * own
    for i in tl.static_range(COUNT):
        e = tl.exp(tl.load(scores[i] + t) - largest)
        sum += e
        mixed += e * _row(sources[i], t, c, width)
    tl.store(stats + t, largest + tl.log(sum))
    mixed /= sum
    _store_row(h, t, c, width, mixed)
    unit = mixed * tl.math.rsqrt(tl.sum(mixed * mixed, axis=0) / width + eps)
    _store_row(x, t, c, width, unit * _vector(gain, c, width))


@triton.jit
def _read_backward_kernel(
    dx, h, stats, partial, key, gain, dh, pair, dpartial, dkey, dgain, total, width, eps,
    PARTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pair [2, T]: log-sum-exp again, and D. dkey, dgain: sums of a program, [programs, width]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    key_row, gain_row = _vector(key, c, width), _vector(gain, c, width)
    gain_sum, key_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for t in range(program, total, programs):
        mixed, upstream = _row(h, t, c, width), _row(dx, t, c, width)
        inverse = tl.math.rsqrt(tl.sum(mixed * mixed, axis=0) / width + eps)
        unit = mixed * inverse
        gain_sum += upstream * unit
        upstream *= gain_row
        # Rounded before it is used: every source must see the same dh.
        rounded = (inverse * (upstream - unit * (tl.sum(upstream * unit, axis=0) / width))).to(dh.dtype.element_ty)
        tl.store(dh + t * tl.cast(width, tl.int64) + c, rounded, mask=c < width)
        d = rounded.to(tl.float32)
        inner = tl.sum(d * mixed, axis=0)
        log_sum = tl.load(stats + t)
        tl.store(pair + t, log_sum)
        tl.store(pair + total + t, inner)
        if PARTIAL:
            own = _row(partial, t, c, width)
            score, r = tl.load(stats + total + t), tl.load(stats + 2 * total + t)
            a = tl.exp(score - log_sum)
            ds = a * (tl.sum(d * own, axis=0) - inner)
            key_sum += (ds * r) * own
            _store_row(dpartial, t, c, width, a * d + ds * (r * key_row - (score * r * r / width) * own))
    tl.store(dgain + program * width + c, gain_sum, mask=c < width)
    tl.store(dkey + program * width + c, key_sum, mask=c < width)


@triton.jit
def _addresses_kernel(tensors, table, COUNT: tl.constexpr):
    """Where a list of tensors lies, as integers on the device: arguments of a kernel are part of a recording, a copy is not."""
    for i in tl.static_range(COUNT):
        tl.store(table + i, tensors[i].to(tl.int64))


@triton.jit
def _close_backward_kernel(v, inverse, scores, rows, pairs, dv, ds, total, width, readers, BLOCK: tl.constexpr):
    """dv float32 without the keys' share; ds [readers, T]: ds_bj r_b. rows, pairs: addresses of the readers' dh and pair."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    own, r = _row(v, t, c, width), tl.load(inverse + t)
    gathered = tl.zeros((BLOCK,), tl.float32)
    shrink = 0.0
    for j in range(readers):
        row = tl.multiple_of(tl.load(rows + j).to(tl.pointer_type(v.dtype.element_ty)), 16)
        pair = tl.load(pairs + j).to(tl.pointer_type(tl.float32))
        d = _row(row, t, c, width)
        score = tl.load(scores + j * tl.cast(total, tl.int64) + t)
        a = tl.exp(score - tl.load(pair + t))
        change = a * (tl.sum(d * own, axis=0) - tl.load(pair + total + t))
        gathered += a * d
        shrink += change * score
        tl.store(ds + j * tl.cast(total, tl.int64) + t, change * r)
    _store_row(dv, t, c, width, gathered - (shrink * r * r / width) * own)


def close(v: Tensor, keys: Tensor, eps: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Scores a finished block for its readers.

    Args:
        v: [T, width].
        keys: float32 [readers, width], of all readers to come.

    Returns:
        scores float32 [readers, T], and for each reader its two carriers; `read` wants those of its own.
    """
    scores, _, *carriers = _close(v, keys, eps)
    return scores, carriers[: len(keys)], carriers[len(keys) :]


def read(
    sources: list[Tensor],
    scores: list[Tensor],
    rows: list[Tensor],
    pairs: list[Tensor],
    partial: Tensor | None,
    key: Tensor,
    gain: Tensor,
    eps: float,
) -> Tensor:
    """rms_norm(mix of the sources) * gain: [T, width] in the sources' dtype.

    Args:
        sources: finished blocks, [T, width] each; scores: this reader's, float32 [T] each; rows, pairs: its carriers.
        partial: block in progress, or None.
        key, gain: float32 [width], the reader's query times its key gain, and the gain of the norm that follows.
    """
    return _read(sources, scores, rows, pairs, partial, key, gain, eps)[0]


@torch.library.custom_op("dwslm::depth_close", mutates_args=())
def _close(v: Tensor, keys: Tensor, eps: float) -> list[Tensor]:
    scores, inverse, *carriers = _close_shapes(v, keys, eps)
    wide = v.float()
    torch.rsqrt(wide.square().mean(-1) + eps, out=inverse)
    torch.mm(keys, wide.t(), out=scores).mul_(inverse)
    return [scores, inverse, *carriers]


@_close.register_fake
def _close_shapes(v: Tensor, keys: Tensor, eps: float) -> list[Tensor]:
    readers, total = len(keys), len(v)
    return [
        keys.new_empty(readers, total),
        keys.new_empty(total),
        *(v.new_empty_strided(v.shape, (0, 0)) for _ in range(readers)),
        *(keys.new_empty_strided((2, total), (0, 0)) for _ in range(readers)),
    ]


@torch.library.custom_op("dwslm::depth_close_backward", mutates_args=())
def _close_backward(
    v: Tensor, keys: Tensor, scores: Tensor, inverse: Tensor, rows: list[Tensor], pairs: list[Tensor]
) -> tuple[Tensor, Tensor]:
    total, width = v.shape
    readers = len(rows)
    dv, ds = torch.empty_like(v, dtype=torch.float32), torch.empty_like(scores)
    table = torch.empty(2, readers, dtype=torch.int64, device=v.device)
    for tensors, place in ((rows, table[0]), (pairs, table[1])):
        _addresses_kernel[(1,)](tuple(tensors), place, COUNT=readers)
    block = triton.next_power_of_2(width)
    _close_backward_kernel[(total,)](
        v, inverse, scores, table[0], table[1], dv, ds, total, width, readers, BLOCK=block, num_warps=1
    )
    return dv.addmm_(ds.t(), keys).to(v.dtype), ds @ v.float()


@_close_backward.register_fake
def _(
    v: Tensor, keys: Tensor, scores: Tensor, inverse: Tensor, rows: list[Tensor], pairs: list[Tensor]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(keys)


def _close_save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[0], output[1])
    ctx.readers = len(inputs[1])
    ctx.set_materialize_grads(False)


def _close_differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor, Tensor, None]:
    handed = [x.contiguous() for x in grads[2:] if x is not None]
    assert len(handed) == 2 * ctx.readers, "a reader of this block has no gradient"
    return *_close_backward(*ctx.saved_tensors, handed[: ctx.readers], handed[ctx.readers :]), None


_close.register_autograd(_close_differentiate, setup_context=_close_save)


@torch.library.custom_op("dwslm::depth_read", mutates_args=())
def _read(
    sources: list[Tensor],
    scores: list[Tensor],
    rows: list[Tensor],
    pairs: list[Tensor],
    partial: Tensor | None,
    key: Tensor,
    gain: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x, h, stats = _read_shapes(sources, scores, rows, pairs, partial, key, gain, eps)
    total, width = x.shape
    _read_kernel[(total,)](
        tuple(sources), tuple(scores), x if partial is None else partial, key, gain, x, h, stats, total, width, eps,
        COUNT=len(sources), PARTIAL=partial is not None, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return x, h, stats


@_read.register_fake
def _read_shapes(
    sources: list[Tensor],
    scores: list[Tensor],
    rows: list[Tensor],
    pairs: list[Tensor],
    partial: Tensor | None,
    key: Tensor,
    gain: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    like = sources[0]
    return like.new_empty(like.shape), like.new_empty(like.shape), key.new_empty(3, len(like))


@torch.library.custom_op("dwslm::depth_read_backward", mutates_args=())
def _read_backward(
    dx: Tensor, h: Tensor, stats: Tensor, partial: Tensor | None, key: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    total, width = h.shape
    programs = min(PROGRAMS, total)
    dh, pair = torch.empty_like(h), stats.new_empty(2, total)
    dpartial = torch.empty_like(h) if partial is not None else h.new_empty(0)
    dkey, dgain = key.new_empty(2, programs, width).unbind()
    _read_backward_kernel[(programs,)](
        dx, h, stats, h if partial is None else partial, key, gain, dh, pair, dpartial, dkey, dgain, total, width, eps,
        PARTIAL=partial is not None, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return dh, pair, dpartial, dkey.sum(0), dgain.sum(0)


@_read_backward.register_fake
def _(
    dx: Tensor, h: Tensor, stats: Tensor, partial: Tensor | None, key: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dpartial = torch.empty_like(h) if partial is not None else h.new_empty(0)
    return torch.empty_like(h), stats.new_empty(2, len(h)), dpartial, torch.empty_like(key), torch.empty_like(gain)


def _read_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    sources, _, _, _, partial, key, gain, ctx.eps = inputs
    ctx.count = len(sources)
    ctx.save_for_backward(*output[1:], partial, key, gain)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _read_differentiate(ctx: Any, dx: Tensor, *_: None) -> tuple[Any, ...]:
    h, stats, partial, key, gain = ctx.saved_tensors
    dh, pair, dpartial, dkey, dgain = _read_backward(dx.contiguous(), h, stats, partial, key, gain, ctx.eps)
    none = [None] * ctx.count
    own = dpartial if partial is not None else None
    return none, none, [dh] * ctx.count, [pair] * ctx.count, own, dkey, dgain, None


_read.register_autograd(_read_differentiate, setup_context=_read_save)
