"""The loss head with one Triton pass over a chunk's logits, which writes what is to be multiplied with over them.

    E = exp(2 l / cap);  r = 1 / (1 + E)                 (1 - tanh(l / cap)) / 2, so that the capped logit is cap - 2 cap r
    e = exp(-2 cap r);  N = sum_j e_j                    nats = ln N + 2 cap r at the target
    d nats / d l = (e / N - onehot) 4 r (1 - r)

The gradient needs N, and N the whole row. But 4 / N is one factor a row, and a factor of a row may as well stand in the other
operand of the weight's product and in the result of the hidden state's. So a program walks down its row once, writes
(e - N onehot) r (1 - r), and mends the target's entry at the end; 4 hidden / N is written beside it. Rows of d_hidden get their
factor in the backward pass, with the upstream gradient's. Everything is float32 in registers, nothing is added atomically.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.loss_head.compiled import CHUNK_BYTES

TILE = 1024  # logits at a time; two of them go together
BLOCK = 1024  # columns of hidden states at a time
WARPS = 4
KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)  # else a minimum hides one, and the loss looks healthy
DOUBLE = tl.constexpr(2.885390081777927)  # 2 / ln 2: exp(2 x) is exp2 of this times x


@triton.jit
def _exponentials(a, b, cap):
    """e and r (1 - r) of two tiles of logits. One reciprocal does for a pair: special functions are what is scarce here."""
    a, b = a * (DOUBLE / cap), b * (DOUBLE / cap)
    # Past 60 nothing changes any more (r is 0 beside 1), and the pair's product stays finite.
    a = 1.0 + tl.math.exp2(tl.minimum(a, 60.0, propagate_nan=KEEP_NAN))
    b = 1.0 + tl.math.exp2(tl.minimum(b, 60.0, propagate_nan=KEEP_NAN))
    root = tl.math.rsqrt(a * b)
    pair = root * root
    a, b = b * pair, a * pair
    return tl.math.exp2(a * (-DOUBLE * cap)), tl.math.exp2(b * (-DOUBLE * cap)), a - a * a, b - b * b


@triton.jit
def _nats_kernel(
    logits, hidden, targets, nats, inverse, scaled, vocab, width, cap, ignore,
    TILE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: the vocabulary is a multiple of two tiles. Rows that are not scored keep their logits, and the factor 0."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    scored = target != ignore
    logits += row * vocab
    hidden += row * width
    scaled += row * width
    factor = 0.0
    loss = 0.0
    if scored:
        aim = tl.load(logits + target).to(tl.float32)
        c = tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float32)
        for i in range(0, vocab, 2 * TILE):
            if WHOLE:
                a, b = tl.load(logits + i + c).to(tl.float32), tl.load(logits + i + TILE + c).to(tl.float32)
                e_a, e_b, slope_a, slope_b = _exponentials(a, b, cap)
                tl.store(logits + i + c, (e_a * slope_a).to(logits.dtype.element_ty))
                tl.store(logits + i + TILE + c, (e_b * slope_b).to(logits.dtype.element_ty))
            else:
                there_a, there_b = i + c < vocab, i + TILE + c < vocab
                a = tl.load(logits + i + c, mask=there_a, other=0.0).to(tl.float32)
                b = tl.load(logits + i + TILE + c, mask=there_b, other=0.0).to(tl.float32)
                e_a, e_b, slope_a, slope_b = _exponentials(a, b, cap)
                e_a, e_b = tl.where(there_a, e_a, 0.0), tl.where(there_b, e_b, 0.0)
                tl.store(logits + i + c, (e_a * slope_a).to(logits.dtype.element_ty), mask=there_a)
                tl.store(logits + i + TILE + c, (e_b * slope_b).to(logits.dtype.element_ty), mask=there_b)
            total += e_a + e_b
        normaliser = tl.sum(total, axis=0)
        r = 1.0 / (1.0 + tl.exp(tl.minimum(2.0 * aim / cap, 60.0, propagate_nan=KEEP_NAN)))
        loss = tl.log(normaliser) + 2.0 * cap * r
        at_target = (tl.exp(-2.0 * cap * r) - normaliser) * (r - r * r)
        tl.debug_barrier()  # the row has been written by other threads than the one that mends it
        tl.store(logits + target, at_target.to(logits.dtype.element_ty))
        factor = 4.0 / normaliser
    tl.store(nats + row, loss)
    tl.store(inverse + row, factor)
    for i in range(0, width, BLOCK):
        c = i + tl.arange(0, BLOCK)
        h = tl.load(hidden + c, mask=c < width, other=0.0).to(tl.float32)
        tl.store(scaled + c, (h * factor).to(scaled.dtype.element_ty), mask=c < width)


@triton.jit
def _rows_kernel(x, inverse, grad, width, BLOCK: tl.constexpr):
    """x[row] *= inverse[row] * grad."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(inverse + row) * tl.load(grad)
    x += row * width
    for i in range(0, width, BLOCK):
        c = i + tl.arange(0, BLOCK)
        y = tl.load(x + c, mask=c < width, other=0.0).to(tl.float32) * factor
        tl.store(x + c, y.to(x.dtype.element_ty), mask=c < width)


def value_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, ignore: int, needs_grad: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """As `chunked.value_and_gradients`, but d_hidden lacks a factor for each row, which comes last: float32 [T]."""
    hidden = hidden.contiguous()
    total, (vocab, width) = len(hidden), weight.shape
    size = min(total, max(1, CHUNK_BYTES // (hidden.element_size() * vocab)))
    nats, inverse = torch.empty(2, total, dtype=torch.float32, device=hidden.device).unbind()
    d_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    d_weight = torch.empty_like(weight, dtype=torch.float32) if needs_grad[1] else None
    logits, scaled = hidden.new_empty(size, vocab), hidden.new_empty(size, width)
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        count = rows.stop - start
        chunk, h = logits[:count], scaled[:count]
        torch.mm(hidden[rows], weight.T, out=chunk)
        _nats_kernel[(count,)](
            chunk, hidden[rows], targets[rows], nats[rows], inverse[rows], h, vocab, width, softcap, ignore,
            TILE=TILE, BLOCK=BLOCK, WHOLE=vocab % (2 * TILE) == 0, num_warps=WARPS,
        )  # fmt: skip
        if d_hidden is not None:
            torch.mm(chunk, weight, out=d_hidden[rows])
        if d_weight is not None:
            add_product(d_weight, chunk.T, h, fresh=start == 0)
    return nats.sum(), d_hidden, d_weight, inverse


def add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """out (float32) += a b by the product itself, without a pass of its own; out = a b where `fresh`."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out) if fresh else out.addmm_(a, b)
    elif fresh:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


def scale_rows(d_hidden: Tensor, inverse: Tensor, grad: Tensor) -> None:
    """d_hidden's rows times their factors and `grad`, a float32 scalar on the device; in place."""
    _rows_kernel[(len(d_hidden),)](d_hidden, inverse, grad, d_hidden.shape[1], BLOCK=BLOCK, num_warps=4)
