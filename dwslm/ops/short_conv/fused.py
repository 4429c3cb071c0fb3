"""`short_conv` as one Triton kernel forward and one backward, each reading and writing every value once.

A program is one warp: it walks down a span of tokens with one head's channels in its lanes and the last three tokens in
registers. So shifts cost nothing, a head's sum of squares is a reduction inside the warp, and the weight's gradient grows in
registers. Backward computes the activations again rather than keeping them. A span reads three tokens of its neighbour (six
backward); the spans' weight gradients are added up in a fixed order afterwards. Nothing is added atomically: the same input
gives the same bits. The projection's other columns pass through, so that its gradient is written where it belongs instead of
being joined from parts.

A turn works on four tokens while the next four are on their way. Segments are long: hardly ever does one begin within a
turn, and only then do its tokens go one by one, with taps masked; so does what is left of a span. Strides are constants of
the compiler, so that addresses are offsets in the loads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dwslm.ops.fp8.kernels import _round, _scaled
from dwslm.ops.segments import Segments

SPAN = 128  # tokens of a program
TURN = 4  # of them worked on at a time
REGISTERS = 128  # of a thread backward: 16 warps a multiprocessor instead of 12, for one spilled
EPS = tl.constexpr(1e-6)  # as in l2_norm


@triton.jit
def _words(x, HEAD: tl.constexpr, PAIRS: tl.constexpr):
    """Pointers to a head's channels at x; PAIRS: to words of two bfloat16, of which a loop carries half as many."""
    if PAIRS:
        return x.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, HEAD // 2)
    else:
        return x + tl.arange(0, HEAD)


@triton.jit
def _wide(words):
    """A head's channels in float32."""
    if words.dtype == tl.int32:
        low, high = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(2 * words.shape[0])
    else:
        return words.to(tl.float32)


@triton.jit
def _load(x, ROW: tl.constexpr, there, TURN: tl.constexpr):
    """Words of the tokens of a turn."""
    words: tl.tuple = ()
    for j in tl.static_range(TURN):
        words += (tl.load(x + j * ROW, there),)
    return words


@triton.jit
def _append(v, words):
    """v and the channels in the words."""
    for j in tl.static_range(len(words)):
        v += (_wide(words[j]),)
    return v


@triton.jit
def _before(x, ROW: tl.constexpr, there):
    """The three tokens before x, zero where there are none."""
    return (
        _wide(tl.load(x - 3 * ROW, there, 0)),
        _wide(tl.load(x - 2 * ROW, there, 0)),
        _wide(tl.load(x - ROW, there, 0)),
    )


@triton.jit
def _half_taps(weight, c):
    """Half the weights of the current token and of the three before it."""
    w0, w1 = tl.load(weight + c * 4 + 3), tl.load(weight + c * 4 + 2)
    w2, w3 = tl.load(weight + c * 4 + 1), tl.load(weight + c * 4)
    return 0.5 * w0, 0.5 * w1, 0.5 * w2, 0.5 * w3


@triton.jit
def _inside(position, v1, v2, v3):
    """Values of the three tokens before one at `position` of its segment, zero where they belong to another."""
    return tl.where(position >= 1, v1, 0.0), tl.where(position >= 2, v2, 0.0), tl.where(position >= 3, v3, 0.0)


@triton.jit
def _tanh(z, FAST: tl.constexpr):
    if FAST:  # one instruction, right to 2^-11, where the other takes a dozen
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], tl.float32, is_pure=True, pack=1)
    else:
        root = tl.math.rsqrt(1.0 + tl.exp(-2.0 * z))  # no division
        return 2.0 * root * root - 1.0


@triton.jit
def _silu(x0, x1, x2, x3, w, FAST: tl.constexpr):
    """SiLU of the convolution, and the tanh in it. z is half the convolution: 2 z sigmoid(2 z) = z + z tanh(z)."""
    z = x0 * w[0] + x1 * w[1] + x2 * w[2] + x3 * w[3]
    tanh = _tanh(z, FAST)
    return z + z * tanh, tanh


