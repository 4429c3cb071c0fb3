"""The Triton kernel of `fused` for what concerns one chunk alone, before the walks.

A chunk is 64 tokens on a fixed grid, whatever documents begin or end in it, and is cut in four blocks of 16. The decay between
two tokens is a product of a factor of the later one and a factor of the earlier one, which both must be numbers in bfloat16 even
with all log decays at -5: exp(80) is 5.5e34, exp(160) is none.

    exp(G_t - G_j) = exp(L_t) exp(-L_j)      t, j in the same block ("near"); L: the sum from the block's first token on
    exp(G_t - G_j) = exp(M_t) exp(-M_j)      t in a later one ("far"); M: the sum from the chunk's middle on, negative before it

M_t is below 80 from the second block on, and -M_j up to the third one, so that the products of a factor that is too small to be
written and one that is not are too small to count. Sums are products with matrices of zeros and ones, in which no sum crosses a
document's first token: what is in one document does not move a bit of another, as long as it is finite. They take log decays
rounded to bfloat16, as the gate's own input is; sums and factors are float32.
"""

import triton
import triton.language as tl

CHUNK = 64
BLOCK = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)
SHIFT = tl.constexpr(58.0)  # of the near factors, in powers of two: both then lie within exp(40) of 1


@triton.jit
def chunk_ids(ids, chunk, total, C: tl.constexpr):
    """Segments of a chunk's tokens, and of the token before it; -2 behind the last token, -1 before the first."""
    t = chunk * C + tl.arange(0, C)
    own = tl.load(ids + t, mask=t < total, other=-2).to(tl.int32)
    before = tl.load(ids + chunk * C - 1, mask=chunk > 0, other=-1).to(tl.int32)
    return own, before


@triton.jit
def segment_at(ids, t, total):
    return tl.load(ids + t, mask=t < total, other=-2).to(tl.int32)


@triton.jit
def sums_up_to(own, C: tl.constexpr):
    """Zeros and ones [C, C] that make sums up to and with a token out of products; transposed, from a token on. No sum crosses
    a boundary."""
    t, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where((t >= s) & (own[:, None] == own[None, :]), 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def sums_from_middle(own, C: tl.constexpr):
    """The same from the chunk's middle on, and negative before it."""
    t, s, half = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], C // 2
    same = own[:, None] == own[None, :]
    back = tl.where(same & (s < half) & (s > t), -1.0, 0.0)
    return tl.where(same & (s >= half) & (s <= t), 1.0, back).to(tl.bfloat16)


