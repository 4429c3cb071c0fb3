"""Gradients of q, k, g and beta of the delta rule out of what the walks have left, in Gluon for Hopper.

With Y the gradient of a system's right-hand side (`dright`), u its solution and A the system's matrix without its diagonal,

    dA = -Y u^T        d(beta) = (Y . u) / beta        d(k_in) = -Y S^T        d(k_out) = u dS'^T        d(q_in) = do S^T

so that neither (I + A)^-1 nor the keys' pair products are needed again.

A program goes over chunks, and in each over the heads. One warp copies; two warpgroups have 64 channels of k each and share what
does not depend on the channel: the pairs' gradients, of which each makes one, and the weights of sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dwslm.ops.delta_rule.fused_intra import BLOCK, LOG2E, SHIFT


@gluon.jit
def _copy(sources, buffers, full, empty, chunks, HEADS: gl.constexpr, PART: gl.constexpr):
    """The warp that copies, values' columns by halves and channels by parts."""
    do, updates, dright, states, dstates = sources
    dos, us, ys, ss0, ss1, dss0, dss1 = buffers
    C: gl.constexpr = do.block_type.shape[0]
    item = 0
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        for head in range(HEADS):
            row = (chunk * HEADS + head) * 2 * C
            mbarrier.wait(empty, item & 1 ^ 1)
            mbarrier.expect(full, 14 * do.block_type.nbytes)
            for v in gl.static_range(2):
                column = (head * 2 + v) * C
                tma.async_copy_global_to_shared(do, [chunk * C, column], full, dos.index(v))
                tma.async_copy_global_to_shared(updates, [chunk * C, column], full, us.index(v))
                tma.async_copy_global_to_shared(dright, [chunk * C, column], full, ys.index(v))
            for p in gl.static_range(C // PART):
                for v in gl.static_range(2):
                    place = row + p * PART
                    tma.async_copy_global_to_shared(states, [place, v * C], full, ss0.index(2 * p + v))
                    tma.async_copy_global_to_shared(states, [place + C, v * C], full, ss1.index(2 * p + v))
                    tma.async_copy_global_to_shared(dstates, [place, v * C], full, dss0.index(2 * p + v))
                    tma.async_copy_global_to_shared(dstates, [place + C, v * C], full, dss1.index(2 * p + v))
            item += 1


@gluon.jit
def _two(a, b, nothing, zero, first):
    """a b over both halves of the inner side, on its way; b from its tile `first` on."""
    total = warpgroup_mma(a.index(zero), b.index(first).permute((1, 0)), nothing, is_async=True)
    return warpgroup_mma(a.index(zero + 1), b.index(first + 1).permute((1, 0)), total, is_async=True)


@gluon.jit
def _pairs(keys, queries, into, out, asked, solved, first, second, third, nothing, dquery, dkey, dlog):
    """Adds what pairs of tokens give: the earlier token's key has the factor `out`, the later one's key and query `into`. What a
    pair adds to the log decays between its tokens comes once with each sign, and what is outside cancels: only if both sides
    are products of the same rounded numbers."""
    first.store((keys.to(gl.float32) * out).to(gl.bfloat16))
    second.store((keys.to(gl.float32) * into).to(gl.bfloat16))
    third.store((queries.to(gl.float32) * into).to(gl.bfloat16))
    fence_async_shared()
    for_key = warpgroup_mma(solved, first, nothing, is_async=True)
    for_query = warpgroup_mma(asked, first, nothing, is_async=True)
    back = warpgroup_mma(solved.permute((1, 0)), second, nothing, is_async=True)
    back = warpgroup_mma(asked.permute((1, 0)), third, back, is_async=True)
    for_key, for_query, back = warpgroup_mma_wait(0, deps=(for_key, for_query, back))
    dkey += for_key * into + back * out
    dquery += for_query * into
    dlog += for_key * second.load(dkey.type.layout).to(gl.float32)
    dlog += for_query * third.load(dkey.type.layout).to(gl.float32)
    dlog -= back * first.load(dkey.type.layout).to(gl.float32)
    return dquery, dkey, dlog


@gluon.jit
def _half(
    q, k, g, beta, ids, ends, dq, dk, dg, dbeta, dos, us, ys, states, dstates, weights, pairs, work, alone,
    full, empty, done, made, ready, chunks, total, scale, HEADS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = work.shape[1]
    PART: gl.constexpr = work.shape[2]
    K: gl.constexpr = 2 * C
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    # Of what is read: whole vectors. It reaches the products' layout through shared memory.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    t, s = gl.arange(0, C, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    a, b = gl.arange(0, C, gl.SliceLayout(1, PAIRS)), gl.arange(0, C, gl.SliceLayout(0, PAIRS))
    r = gl.arange(0, C, gl.SliceLayout(1, WIDE))
    wide = r[:, None] * (HEADS * K) + gl.arange(0, PART, gl.SliceLayout(0, WIDE))[None, :]
    place = t[:, None] * (HEADS * K) + s[None, :]
    nothing = gl.zeros([C, PART], gl.float32, TILE)
    at = gl.program_id(0).to(gl.int64) * (C * HEADS * K) + HALF * C
    more = (gl.program_id(0) * C + r < total)[:, None]
    next_g = gl.load(g + at + wide, mask=more, other=0.0)
    next_k = gl.load(k + at + wide, mask=more, other=0.0)
    next_q = gl.load(q + at + wide, mask=more, other=0.0)
    item = 0
    turn = 0
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        first_token = chunk * C
        there = first_token + t < total
        own = gl.load(ids + first_token + t, mask=there, other=-2).to(gl.int32)
        before = gl.load(ids + first_token - 1, mask=chunk > 0, other=-1).to(gl.int32)
        last = gl.load(ids + first_token + C - 1, mask=first_token + C <= total, other=-2).to(gl.int32)
        carried, kept = (own == before).to(gl.float32), (own == last).to(gl.float32)
        is_open = (last == before).to(gl.float32)
        for head in range(HEADS):
            phase = item & 1
            # Nothing, in a form that the compiler cannot tell: or it would compute all places in shared memory before the
            # loop, and have no register left in it.
            zero = item >> 30
            here = chunk * HEADS + head

            # The other half is through with the last head's pairs and the last chunk's weights.
            mbarrier.arrive(done)
            mbarrier.wait(done, phase)
            if head == 0:
                one = gl.load(ids + first_token + a, mask=first_token + a < total, other=-2).to(gl.int32)
                other = gl.load(ids + first_token + b, mask=first_token + b < total, other=-2).to(gl.int32)
                same = one[:, None] == other[None, :]
                later = a[:, None] >= b[None, :]
                if HALF == 0:
                    near = a[:, None] // BLOCK == b[None, :] // BLOCK
                    weights.index(0).store(gl.where(later & same, 1.0, 0.0).to(gl.bfloat16))
                    weights.index(2).store(gl.where(later & same & near, 1.0, 0.0).to(gl.bfloat16))
                    fence_async_shared()
                else:
                    middle = b[None, :] >= C // 2
                    back = gl.where(same & (middle == 0) & (later == 0), -1.0, 0.0)
                    weights.index(1).store(gl.where(later & same & middle, 1.0, back).to(gl.bfloat16))
                    fence_async_shared()
                mbarrier.arrive(made)
                mbarrier.wait(made, turn)
            mbarrier.wait(full, phase)
            pair = _two(dos if HALF == 0 else ys, us, gl.zeros([C, C], gl.float32, PAIRS), zero, zero)
            near, up_to = weights.index(zero + 2).load(PAIRS), weights.index(zero).load(PAIRS)
            pair = warpgroup_mma_wait(0, deps=(pair,))
            diagonal = gl.sum(gl.where(a[:, None] == b[None, :], pair, 0.0), axis=1)
            if HALF == 0:
                alone.store(diagonal * scale)  # a token with itself: no decay
                pair *= scale
            else:
                rows = first_token + a
                solving = gl.load(beta + rows * HEADS + head, mask=rows < total, other=0.0)
                gl.store(dbeta + rows * HEADS + head, diagonal / gl.maximum(solving, 1e-30), mask=rows < total)
                pair *= -solving[:, None]
            near = near.to(gl.float32)
            pairs.index(zero + 2 * HALF).store((pair * gl.where(a[:, None] == b[None, :], 0.0, near)).to(gl.bfloat16))
            far = up_to.to(gl.float32) - near
            pairs.index(zero + 2 * HALF + 1).store((pair * far).to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(ready)
            mbarrier.wait(ready, phase)

            rate = gl.load(beta + (first_token + t) * HEADS + head, mask=there, other=0.0)
            share = alone.load(gl.SliceLayout(1, TILE))[:, None]
            for part in range(C // PART):
                zero = (item + part) >> 30
                decays, first, second, third = (
                    work.index(zero), work.index(zero + 1), work.index(zero + 2), work.index(zero + 3),
                )  # fmt: skip
                channel = HALF * C + part * PART
                start = gl.to_tensor(chunk).to(gl.int64) * (C * HEADS * K) + head * K + channel
                end = gl.load(ends + here * K + channel + s)
                tma.store_wait(0)
                decays.store(next_g.to(gl.bfloat16))
                first.store(next_k)
                second.store(next_q)
                fence_async_shared()
                # What comes next is asked for before this is computed.
                turned = part == C // PART - 1
                new_part = gl.where(turned, 0, part + 1)
                new_head = gl.where(turned, head + 1, head)
                new_chunk = gl.where(new_head == HEADS, chunk + gl.num_programs(0), chunk)
                new_head = gl.where(new_head == HEADS, 0, new_head)
                at = new_chunk.to(gl.int64) * (C * HEADS * K) + (new_head * K + HALF * C + new_part * PART)
                more = (new_chunk * C + r < total)[:, None]
                next_g = gl.load(g + at + wide, mask=more, other=0.0)
                next_k = gl.load(k + at + wide, mask=more, other=0.0)
                next_q = gl.load(q + at + wide, mask=more, other=0.0)

                sums = warpgroup_mma(weights.index(zero), decays, nothing, is_async=True)
                from_middle = warpgroup_mma(weights.index(zero + 1), decays, nothing, is_async=True)
                from_block = warpgroup_mma(weights.index(zero + 2), decays, nothing, is_async=True)
                dquery = _two(dos, states, nothing, zero, 2 * part)
                dkey = _two(ys, states, nothing, zero, 2 * part)
                given = _two(us, dstates, nothing, zero, 2 * part)
                of_decay = gl.zeros([PART], gl.float32, gl.SliceLayout(1, STATE))
                for v in gl.static_range(2):
                    state, dstate = states.index(2 * part + v).load(STATE), dstates.index(2 * part + v).load(STATE)
                    of_decay += gl.sum(state.to(gl.float32) * dstate.to(gl.float32), axis=1)
                keys, queries = first.load(TILE), second.load(TILE)
                sums, from_middle, from_block, dquery, dkey, given = warpgroup_mma_wait(
                    0, deps=(sums, from_middle, from_block, dquery, dkey, given)
                )
                if turned:
                    mbarrier.arrive(empty)
                of_decay = gl.convert_layout(of_decay, gl.SliceLayout(0, TILE)) * (gl.exp2(end) * is_open)
                sums *= LOG2E
                into = gl.exp2(sums)
                dquery *= into * (carried * scale)[:, None]
                dkey *= into * (carried * -rate)[:, None]
                dlog = queries.to(gl.float32) * dquery + keys.to(gl.float32) * dkey
                given *= gl.exp2(gl.minimum(end[None, :] - sums, 0.0)) * kept[:, None]
                dkey += given + share * queries.to(gl.float32)
                dquery += share * keys.to(gl.float32)
                given *= keys.to(gl.float32)
                at_end = gl.sum(given, axis=0) + of_decay
                dlog += gl.where(t[:, None] == C - 1, at_end[None, :], 0.0) - given

                into = gl.where(t[:, None] < BLOCK, 0.0, gl.exp2(from_middle * LOG2E))
                out = gl.where(t[:, None] >= C - BLOCK, 0.0, gl.exp2(-LOG2E * from_middle))
                dquery, dkey, dlog = _pairs(
                    keys, queries, into, out, pairs.index(zero + 1), pairs.index(zero + 3), first, second, third, nothing,
                    dquery, dkey, dlog,
                )  # fmt: skip
                into, out = gl.exp2(from_block * LOG2E + SHIFT), gl.exp2(-SHIFT - from_block * LOG2E)
                dquery, dkey, dlog = _pairs(
                    keys, queries, into, out, pairs.index(zero), pairs.index(zero + 2), first, second, third, nothing,
                    dquery, dkey, dlog,
                )  # fmt: skip
                first.store(dquery.to(gl.bfloat16))
                second.store(dkey.to(gl.bfloat16))
                high = dlog.to(gl.bfloat16)
                third.store(high)
                decays.store((dlog - high.to(gl.float32)).to(gl.bfloat16))
                fence_async_shared()
                tma.async_copy_shared_to_global(dq, [first_token, head * K + channel], first)
                tma.async_copy_shared_to_global(dk, [first_token, head * K + channel], second)
                onward = weights.index(zero).permute((1, 0))
                dlog = warpgroup_mma(onward, third, nothing, is_async=True)
                dlog = warpgroup_mma(onward, decays, dlog, is_async=True)
                dlog = warpgroup_mma_wait(0, deps=(dlog,))
                gl.store(dg + start + place, dlog.to(dg.dtype.element_ty), mask=there[:, None])
            item += 1
        turn = turn ^ 1
    tma.store_wait(0)


@gluon.jit
def gradient_kernel(
    do, updates, dright, states, dstates, q, k, g, beta, ids, ends, dq, dk, dg, dbeta, chunks, total, scale,
    HEADS: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = do.block_type.shape[0]
    PART: gl.constexpr = states.block_type.shape[0]
    TILE: gl.constexpr = do.layout
    dos = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], TILE)
    us = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], TILE)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], TILE)
    ss0 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    ss1 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    dss0 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    dss1 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [3, C, C], TILE)
    pairs = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], TILE)
    work0 = gl.allocate_shared_memory(gl.bfloat16, [4, C, PART], dq.layout)
    work1 = gl.allocate_shared_memory(gl.bfloat16, [4, C, PART], dq.layout)
    alone = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # full: a head's tiles have arrived. empty: both halves have read them. done: both are through with the last head's pairs and
    # the last chunk's weights. made: both have written the chunk's weights. ready: both have written the head's pairs.
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=2)
    mbarrier.init(done, count=2)
    mbarrier.init(made, count=2)
    mbarrier.init(ready, count=2)
    gl.warp_specialize(
        [
            (_half, (q, k, g, beta, ids, ends, dq, dk, dg, dbeta, dos, us, ys, ss0, dss0, weights, pairs, work0, alone, full,
                     empty, done, made, ready, chunks, total, scale, HEADS, 0)),
            (_half, (q, k, g, beta, ids, ends, dq, dk, dg, dbeta, dos, us, ys, ss1, dss1, weights, pairs, work1, alone, full,
                     empty, done, made, ready, chunks, total, scale, HEADS, 1)),
            (_copy, ((do, updates, dright, states, dstates), (dos, us, ys, ss0, ss1, dss0, dss1), full, empty, chunks, HEADS,
                     PART)),
        ],
        [4, 1],  # warps of the second and third
        [240, 24],  # their registers; the first has what is left
    )  # fmt: skip