@triton.jit
def _pass_through(
    source, to, here, SOURCE_ROW: tl.constexpr, TO_ROW: tl.constexpr, MORE: tl.constexpr, WIDE: tl.constexpr
):
    """Copies MORE columns of a span's tokens."""
    t, c = tl.arange(0, 4), tl.arange(0, WIDE)
    for i in range(0, here, 4):
        there = (i + t < here)[:, None] & (c < MORE)[None, :]
        block = tl.load(source + (i + t)[:, None] * SOURCE_ROW + c[None, :], mask=there)
        tl.store(to + (i + t)[:, None] * TO_ROW + c[None, :], block, mask=there)


@triton.jit
def _forward_token(x0, x1, x2, x3, w, y, UNIT: tl.constexpr, FAST: tl.constexpr):
    out, _ = _silu(x0, x1, x2, x3, w, FAST)
    if UNIT:
        out = out * tl.math.rsqrt(tl.sum(out * out, axis=0) + EPS)
    tl.store(y, out.to(y.dtype.element_ty))


@triton.jit
def _forward_span(
    x, weight, positions, y, c, start, here,
    X_ROW: tl.constexpr, Y_ROW: tl.constexpr, TURN: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """All pointers at the span's first token, of which there are `here`, and this head's first channel."""
    w = _half_taps(weight, c)
    x3, x2, x1 = _before(x, X_ROW, start > 0)
    words = _load(x, X_ROW, here >= TURN, TURN)
    p = tl.load(positions + TURN - 1, mask=here >= TURN, other=0).to(tl.int32)
    for i in range(0, here, TURN):
        v = _append((x3, x2, x1), words)
        whole, p = p >= TURN + 2, 0  # where the last is at TURN + 2 or later, the first is at 3 or later
        if i + 2 * TURN <= here:
            words = _load(x + TURN * X_ROW, X_ROW, None, TURN)
            p = tl.load(positions + 2 * TURN - 1).to(tl.int32)
        if whole:
            for j in tl.static_range(TURN):
                _forward_token(v[j + 3], v[j + 2], v[j + 1], v[j], w, y + j * Y_ROW, UNIT, FAST)
            x3, x2, x1 = v[TURN], v[TURN + 1], v[TURN + 2]
        else:
            for j in range(tl.minimum(here - i, TURN)):
                x0 = _wide(tl.load(x + j * X_ROW))
                v1, v2, v3 = _inside(tl.load(positions + j), x1, x2, x3)
                _forward_token(x0, v1, v2, v3, w, y + j * Y_ROW, UNIT, FAST)
                x3, x2, x1 = x2, x1, x0
        x += TURN * X_ROW
        y += TURN * Y_ROW
        positions += TURN


@triton.jit
def _forward_kernel(
    x, weight, positions, q, k, v, rest, total, HEADS: tl.constexpr, HEAD: tl.constexpr, SPAN: tl.constexpr, TURN: tl.constexpr,
    X_ROW: tl.constexpr, PAIRS: tl.constexpr, FAST: tl.constexpr, MORE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    Y_ROW: tl.constexpr = HEADS * HEAD
    X_WORDS: tl.constexpr = X_ROW // 2 if PAIRS else X_ROW
    # Heads go fastest: programs that run together then read whole rows.
    block, start = tl.program_id(0), tl.program_id(1).to(tl.int64) * SPAN
    here = tl.minimum(total - start, SPAN).to(tl.int32)
    x += start * X_ROW + block * HEAD
    weight += block * HEAD * 4
    positions += start
    c = tl.arange(0, HEAD)
    at = start * Y_ROW + block % HEADS * HEAD + c
    words = _words(x, HEAD, PAIRS)
    if block < 2 * HEADS:  # one code for queries and keys: half the instructions to fetch
        y = q
        if block >= HEADS:
            y = k
        _forward_span(words, weight, positions, y + at, c, start, here, X_WORDS, Y_ROW, TURN, True, FAST)
    elif block < 3 * HEADS:
        _forward_span(words, weight, positions, v + at, c, start, here, X_WORDS, Y_ROW, TURN, False, FAST)
    else:  # x is at its other columns now
        _pass_through(x, rest + start * MORE, here, X_ROW, MORE, MORE, WIDE)


@triton.jit
def _backward_token(
    x0, x1, x2, x3, dy, w, s, g, position, own, UNIT: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr
):
    """dx of the token three back, now that this one is known; s: open sums of dx of the three before; g: twice the sums of dw."""
    if not WHOLE:
        x1, x2, x3 = _inside(position, x1, x2, x3)
    y, tanh = _silu(x0, x1, x2, x3, w, FAST)
    if UNIT:  # two sums that do not wait for each other
        squares, along = tl.sum(y * y, axis=0), tl.sum(dy * y, axis=0)
        scale = tl.math.rsqrt(squares + EPS)
        dy = scale * (dy - (scale * scale * along) * y)
    dz = dy + dy * (tanh + (y - y * tanh))  # gradient of half the convolution, times the weights' halves
    d1, d2, d3 = dz * w[1], dz * w[2], dz * w[3]
    if not WHOLE:
        d1, d2, d3 = _inside(position, d1, d2, d3)
    done, s = s[2] + d3, (dz * w[0], s[0] + d1, s[1] + d2)
    if not WHOLE:
        dz = tl.where(own, dz, 0.0)  # the next span counts its tokens itself
    return done, s, (g[0] + dz * x0, g[1] + dz * x1, g[2] + dz * x2, g[3] + dz * x3)


@triton.jit
def _give(dx, value, by, there, size, AS: tl.constexpr):
    """Stores a token's gradient as `AS` says, and gives the largest magnitudes so far where that is asked for."""
    if AS == "float8":
        tl.store(dx, _round(_scaled(value, by)), mask=there)
    elif AS == "dtype":
        tl.store(dx, value.to(dx.dtype.element_ty), mask=there)
    return size if AS == "dtype" else tl.maximum(size, tl.where(there, tl.abs(value), 0.0))


@triton.jit
def _backward_span(
    dy, x, weight, positions, dx, dw, by, c, start, here, after,
    DY_ROW: tl.constexpr, X_ROW: tl.constexpr, DX_ROW: tl.constexpr, CHANNELS: tl.constexpr,
    TURN: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr, AS: tl.constexpr,
):  # fmt: skip
    """As in `_forward_span`; after: `here` and up to three tokens that reach back into the span; dw at the span's own sums.

    Gives the largest magnitude of dx, 0 where AS is "dtype".
    """
    w = _half_taps(weight, c)
    x3, x2, x1 = _before(x, X_ROW, start > 0)
    zero = tl.zeros_like(x1)
    s, g, size = (zero, zero, zero), (zero, zero, zero, zero), zero
    words, dy_words = _load(x, X_ROW, here >= TURN, TURN), _load(dy, DY_ROW, here >= TURN, TURN)
    p = tl.load(positions + TURN - 1, mask=here >= TURN, other=0).to(tl.int32)
    dx -= 3 * DX_ROW
    for i in range(0, here + 3, TURN):
        v, dv = _append((x3, x2, x1), words), _append((), dy_words)
        whole, p = p >= TURN + 2, 0
        if i + 2 * TURN <= here:
            words, dy_words = _load(x + TURN * X_ROW, X_ROW, None, TURN), _load(dy + TURN * DY_ROW, DY_ROW, None, TURN)
            p = tl.load(positions + 2 * TURN - 1).to(tl.int32)
        if whole:
            for j in tl.static_range(TURN):
                done, s, g = _backward_token(
                    v[j + 3], v[j + 2], v[j + 1], v[j], dv[j], w, s, g, 0, True, UNIT, FAST, True
                )
                size = _give(dx + j * DX_ROW, done, by, i + j >= 3, size, AS)
            x3, x2, x1 = v[TURN], v[TURN + 1], v[TURN + 2]
        else:
            for j in range(tl.minimum(here + 3 - i, TURN)):
                there = i + j < after
                x0, dy0 = _wide(tl.load(x + j * X_ROW, there, 0)), _wide(tl.load(dy + j * DY_ROW, there, 0))
                position = tl.load(positions + j, there, 0)
                done, s, g = _backward_token(x0, x1, x2, x3, dy0, w, s, g, position, i + j < here, UNIT, FAST, False)
                size = _give(dx + j * DX_ROW, done, by, i + j >= 3, size, AS)
                x3, x2, x1 = x2, x1, x0
        x += TURN * X_ROW
        dy += TURN * DY_ROW
        dx += TURN * DX_ROW
        positions += TURN
    if AS != "nothing":
        tl.store(dw, 0.5 * g[3])
        tl.store(dw + CHANNELS, 0.5 * g[2])
        tl.store(dw + 2 * CHANNELS, 0.5 * g[1])
        tl.store(dw + 3 * CHANNELS, 0.5 * g[0])
    return tl.max(size, axis=0)


@triton.jit
def _round_through(
    source, to, here, by, SOURCE_ROW: tl.constexpr, TO_ROW: tl.constexpr, MORE: tl.constexpr, WIDE: tl.constexpr,
    AS: tl.constexpr,
):  # fmt: skip
    """`_pass_through` as `_give` does it, 64 values a thread or a token; gives the largest magnitude."""
    ROWS: tl.constexpr = 4 if WIDE <= 512 else 2 if WIDE <= 1024 else 1
    t, c, largest = tl.arange(0, ROWS), tl.arange(0, WIDE), 0.0
    for i in range(0, here, ROWS):
        there = (i + t < here)[:, None] & (c < MORE)[None, :]
        block = tl.load(source + (i + t)[:, None] * SOURCE_ROW + c[None, :], mask=there, other=0.0).to(tl.float32)
        size = _give(to + (i + t)[:, None] * TO_ROW + c[None, :], block, by, there, tl.zeros_like(block), AS)
        largest = tl.maximum(largest, tl.max(tl.max(size, axis=0), axis=0))
    return largest


@triton.jit
def _backward_kernel(
    dq, dk, dv, drest, x, weight, positions, dx, dw, known, inverse, seen, total,
    HEADS: tl.constexpr, HEAD: tl.constexpr, SPAN: tl.constexpr, TURN: tl.constexpr, X_ROW: tl.constexpr, DX_ROW: tl.constexpr,
    PAIRS: tl.constexpr, FAST: tl.constexpr, MORE: tl.constexpr, WIDE: tl.constexpr, AS: tl.constexpr,
):  # fmt: skip
    """AS: "dtype" stores dx in its dtype. "float8" rounds it with the scale whose inverse is given, and notes what it has seen.
    "nothing" notes that alone, and only where `known`, a peak, is 0.
    """
    if AS == "nothing":  # noqa: SIM102  settled by the compiler, which would ask the next one of every kernel
        if tl.load(known) > 0.0:
            return
    by = tl.load(inverse) if AS == "float8" else 1.0
    CHANNELS: tl.constexpr = 3 * HEADS * HEAD
    X_WORDS: tl.constexpr = X_ROW // 2 if PAIRS else X_ROW
    DY_WORDS: tl.constexpr = HEADS * HEAD // 2 if PAIRS else HEADS * HEAD
    block, span = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = span * SPAN
    after = tl.minimum(total - start, SPAN + 3).to(tl.int32)
    here = tl.minimum(after, SPAN)
    x += start * X_ROW + block * HEAD
    weight += block * HEAD * 4
    positions += start
    dx += start * DX_ROW + block * HEAD
    c = tl.arange(0, HEAD)
    dw += span * 4 * CHANNELS + block * HEAD + c
    at = start * (HEADS * HEAD) + block % HEADS * HEAD
    words = _words(x, HEAD, PAIRS)
    largest = 0.0
    if block < 2 * HEADS:
        dy = dq
        if block >= HEADS:
            dy = dk
        largest = _backward_span(
            _words(dy + at, HEAD, PAIRS), words, weight, positions, dx + c, dw, by, c, start, here, after,
            DY_WORDS, X_WORDS, DX_ROW, CHANNELS, TURN, True, FAST, AS,
        )  # fmt: skip
    elif block < 3 * HEADS:
        largest = _backward_span(
            _words(dv + at, HEAD, PAIRS), words, weight, positions, dx + c, dw, by, c, start, here, after,
            DY_WORDS, X_WORDS, DX_ROW, CHANNELS, TURN, False, FAST, AS,
        )  # fmt: skip
    elif AS == "dtype":
        _pass_through(drest + start * MORE, dx, here, MORE, DX_ROW, MORE, WIDE)
    else:
        largest = _round_through(drest + start * MORE, dx, here, by, MORE, DX_ROW, MORE, WIDE, AS)
    if AS != "dtype":
        tl.store(seen + span * tl.num_programs(0) + block, largest)


def short_conv_fused(
    x: Tensor, weight: Tensor, segments: Segments, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `short_conv`. Only the last dimension of x has to be dense."""
    return _forward(x, weight, segments.positions, heads)


def _launch(x: Tensor, weight: Tensor, heads: int, *read: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and compile-time arguments; read: what is read as x is."""
    more = x.shape[1] - len(weight)
    grid = 3 * heads + (more > 0), triton.cdiv(len(x), SPAN)
    pairs = x.dtype == torch.bfloat16 and x.stride(0) % 2 == 0 and all(t.data_ptr() % 4 == 0 for t in (x, *read))
    constants = {"HEADS": heads, "HEAD": len(weight) // (3 * heads), "SPAN": SPAN, "TURN": TURN, "X_ROW": x.stride(0)}
    constants |= {"PAIRS": pairs, "FAST": x.dtype != torch.float32}
    constants |= {"MORE": more, "WIDE": triton.next_power_of_2(max(more, 1)), "num_warps": 1}
    return grid, constants


@torch.library.custom_op("dwslm::short_conv", mutates_args=())
def _forward(x: Tensor, weight: Tensor, positions: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, rest = _forward_shapes(x, weight, positions, heads)
    grid, constants = _launch(x, weight, heads)
    _forward_kernel[grid](x, weight, positions, q, k, v, rest, len(x), **constants)
    return q, k, v, rest


@torch.library.custom_op("dwslm::short_conv_backward", mutates_args=())
def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, drest: Tensor, x: Tensor, weight: Tensor, positions: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    grid, constants = _launch(x, weight, heads, dq, dk, dv)
    constants |= {"DX_ROW": dx.stride(0), "maxnreg": REGISTERS}
    dw = weight.new_empty(grid[1], weight.shape[1], weight.shape[0])
    unused = dw, dw, dw
    _backward_kernel[grid](dq, dk, dv, drest, x, weight, positions, dx, dw, *unused, len(x), AS="dtype", **constants)
    return dx, dw.sum(0).T.contiguous()


@_forward.register_fake
def _forward_shapes(x: Tensor, weight: Tensor, positions: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = x.shape[0], heads, weight.shape[0] // (3 * heads)
    rest = x.new_empty(x.shape[0], x.shape[1] - weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape), x.new_empty(shape), rest


@_backward.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, drest: Tensor, x: Tensor, weight: Tensor, positions: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(*(d.contiguous() for d in dy), *ctx.saved_tensors, ctx.heads), None, None


_forward.register_autograd(_differentiate, setup_context=_save)