@triton.jit
def sums_from_block(own, C: tl.constexpr):
    """The same from a block's first token on."""
    t, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    near = (t // BLOCK == s // BLOCK) & (t >= s)
    return tl.where(near & (own[:, None] == own[None, :]), 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def on_diagonal(x, C: tl.constexpr):
    """[C / 16, 16, 16] -> [C, C], zero elsewhere."""
    i = tl.arange(0, C // BLOCK)
    own = i[:, None, None, None] == i[None, None, :, None]
    return tl.reshape(tl.where(own, x[:, :, None, :], 0.0), [C, C])


@triton.jit
def _inverse(diagonal, off, C: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a: [C / 16, 16, 16] on its diagonal and [C, C] off it.

    In blocks of 4, then of 16, then of C: four blocks a side each time, so that the fourth power of what is off the diagonal
    is zero and (I - n) (I + n^2) its inverse. Higher powers would grow before they vanish (6,435 for a 16 x 16 of ones).
    """
    r = tl.arange(0, BLOCK)
    quarters = (r[:, None] // 4 == r[None, :] // 4)[None, :, :]
    n = tl.where(quarters, -diagonal, 0.0)
    within = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, n)
    within += tl.dot(within, tl.dot(n, n))
    n = -tl.dot(within, tl.where(quarters, 0.0, diagonal))
    half = within + tl.dot(n, within)
    within = on_diagonal(half + tl.dot(tl.dot(n, n), half), C)
    w = within.to(tl.bfloat16)
    n1 = (-tl.dot(w, off.to(tl.bfloat16))).to(tl.bfloat16)
    n2 = tl.dot(n1, n1).to(tl.bfloat16)
    whole = within + tl.dot(n1, w)
    return whole + tl.dot(n2, whole.to(tl.bfloat16))


@triton.jit
def intra_kernel(
    q, k, g, beta, ids, q_in, k_in, k_out, ends, system, scores, total, scale,
    HEADS: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What a chunk gives and takes: q_in = scale q exp(G), k_in = beta k exp(G), k_out = k exp(G_end - G), and G_end in
    powers of two (`ends`); `system` = (I + A)^-1 and `scores` = B of `chunked`. A program has a chunk and a head, and goes over
    PART channels at a time."""
    B: tl.constexpr = C // BLOCK
    head, chunk = tl.program_id(0), tl.program_id(1)
    own, before = chunk_ids(ids, chunk, total, C)
    last = segment_at(ids, chunk * C + C - 1, total)
    t, s, c = tl.arange(0, C), tl.arange(0, C), tl.arange(0, PART)
    token = chunk * C + t
    there = (token < total)[:, None]
    here = (chunk * HEADS + head).to(tl.int64)
    start = chunk.to(tl.int64) * (C * HEADS * K) + head * K
    q, k, g = q + start, k + start, g + start
    q_in, k_in, k_out = q_in + here * (C * K), k_in + here * (C * K), k_out + here * (C * K)
    place = t[:, None] * (HEADS * K) + c[None, :]
    tile = t[:, None] * K + c[None, :]
    rate = tl.load(beta + token * HEADS + head, mask=token < total, other=0.0)
    carried = (own == before).to(tl.float32)[:, None]
    kept = (own == last).to(tl.float32)[:, None]
    last_row = ends + here * K + tl.zeros([C, 1], tl.int32)
    square = t[:, None] * C + s[None, :]
    up_to = sums_up_to(own, C)
    from_middle, from_block = sums_from_middle(own, C), sums_from_block(own, C)
    near_scores = tl.zeros([B, BLOCK, BLOCK], tl.float32)
    near_keys = tl.zeros([B, BLOCK, BLOCK], tl.float32)
    far_scores = tl.zeros([C, C], tl.float32)
    far_keys = tl.zeros([C, C], tl.float32)
    for i in range(0, K, PART):
        queries = tl.load(q + i + place, mask=there, other=0.0).to(tl.float32)
        keys = tl.load(k + i + place, mask=there, other=0.0).to(tl.float32)
        rounded = tl.load(g + i + place, mask=there, other=0.0).to(tl.bfloat16)
        sums = tl.dot(up_to, rounded) * LOG2E
        into = tl.math.exp2(sums)
        tl.store(q_in + i + tile, (queries * into * (scale * carried)).to(tl.bfloat16))
        tl.store(k_in + i + tile, (keys * into * (rate[:, None] * carried)).to(tl.bfloat16))
        tl.store(last_row + i + c[None, :], sums, mask=t[:, None] == C - 1)
        out = tl.math.exp2(LOG2E * (tl.dot(tl.trans(up_to), rounded) - rounded.to(tl.float32)))
        tl.store(k_out + i + tile, (keys * out * kept).to(tl.bfloat16))
        sums = tl.dot(from_middle, rounded) * LOG2E
        left = tl.where(t[:, None] < BLOCK, 0.0, tl.math.exp2(sums))
        right = tl.where(t[:, None] >= C - BLOCK, 0.0, tl.math.exp2(-sums))
        earlier = tl.trans((keys * right).to(tl.bfloat16))
        far_scores = tl.dot((queries * left).to(tl.bfloat16), earlier, far_scores)
        far_keys = tl.dot((keys * left).to(tl.bfloat16), earlier, far_keys)
        sums = tl.dot(from_block, rounded) * LOG2E
        left, right = tl.math.exp2(sums + SHIFT), tl.math.exp2(-SHIFT - sums)
        earlier3 = tl.permute(tl.reshape((keys * right).to(tl.bfloat16), [B, BLOCK, PART]), [0, 2, 1])
        near_scores = tl.dot(tl.reshape((queries * left).to(tl.bfloat16), [B, BLOCK, PART]), earlier3, near_scores)
        near_keys = tl.dot(tl.reshape((keys * left).to(tl.bfloat16), [B, BLOCK, PART]), earlier3, near_keys)
    same = own[:, None] == own[None, :]
    own3 = tl.reshape(own, [B, BLOCK])
    r = tl.arange(0, BLOCK)
    same3 = own3[:, :, None] == own3[:, None, :]
    near, strict = same3 & (r[None, :, None] >= r[None, None, :]), same3 & (r[None, :, None] > r[None, None, :])
    far = (t[:, None] // BLOCK > s[None, :] // BLOCK) & same
    system, scores = system + here * (C * C), scores + here * (C * C)
    pairs = tl.where(far, far_scores, on_diagonal(tl.where(near, near_scores, 0.0), C))
    tl.store(scores + square, (pairs * scale).to(tl.bfloat16))
    rates = tl.reshape(rate, [B, BLOCK])[:, :, None]
    inverse = _inverse(tl.where(strict, near_keys * rates, 0.0), tl.where(far, far_keys * rate[:, None], 0.0), C)
    tl.store(system + square, inverse.to(tl.bfloat16))
