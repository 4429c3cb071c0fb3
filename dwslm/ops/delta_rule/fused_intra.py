"""The kernel of `fused` for what concerns one chunk alone, before the walks, in Gluon for Hopper.

A chunk is 64 tokens on a fixed grid, whatever documents begin or end in it, and is cut in four blocks of 16. The decay between
two tokens is a product of a factor of the later one and a factor of the earlier one, which both must be numbers in bfloat16 even
with all log decays at -5: exp(80) is 5.5e34, exp(160) is none.

    exp(G_t - G_j) = exp(L_t) exp(-L_j)      t, j in the same block ("near"); L: the sum from the block's first token on
    exp(G_t - G_j) = exp(M_t) exp(-M_j)      t in a later one ("far"); M: the sum from the chunk's middle on, negative before it

M_t is below 80 from the second block on, and -M_j up to the third one, so that the products of a factor that is too small to be
written and one that is not are too small to count. Sums are products with matrices of zeros and ones, in which no sum crosses a
document's first token: what is in one document does not move a bit of another, as long as it is finite. They take log decays
rounded to bfloat16, as the gate's own input is; sums and factors are float32.

A program goes over pairs of chunk and head. One warp copies, two warpgroups take a pair each in turn and go over its channels, a
part at a time. Matrices of zeros and ones are made once a chunk.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CHUNK = 64
BLOCK = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)
SHIFT = tl.constexpr(58.0)  # of the near factors, in powers of two: both then lie within exp(40) of 1
NEVER = tl.constexpr(-1e30)  # a power of two that is zero


@gluon.jit
def _copy(sources, buffers, full, empty, first, stop, HEADS: gl.constexpr, K: gl.constexpr):
    """The warp that copies: pairs go to the two warpgroups in turn."""
    q, k, g = sources
    qs, ks, gs = buffers
    C: gl.constexpr = q.block_type.shape[0]
    PART: gl.constexpr = q.block_type.shape[1]
    for pair in range(first, stop):
        turn = pair - first
        for part in range(K // PART):
            slot = (turn & 1) * (K // PART) + part
            row, column = pair // HEADS * C, pair % HEADS * K + part * PART
            mbarrier.wait(empty.index(slot), turn // 2 & 1 ^ 1)
            mbarrier.expect(full.index(slot), 3 * q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [row, column], full.index(slot), qs.index(slot))
            tma.async_copy_global_to_shared(k, [row, column], full.index(slot), ks.index(slot))
            tma.async_copy_global_to_shared(g, [row, column], full.index(slot), gs.index(slot))


@gluon.jit
def _small(a, b, total, NEAR: gl.constexpr):
    """total + a b of the blocks on the diagonal, in TF32."""
    # The inner side in such an order that a thread has of `a` what the product wants of it.
    a = gl.reshape(gl.permute(gl.reshape(a, [4, 16, 2, 4, 2]), [0, 1, 2, 4, 3]), [4, 16, 16])
    b = gl.reshape(gl.permute(gl.reshape(b, [4, 2, 4, 2, 16]), [0, 1, 3, 2, 4]), [4, 16, 16])
    a, b = gl.convert_layout(a, gl.DotOperandLayout(0, NEAR, 1)), gl.convert_layout(b, gl.DotOperandLayout(1, NEAR, 1))
    return mma_v2(a, b, total, input_precision="tf32")


@gluon.jit
def _on_diagonal(x, PAIR: gl.constexpr):
    """[4, 16, 16] -> [64, 64] with the blocks in every place of their rows."""
    SPREAD: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 16, 4, 16],
    )  # fmt: skip
    x = gl.convert_layout(x, gl.SliceLayout(2, SPREAD))[:, :, None, :].broadcast_to([4, 16, 4, 16])
    return gl.convert_layout(gl.reshape(x, [64, 64]), PAIR)


@gluon.jit
def _near_inverse(diagonal, NEAR: gl.constexpr):
    """(I + a)^-1 of strictly lower triangular a: [C / 16, 16, 16].

    In blocks of 4, then of 16 (then of C): four blocks a side each time, so that the fourth power of what is off the diagonal
    is zero and (I - n) (I + n^2) its inverse. Higher powers would grow before they vanish (6,435 for a 16 x 16 of ones).
    """
    row = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, NEAR)))[None, :][:, :, None]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, NEAR)))[None, :][:, None, :]
    quarters = row // 4 == column // 4
    nothing = gl.zeros_like(diagonal)
    n = gl.where(quarters, -diagonal, 0.0)
    within = gl.where(row == column, 1.0, n)
    within = _small(within, _small(n, n, nothing, NEAR), within, NEAR)
    n = -_small(within, gl.where(quarters, 0.0, diagonal), nothing, NEAR)
    half = _small(n, within, within, NEAR)
    return _small(_small(n, n, nothing, NEAR), half, half, NEAR)


@gluon.jit
def _rates(beta, pair, t, total, HEADS: gl.constexpr, C: gl.constexpr):
    token = pair // HEADS * C + t
    return gl.load(beta + token * HEADS + pair % HEADS, mask=token < total, other=0.0)


@gluon.jit
def _half(
    leave, beta, ids, ends, buffers, weights, squares, results, full, empty, first, stop, total, scale,
    HEADS: gl.constexpr, K: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Every second pair of a program's, from its first one or the one after it on."""
    q_in, k_in, k_out, system, scores = leave
    qs, ks, gs = buffers
    C: gl.constexpr = q_in.block_type.shape[0]
    PART: gl.constexpr = q_in.block_type.shape[1]
    PARTS: gl.constexpr = K // PART
    B: gl.constexpr = C // BLOCK
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    NEAR: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIR, 2)
    result0, result1, result2 = results
    # The far products' right side lies where the chunk's system is solved afterwards.
    earlier = squares._reinterpret(gl.bfloat16, [4, C, PART], q_in.layout).index(3)
    row, column = gl.arange(0, C, gl.SliceLayout(1, PAIR)), gl.arange(0, C, gl.SliceLayout(0, PAIR))
    t, c = gl.arange(0, C, ROW), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    later, sooner = gl.where(t // BLOCK == 0, NEVER, 0.0)[:, None], gl.where(t // BLOCK == B - 1, NEVER, 0.0)[:, None]
    later3 = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, NEAR)))[None, :][:, :, None]
    sooner3 = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, NEAR)))[None, :][:, None, :]
    nothing, none = gl.zeros([C, PART], gl.float32, TILE), gl.zeros([C, C], gl.float32, PAIR)
    turn = 0
    next_rate = _rates(beta, gl.where(first + HALF < stop, first + HALF, first), t, total, HEADS, C)
    for chunk in range(first // HEADS, (stop + HEADS - 1) // HEADS):
        token = chunk * C
        own = gl.load(ids + token + row, mask=token + row < total, other=-2).to(gl.int32)
        other = gl.load(ids + token + column, mask=token + column < total, other=-2).to(gl.int32)
        before = gl.load(ids + token - 1, mask=chunk > 0, other=-1).to(gl.int32)
        last = gl.load(ids + token + C - 1, mask=token + C <= total, other=-2).to(gl.int32)
        same, past = own[:, None] == other[None, :], row[:, None] >= column[None, :]
        near = row[:, None] // BLOCK == column[None, :] // BLOCK
        half = column[None, :] >= C // 2
        weights.index(0).store(gl.where(past & same, 1.0, 0.0).to(gl.bfloat16))
        back = gl.where(same & (half == 0) & (past == 0), -1.0, 0.0)
        weights.index(1).store(gl.where(past & same & half, 1.0, back).to(gl.bfloat16))
        weights.index(2).store(gl.where(past & same & near, 1.0, 0.0).to(gl.bfloat16))
        weights.index(3).store(gl.where(same & (past == 0), 1.0, 0.0).to(gl.bfloat16))
        fence_async_shared()
        # Of each token's document, the first one in the chunk.
        start = gl.sum(gl.where(past & (same == 0), 1, 0), axis=1)
        own = gl.convert_layout(own, ROW)
        carried = (own == before).to(gl.float32)
        kept = gl.where(own == last, 0.0, NEVER)[:, None]
        low = gl.maximum(first, chunk * HEADS)
        low += low - first + HALF & 1
        for pair in range(low, gl.minimum(stop, chunk * HEADS + HEADS), 2):
            rate = next_rate
            next_rate = _rates(beta, gl.where(pair + 2 < stop, pair + 2, pair), t, total, HEADS, C)
            near_scores = gl.zeros([B, BLOCK, BLOCK], gl.float32, NEAR)
            near_keys = gl.zeros([B, BLOCK, BLOCK], gl.float32, NEAR)
            far_scores, far_keys = none, none
            for part in range(PARTS):
                slot = HALF * PARTS + part
                mbarrier.wait(full.index(slot), turn & 1)
                decays = gs.index(slot)
                from_middle = warpgroup_mma(weights.index(1), decays, nothing, is_async=True)
                queries, keys = qs.index(slot).load(TILE), ks.index(slot).load(TILE)
                from_middle = warpgroup_mma_wait(0, deps=(from_middle,))

                queries, keys = queries.to(gl.float32), keys.to(gl.float32)
                left, right = gl.exp2(from_middle * LOG2E + later), gl.exp2(from_middle * -LOG2E + sooner)
                earlier.store((keys * right).to(gl.bfloat16))
                fence_async_shared()
                far_queries = gl.convert_layout((queries * left).to(gl.bfloat16), LEFT)
                far_scores = warpgroup_mma(far_queries, earlier.permute((1, 0)), far_scores, is_async=True)
                far_own = gl.convert_layout((keys * left).to(gl.bfloat16), LEFT)
                far_keys = warpgroup_mma(far_own, earlier.permute((1, 0)), far_keys, is_async=True)
                from_block = warpgroup_mma(weights.index(2), decays, nothing, is_async=True)
                far_scores, far_keys, from_block = warpgroup_mma_wait(0, deps=(far_scores, far_keys, from_block))

                left, right = gl.exp2(from_block * LOG2E + SHIFT), gl.exp2(from_block * -LOG2E - SHIFT)
                right3 = gl.permute(gl.reshape((keys * right).to(gl.bfloat16), [B, BLOCK, PART]), [0, 2, 1])
                right3 = gl.convert_layout(right3, gl.DotOperandLayout(1, NEAR, 2))
                left3 = gl.reshape((queries * left).to(gl.bfloat16), [B, BLOCK, PART])
                near_scores = mma_v2(gl.convert_layout(left3, gl.DotOperandLayout(0, NEAR, 2)), right3, near_scores)
                left3 = gl.reshape((keys * left).to(gl.bfloat16), [B, BLOCK, PART])
                near_keys = mma_v2(gl.convert_layout(left3, gl.DotOperandLayout(0, NEAR, 2)), right3, near_keys)

                sums = warpgroup_mma(weights.index(0), decays, nothing, is_async=True)
                onward = warpgroup_mma(weights.index(3), decays, nothing, is_async=True)
                sums = warpgroup_mma_wait(1, deps=(sums,)) * LOG2E
                into = gl.exp2(sums)
                onward = warpgroup_mma_wait(0, deps=(onward,))
                mbarrier.arrive(empty.index(slot))
                out = gl.exp2(onward * LOG2E + kept)
                gl.store(
                    ends + (pair * K + part * PART) + (t[:, None] * 0 + c[None, :]), sums, mask=(t == C - 1)[:, None]
                )
                tma.store_wait(0)
                result0.store((queries * into * (scale * carried)[:, None]).to(gl.bfloat16))
                result1.store((keys * into * (rate * carried)[:, None]).to(gl.bfloat16))
                result2.store((keys * out).to(gl.bfloat16))
                fence_async_shared()
                tma.async_copy_shared_to_global(q_in, [pair * C, part * PART], result0)
                tma.async_copy_shared_to_global(k_in, [pair * C, part * PART], result1)
                tma.async_copy_shared_to_global(k_out, [pair * C, part * PART], result2)

            # Nothing, in a form that the compiler cannot tell: or it would keep masks and places in registers over the parts.
            zero = turn >> 30
            turn += 1
            begin = start + zero
            begin3 = gl.reshape(begin - row // BLOCK * BLOCK, [B, BLOCK])
            begin, begin3 = begin[:, None], gl.convert_layout(begin3, gl.SliceLayout(2, NEAR))[:, :, None]
            diagonal = row[:, None] // BLOCK == column[None, :] // BLOCK
            far = (row[:, None] // BLOCK > column[None, :] // BLOCK) & (column[None, :] >= begin)
            within = gl.where((later3 >= sooner3) & (sooner3 >= begin3), near_scores, 0.0)
            between = gl.where(far, far_scores, 0.0)
            squares.index(zero).store((gl.where(diagonal, _on_diagonal(within, PAIR), between) * scale).to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(scores, [pair * C, 0], squares.index(zero))

            rate3 = gl.convert_layout(gl.reshape(rate, [B, BLOCK]), gl.SliceLayout(2, NEAR))[:, :, None]
            within = gl.where((later3 > sooner3) & (sooner3 >= begin3), near_keys * rate3, 0.0)
            within = gl.where(diagonal, _on_diagonal(_near_inverse(within, NEAR), PAIR), 0.0)
            rates = gl.convert_layout(rate, gl.SliceLayout(1, PAIR))[:, None]
            w = within.to(gl.bfloat16)
            tma.store_wait(0)
            squares.index(zero).store(gl.where(far, far_keys * rates, 0.0).to(gl.bfloat16))
            squares.index(zero + 1).store(w)
            fence_async_shared()
            n = warpgroup_mma(gl.convert_layout(w, LEFT), squares.index(zero), none, is_async=True)
            n = warpgroup_mma_wait(0, deps=(n,))
            n = (-n).to(gl.bfloat16)
            squares.index(zero).store(n)
            fence_async_shared()
            n = gl.convert_layout(n, LEFT)
            whole = warpgroup_mma(n, squares.index(zero + 1), within, is_async=True)
            n = warpgroup_mma(n, squares.index(zero), none, is_async=True)
            whole, n = warpgroup_mma_wait(0, deps=(whole, n))
            squares.index(zero + 1).store(whole.to(gl.bfloat16))
            fence_async_shared()
            n = gl.convert_layout(n.to(gl.bfloat16), LEFT)
            whole = warpgroup_mma(n, squares.index(zero + 1), whole, is_async=True)
            whole = warpgroup_mma_wait(0, deps=(whole,))
            squares.index(zero).store(whole.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(system, [pair * C, 0], squares.index(zero))
    tma.store_wait(0)


@gluon.jit
def intra_kernel(
    q, k, g, q_in, k_in, k_out, system, scores, beta, ids, ends, chunks, total, scale,
    HEADS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """What a chunk gives and takes: q_in = scale q exp(G), k_in = beta k exp(G), k_out = k exp(G_end - G), and G_end in
    powers of two (`ends`); `system` = (I + A)^-1 and `scores` = B of `chunked`."""
    C: gl.constexpr = q.block_type.shape[0]
    PART: gl.constexpr = q.block_type.shape[1]
    PARTS: gl.constexpr = K // PART
    qs = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, C, PART], q.layout)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, C, PART], q.layout)
    gs = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, C, PART], q.layout)
    weights0 = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], system.layout)
    weights1 = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], system.layout)
    squares0 = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], system.layout)
    squares1 = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], system.layout)
    q_in0 = gl.allocate_shared_memory(gl.bfloat16, [C, PART], q_in.layout)
    q_in1 = gl.allocate_shared_memory(gl.bfloat16, [C, PART], q_in.layout)
    k_in0 = gl.allocate_shared_memory(gl.bfloat16, [C, PART], q_in.layout)
    k_in1 = gl.allocate_shared_memory(gl.bfloat16, [C, PART], q_in.layout)
    k_out0 = gl.allocate_shared_memory(gl.bfloat16, [C, PART], q_in.layout)
    k_out1 = gl.allocate_shared_memory(gl.bfloat16, [C, PART], q_in.layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * PARTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    pairs = chunks * HEADS
    first = gl.program_id(0) * pairs // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * pairs // gl.num_programs(0)
    results0, results1 = (q_in0, k_in0, k_out0), (q_in1, k_in1, k_out1)
    buffers, leave = (qs, ks, gs), (q_in, k_in, k_out, system, scores)
    gl.warp_specialize(
        [
            (_half, (leave, beta, ids, ends, buffers, weights0, squares0, results0, full, empty, first, stop, total, scale,
                     HEADS, K, 0)),
            (_half, (leave, beta, ids, ends, buffers, weights1, squares1, results1, full, empty, first, stop, total, scale,
                     HEADS, K, 1)),
            (_copy, ((q, k, g), buffers, full, empty, first, stop, HEADS, K)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
