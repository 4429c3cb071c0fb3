"""The kernels of `fused`, which has their formulas. All are bound by memory: what one reads, it reads once.

No load can be moved up past a store, as it might be the same memory. So stores stand behind the loads of their token, at the
end where a program has one token. Nothing is added atomically.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SMALLEST_GAIN = tl.constexpr(1e-20)
"""A norm's gain nearer to 0 becomes this: too small for a product to see, while what it multiplied can be divided out again."""


@triton.jit
def _row(base, t, c, width):
    return tl.load(base + tl.cast(t, tl.int64) * width + c, mask=c < width, other=0.0).to(tl.float32)


@triton.jit
def _store_row(base, t, c, width, value):
    tl.store(base + tl.cast(t, tl.int64) * width + c, value.to(base.dtype.element_ty), mask=c < width)


@triton.jit
def _rows(base, t, c, total, width):
    """[tokens, columns] as float32."""
    mask = (t < total)[:, None] & (c < width)[None, :]
    return tl.load(base + t.to(tl.int64)[:, None] * width + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(base, t, c, total, width, value):
    mask = (t < total)[:, None] & (c < width)[None, :]
    tl.store(base + t.to(tl.int64)[:, None] * width + c[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _vector(base, c, width):
    return tl.load(base + c, mask=c < width, other=0.0)


@triton.jit
def _gain(base, c, width):
    gain = tl.load(base + c, mask=c < width, other=1.0)
    return tl.where(tl.abs(gain) < SMALLEST_GAIN, SMALLEST_GAIN, gain)


@triton.jit
def _rounded(value, like):
    """float32, as it will be read back."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _multiply(a, b, sums):
    if INTERPRETED:  # it multiplies the bits of a bfloat16
        return sums + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _in_two(x, dtype: tl.constexpr):
    """A float32 as the sum of two numbers of a narrower dtype: bfloat16 keeps 16 bits of its 24 so."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def read_kernel(
    sources, scores, previous, y, key, gain, x, value, stats, total, width: tl.constexpr, eps,
    COUNT: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stats [4, T]: log-sum-exp of the scores, inverse rms of the mix; score and inverse rms of the block in progress."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    largest = -float("inf")
    own = tl.zeros((BLOCK,), tl.float32)
    score, own_inverse = 0.0, 0.0
    if PARTIAL:
        own = _row(y, t, c, width)
        if ADD:
            own = _rounded(own + _row(previous, t, c, width), value)
        own_inverse = tl.math.rsqrt(tl.sum(own * own, axis=0) / width + eps)
        score = own_inverse * tl.sum(own * _vector(key, c, width), axis=0)
        largest = score
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
    mixed *= 1.0 / sum
    inverse = tl.math.rsqrt(tl.sum(mixed * mixed, axis=0) / width + eps)
    _store_row(x, t, c, width, mixed * inverse * _gain(gain, c, width))
    tl.store(stats + t, largest + tl.log(sum))
    tl.store(stats + tl.cast(total, tl.int64) + t, inverse)
    if PARTIAL:
        tl.store(stats + 2 * tl.cast(total, tl.int64) + t, score)
        tl.store(stats + 3 * tl.cast(total, tl.int64) + t, own_inverse)
        if ADD:
            _store_row(value, t, c, width, own)


@triton.jit
def read_backward_kernel(
    dx, x, stats, value, incoming, key, gain, dh, pair, dvalue, sums, total, width: tl.constexpr,
    PARTIAL: tl.constexpr, INCOMING: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """pair [2, T]: log-sum-exp again, and D. sums [2, programs, width]: a program's sums for gain and key."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    long = tl.cast(total, tl.int64)
    c = tl.arange(0, BLOCK)
    gain_row, key_row = _gain(gain, c, width), _vector(key, c, width)
    divided = 1.0 / gain_row
    gain_sum, key_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for t in tl.range(program, total, programs, num_stages=STAGES):
        unit, upstream = _row(x, t, c, width) * divided, _row(dx, t, c, width)
        if PARTIAL:
            own = _row(value, t, c, width)
            if INCOMING:
                later = _row(incoming, t, c, width)
            score, r = tl.load(stats + 2 * long + t), tl.load(stats + 3 * long + t)
        log_sum, inverse = tl.load(stats + t), tl.load(stats + long + t)
        gain_sum += upstream * unit
        upstream *= gain_row
        along = tl.sum(upstream * unit, axis=0) / width
        # Rounded before it is used: every source must see the same dh.
        d = _rounded(inverse * (upstream - unit * along), dh)
        _store_row(dh, t, c, width, d)
        if PARTIAL:
            inner, towards = tl.reduce((d * unit, d * own), 0, _add_two)
            inner /= inverse  # the mix is unit / inverse
            a = tl.exp(score - log_sum)
            ds = a * (towards - inner)
            key_sum += (ds * r) * own
            change = a * d + (ds * r) * key_row - (ds * score * r * r / width) * own
            if INCOMING:
                change += later
            _store_row(dvalue, t, c, width, change)
        else:
            inner = tl.sum(d * unit, axis=0) / inverse
        tl.store(pair + t, log_sum)
        tl.store(pair + long + t, inner)
    tl.store(sums + program * width + c, gain_sum, mask=c < width)
    if PARTIAL:
        tl.store(sums + (programs + program) * width + c, key_sum, mask=c < width)


@triton.jit
def close_kernel(
    previous, y, keys, value, scores, inverse, total, width: tl.constexpr, readers, eps,
    ADD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr,
):  # fmt: skip
    """scores [readers, T]. Keys meet a bfloat16 row as two halves: matrix units then make scores as if keys had 16 bits."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    j = tl.program_id(1) * READERS + tl.arange(0, READERS)
    products = tl.zeros((TOKENS, READERS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, width, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        own = _rows(y, t, c, total, width)
        if ADD:
            own = _rounded(own + _rows(previous, t, c, total, width), value)
            if tl.program_id(1) == 0:
                _store_rows(value, t, c, total, width, own)
        squares += tl.sum(own * own, axis=1)
        key = tl.load(
            keys + j[None, :] * width + c[:, None], mask=(j < readers)[None, :] & (c < width)[:, None], other=0.0
        )
        if y.dtype.element_ty == tl.float32:
            products = _multiply(own, key, products)
        else:
            high, low = _in_two(key, y.dtype.element_ty)
            products = _multiply(own.to(y.dtype.element_ty), high, products)
            products = _multiply(own.to(y.dtype.element_ty), low, products)
    r = tl.math.rsqrt(squares / width + eps)
    at = j.to(tl.int64)[None, :] * total + t[:, None]
    tl.store(scores + at, products * r[:, None], mask=(j < readers)[None, :] & (t < total)[:, None])
    if tl.program_id(1) == 0:
        tl.store(inverse + t, r, mask=t < total)


@triton.jit
def addresses_kernel(tensors, table, COUNT: tl.constexpr):
    """Where a list of tensors lies, as integers on the device: arguments of a kernel are part of a recording, a copy is not."""
    for i in tl.static_range(COUNT):
        tl.store(table + i, tensors[i].to(tl.int64))


@triton.jit
def _reader(rows, pairs, scores, j, readers, t, c, total, width, like):
    """What reader j left for token t: its dh, as it is stored; score, log-sum-exp and D. The last one's where there is none."""
    there = j < readers
    j = tl.minimum(j, readers - 1)
    row = tl.multiple_of(tl.load(rows + j).to(tl.pointer_type(like.dtype.element_ty)), 16)
    pair = tl.load(pairs + j).to(tl.pointer_type(tl.float32))
    long = tl.cast(total, tl.int64)
    # Past the first cache, which the keys fill: every token needs all of them.
    d = tl.load(row + tl.cast(t, tl.int64) * width + c, mask=there & (c < width), other=0.0, cache_modifier=".cg")
    return d, tl.load(scores + j * long + t), tl.load(pair + t), tl.load(pair + long + t)


@triton.jit
def _gather(d, score, log_sum, inner, own, r, keys, ds, j, readers, t, c, total, width, gathered, shrink):
    """The sums with reader j added, unless there is none; stores its ds."""
    there = j < readers
    wide = d.to(tl.float32)
    a = tl.where(there, tl.exp(score - log_sum), 0.0)
    change = a * (tl.sum(wide * own, axis=0) - inner)
    gathered += a * wide
    gathered += (change * r) * _vector(keys + tl.minimum(j, readers - 1) * width, c, width)
    tl.store(ds + j * tl.cast(total, tl.int64) + t, change * r, mask=there)
    return gathered, shrink + change * score


@triton.jit
def close_backward_kernel(
    v, inverse, scores, keys, rows, pairs, dv, ds, total, width: tl.constexpr, readers, BLOCK: tl.constexpr
):
    """ds [readers, T]: ds_bj r_b. rows, pairs: addresses of the readers' dh and pair.

    Two readers' rows are on their way at any time, in registers of their own: to hand them from one to the other would be to
    wait for them.
    """
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    d0, score0, log_sum0, inner0 = _reader(rows, pairs, scores, 0, readers, t, c, total, width, v)
    d1, score1, log_sum1, inner1 = _reader(rows, pairs, scores, 1, readers, t, c, total, width, v)
    own, r = _row(v, t, c, width), tl.load(inverse + t)
    sums = tl.zeros((BLOCK,), tl.float32)
    shrink = 0.0
    for j in range(0, readers, 2):
        sums, shrink = _gather(
            d0, score0, log_sum0, inner0, own, r, keys, ds, j, readers, t, c, total, width, sums, shrink
        )
        d0, score0, log_sum0, inner0 = _reader(rows, pairs, scores, j + 2, readers, t, c, total, width, v)
        sums, shrink = _gather(
            d1, score1, log_sum1, inner1, own, r, keys, ds, j + 1, readers, t, c, total, width, sums, shrink
        )
        d1, score1, log_sum1, inner1 = _reader(rows, pairs, scores, j + 3, readers, t, c, total, width, v)
    _store_row(dv, t, c, width, sums - (shrink * r * r / width) * own)


@triton.jit
def keys_backward_kernel(
    v, ds, sums, total, width: tl.constexpr, readers, tokens,
    READERS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """sums [programs, readers, width]: of `tokens` tokens each, a multiple of TOKENS."""
    program = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.program_id(2) * READERS + tl.arange(0, READERS)
    products = tl.zeros((READERS, COLUMNS), tl.float32)
    for start in range(program * tokens, tl.minimum(total, (program + 1) * tokens), TOKENS):
        t = start + tl.arange(0, TOKENS)
        mask = (t < total)[:, None] & (c < width)[None, :]
        own = tl.load(v + t.to(tl.int64)[:, None] * width + c[None, :], mask=mask, other=0.0)
        at = j.to(tl.int64)[:, None] * total + t[None, :]
        weight = tl.load(ds + at, mask=(j < readers)[:, None] & (t < total)[None, :], other=0.0)
        if v.dtype.element_ty == tl.float32:
            products = _multiply(weight, own, products)
        else:
            high, low = _in_two(weight, v.dtype.element_ty)
            products = _multiply(high, own, products)
            products = _multiply(low, own, products)
    at = (program * tl.cast(readers, tl.int64) + j[:, None]) * width + c[None, :]
    tl.store(sums + at, products, mask=(j < readers)[:, None] & (c < width)[None, :])
