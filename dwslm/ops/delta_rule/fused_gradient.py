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
def _copy_states(sources, buffers, arrived, row, part: gl.constexpr):
    """What a chunk and head's states and decays to its end have of the channels of both halves' part."""
    states, dstates, ends = sources
    ss0, ss1, dss0, dss1, limits = buffers
    PART: gl.constexpr = states.block_type.shape[0]
    C: gl.constexpr = states.block_type.shape[1]
    mbarrier.expect(arrived.index(part), 8 * states.block_type.nbytes)
    place = row + part * PART
    for v in gl.static_range(2):
        tma.async_copy_global_to_shared(states, [place, v * C], arrived.index(part), ss0.index(2 * part + v))
        tma.async_copy_global_to_shared(states, [place + C, v * C], arrived.index(part), ss1.index(2 * part + v))
        tma.async_copy_global_to_shared(dstates, [place, v * C], arrived.index(part), dss0.index(2 * part + v))
        tma.async_copy_global_to_shared(dstates, [place + C, v * C], arrived.index(part), dss1.index(2 * part + v))
    from_end = ends + place + gl.arange(0, PART, gl.BlockedLayout([1], [32], [1], [0]))
    one, other = gl.load(from_end), gl.load(from_end + C)
    limits.index(2 * part).store(one)
    limits.index(2 * part + 1).store(other)
    mbarrier.arrive(arrived.index(part))


@gluon.jit
def _copy(sources, buffers, values, full, arrived, empty, chunks, HEADS: gl.constexpr):
    """The warp that copies: values' columns by halves; channels by parts, states a part ahead of the others."""
    do, updates, dright, states, dstates, q, k, g, ends = sources
    dos, us, ys, ss0, ss1, dss0, dss1, inputs0, inputs1, limits = buffers
    C: gl.constexpr = do.block_type.shape[0]
    PART: gl.constexpr = q.block_type.shape[1]
    from_states, to_states = (states, dstates, ends), (ss0, ss1, dss0, dss1, limits)
    _copy_states(from_states, to_states, arrived, gl.program_id(0) * HEADS * 2 * C, 0)
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        for head in range(HEADS):
            row = (chunk * HEADS + head) * 2 * C
            for part in gl.static_range(2):
                # Both halves have read what came for the part before, and with it the states before that one.
                mbarrier.wait(empty, part ^ 1)
                if part == 0:
                    mbarrier.expect(values, 6 * do.block_type.nbytes)
                    for v in gl.static_range(2):
                        column = (head * 2 + v) * C
                        tma.async_copy_global_to_shared(do, [chunk * C, column], values, dos.index(v))
                        tma.async_copy_global_to_shared(updates, [chunk * C, column], values, us.index(v))
                        tma.async_copy_global_to_shared(dright, [chunk * C, column], values, ys.index(v))
                mbarrier.expect(full, 6 * q.block_type.nbytes)
                column = head * 2 * C + part * PART
                tma.async_copy_global_to_shared(g, [chunk * C, column], full, inputs0.index(0))
                tma.async_copy_global_to_shared(g, [chunk * C, column + C], full, inputs1.index(0))
                tma.async_copy_global_to_shared(k, [chunk * C, column], full, inputs0.index(1))
                tma.async_copy_global_to_shared(k, [chunk * C, column + C], full, inputs1.index(1))
                tma.async_copy_global_to_shared(q, [chunk * C, column], full, inputs0.index(2))
                tma.async_copy_global_to_shared(q, [chunk * C, column + C], full, inputs1.index(2))
                if part == 0:
                    _copy_states(from_states, to_states, arrived, row, 1)
                else:
                    turned = head == HEADS - 1
                    onward = gl.where(turned, (chunk + gl.num_programs(0)) * HEADS * 2 * C, row + 2 * C)
                    if onward < chunks * (HEADS * 2 * C):
                        _copy_states(from_states, to_states, arrived, onward, 0)


@gluon.jit
def _two(a, b, nothing, zero, first):
    """a b over both halves of the inner side, on its way; b from its tile `first` on."""
    total = warpgroup_mma(a.index(zero), b.index(first).permute((1, 0)), nothing, is_async=True)
    return warpgroup_mma(a.index(zero + 1), b.index(first + 1).permute((1, 0)), total, is_async=True)


@gluon.jit
def _halves(pairs):
    """Float32 of two bfloat16 numbers in 32 bits: an instruction each, where the compiler takes two for the upper one."""
    return (pairs << 16).to(gl.float32, bitcast=True), (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _floats(tile):
    """A tile of [64, 32] in the layout of a product's result."""
    C: gl.constexpr = tile.shape[0]
    PART: gl.constexpr = tile.shape[1]
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    # TILE without its lowest bit, which is in a word.
    PACKED: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [C, PART // 2]
    )
    even, odd = _halves(tile._reinterpret(gl.int32, [C, PART // 2], WORDS).load(PACKED))
    return gl.convert_layout(gl.join(even, odd).reshape([C, PART]), TILE, assert_trivial=True)


@gluon.jit
def _ask(keys, queries, into, out, asked, solved, first, second, third, nothing):
    """What pairs of tokens give, on its way in four products: the earlier token's key has the factor `out`, the later one's key
    and query `into`."""
    first.store((keys * out).to(gl.bfloat16))
    second.store((keys * into).to(gl.bfloat16))
    third.store((queries * into).to(gl.bfloat16))
    fence_async_shared()
    for_key = warpgroup_mma(solved, first, nothing, is_async=True)
    for_query = warpgroup_mma(asked, first, nothing, is_async=True)
    back = warpgroup_mma(solved.permute((1, 0)), second, nothing, is_async=True)
    return for_key, for_query, warpgroup_mma(asked.permute((1, 0)), third, back, is_async=True)


@gluon.jit
def _add(for_key, for_query, back, into, out, first, second, third, dquery, dkey, dlog):
    """Adds it once it is there. What a pair adds to the log decays between its tokens comes once with each sign, and what is
    outside cancels: only if both sides are products of the same rounded numbers."""
    dkey += for_key * into
    dkey += back * out
    dquery += for_query * into
    dlog += for_key * _floats(second)
    dlog += for_query * _floats(third)
    dlog -= back * _floats(first)
    return dquery, dkey, dlog


@gluon.jit
def _half(
    beta, ids, dq, dk, dg, dbeta, dos, us, ys, states, dstates, inputs, limits, weights, pairs, work, alone, tallies, decayed,
    values, full, arrived, empty, done, made, ready, chunks, total, scale, HEADS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    firsts, seconds, rests = work
    C: gl.constexpr = inputs.shape[1]
    PART: gl.constexpr = inputs.shape[2]
    K: gl.constexpr = 2 * C
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    # Of states: whole vectors, of words of two numbers.
    STATE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    t = gl.arange(0, C, gl.SliceLayout(1, TILE))
    a, b = gl.arange(0, C, gl.SliceLayout(1, PAIRS)), gl.arange(0, C, gl.SliceLayout(0, PAIRS))
    # Warps' sums over their tokens, so that each thread has its channels' of all warps.
    TALLIES: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0])
    nothing = gl.zeros([C, PART], gl.float32, TILE)
    # Outside of these rows no pair is far, whatever the factor, as long as it is a number.
    up, down = gl.where(t < BLOCK, 0.0, LOG2E)[:, None], gl.where(t >= C - BLOCK, 0.0, -LOG2E)[:, None]
    at_last = (t == C - 1).to(gl.float32)[:, None]
    item = 0
    turn = 0
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        first_token = chunk * C
        there = first_token + t < total
        own = gl.load(ids + first_token + t, mask=there, other=-2).to(gl.int32)
        before = gl.load(ids + first_token - 1, mask=chunk > 0, other=-1).to(gl.int32)
        last = gl.load(ids + first_token + C - 1, mask=first_token + C <= total, other=-2).to(gl.int32)
        carried = (own == before).to(gl.float32)
        kept = gl.where(own == last, 0.0, -1e30)  # in powers of two: never above 1, and 0 for what no later chunk sees
        is_open = (last == before).to(gl.float32)
        for head in range(HEADS):
            phase = item & 1
            # Nothing, in a form that the compiler cannot tell: or it would compute all places in shared memory before the
            # loop, and have no register left in it.
            zero = item >> 30

            rate = gl.load(beta + (first_token + t) * HEADS + head, mask=there, other=0.0)
            mbarrier.arrive(done)
            if head == 0:
                mbarrier.wait(done, phase)  # the other half is through with the last chunk's weights
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
            mbarrier.wait(values, phase)
            pair = _two(dos if HALF == 0 else ys, us, gl.zeros([C, C], gl.float32, PAIRS), zero, zero)
            near, up_to = weights.index(zero + 2).load(PAIRS), weights.index(zero).load(PAIRS)
            pair = warpgroup_mma_wait(0, deps=(pair,))
            diagonal = gl.sum(gl.where(a[:, None] == b[None, :], pair, 0.0), axis=1)
            solving = gl.convert_layout(rate, gl.SliceLayout(1, PAIRS))
            mbarrier.wait(done, phase)  # and with the last head's pairs
            if HALF == 0:
                alone.store(diagonal * scale)  # a token with itself: no decay
                pair *= scale
            else:
                pair *= -solving[:, None]
            near = near.to(gl.float32)
            pairs.index(zero + 2 * HALF).store((pair * gl.where(a[:, None] == b[None, :], 0.0, near)).to(gl.bfloat16))
            far = up_to.to(gl.float32) - near
            pairs.index(zero + 2 * HALF + 1).store((pair * far).to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(ready)
            mbarrier.wait(ready, phase)
            if HALF == 1:
                rows = first_token + a
                gl.store(dbeta + rows * HEADS + head, diagonal / gl.maximum(solving, 1e-30), mask=rows < total)

            share = alone.load(gl.SliceLayout(1, TILE))[:, None]
            for part in range(C // PART):
                zero = (item + part) >> 30
                first, second, third, low = (
                    firsts.index(zero), seconds.index(zero), rests.index(zero), rests.index(zero + 1),
                )  # fmt: skip
                decays = inputs.index(zero)
                channel = HALF * C + part * PART
                mbarrier.wait(full, part)
                mbarrier.wait(arrived.index(part), phase)

                sums = warpgroup_mma(weights.index(zero), decays, nothing, is_async=True)
                from_middle = warpgroup_mma(weights.index(zero + 1), decays, nothing, is_async=True)
                from_block = warpgroup_mma(weights.index(zero + 2), decays, nothing, is_async=True)
                dquery = _two(dos, states, nothing, zero, 2 * part)
                dkey = _two(ys, states, nothing, zero, 2 * part)
                given = _two(us, dstates, nothing, zero, 2 * part)
                of_decay = gl.zeros([PART, C // 2], gl.float32, STATE)
                for v in gl.static_range(2):
                    state = states.index(2 * part + v)._reinterpret(gl.int32, [PART, C // 2], WORDS)
                    dstate = dstates.index(2 * part + v)._reinterpret(gl.int32, [PART, C // 2], WORDS)
                    even, odd = _halves(state.load(STATE))
                    deven, dodd = _halves(dstate.load(STATE))
                    of_decay += even * deven
                    of_decay += odd * dodd
                limit = limits.index(2 * part + HALF)
                decayed.store(gl.sum(of_decay, axis=1) * (gl.exp2(limit.load(gl.SliceLayout(1, STATE))) * is_open))
                end = limit.load(gl.SliceLayout(0, TILE))
                keys, queries = _floats(inputs.index(zero + 1)), _floats(inputs.index(zero + 2))
                sums, from_middle, from_block, dquery, dkey, given = warpgroup_mma_wait(
                    0, deps=(sums, from_middle, from_block, dquery, dkey, given)
                )
                mbarrier.arrive(empty)
                sums *= LOG2E
                given *= gl.exp2(gl.minimum(end[None, :] - sums, kept[:, None]))
                to_end = given * keys
                tallies.store(gl.sum(to_end.reshape([4, C // 4, PART]), axis=1))
                whole = gl.exp2(sums)
                dquery *= whole * (carried * scale)[:, None]
                dkey *= whole * (carried * -rate)[:, None]
                dlog = queries * dquery - to_end
                dlog += keys * dkey
                dkey += given + share * queries
                dquery += share * keys
                into, out = gl.exp2(from_middle * up), gl.exp2(from_middle * down)
                tma.store_wait(0)
                far_key, far_query, far_back = _ask(
                    keys, queries, into, out, pairs.index(zero + 1), pairs.index(zero + 3), first, second, third, nothing,
                )  # fmt: skip
                far_key, far_query, far_back = warpgroup_mma_wait(0, deps=(far_key, far_query, far_back))
                dquery, dkey, dlog = _add(
                    far_key, far_query, far_back, into, out, first, second, third, dquery, dkey, dlog
                )
                into, out = gl.exp2(from_block * LOG2E + SHIFT), gl.exp2(-SHIFT - from_block * LOG2E)
                near_key, near_query, near_back = _ask(
                    keys, queries, into, out, pairs.index(zero), pairs.index(zero + 2), first, second, third, nothing,
                )  # fmt: skip
                near_key, near_query, near_back = warpgroup_mma_wait(0, deps=(near_key, near_query, near_back))
                dquery, dkey, dlog = _add(
                    near_key, near_query, near_back, into, out, first, second, third, dquery, dkey, dlog
                )
                at_end = gl.convert_layout(gl.sum(tallies.load(TALLIES), axis=0), gl.SliceLayout(0, TILE))
                dlog += at_last * (at_end + decayed.load(gl.SliceLayout(0, TILE)))[None, :]
                first.store(dquery.to(gl.bfloat16))
                second.store(dkey.to(gl.bfloat16))
                high = dlog.to(gl.bfloat16)
                third.store(high)
                low.store((dlog - high.to(gl.float32)).to(gl.bfloat16))
                fence_async_shared()
                onward = weights.index(zero).permute((1, 0))
                dlog = warpgroup_mma(onward, third, nothing, is_async=True)
                dlog = warpgroup_mma(onward, low, dlog, is_async=True)
                tma.async_copy_shared_to_global(dq, [first_token, head * K + channel], first)
                tma.async_copy_shared_to_global(dk, [first_token, head * K + channel], second)
                dlog = warpgroup_mma_wait(0, deps=(dlog,))
                if dg.dtype == gl.float32:
                    result = rests._reinterpret(gl.float32, [C, PART], dg.layout)
                else:
                    result = third
                result.store(dlog.to(dg.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(dg, [first_token, head * K + channel], result)
            item += 1
        turn = turn ^ 1
    tma.store_wait(0)


@gluon.jit
def gradient_kernel(
    do, updates, dright, states, dstates, q, k, g, dq, dk, dg, beta, ids, ends, dbeta, chunks, total, scale,
    HEADS: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = do.block_type.shape[0]
    PART: gl.constexpr = states.block_type.shape[0]
    gl.static_assert(C == 2 * PART, "the phases of what is waited for are those of two parts")
    TILE: gl.constexpr = do.layout
    dos = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], TILE)
    us = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], TILE)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], TILE)
    ss0 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    ss1 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    dss0 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    dss1 = gl.allocate_shared_memory(gl.bfloat16, [2 * C // PART, PART, C], TILE)
    inputs0 = gl.allocate_shared_memory(gl.bfloat16, [3, C, PART], q.layout)
    inputs1 = gl.allocate_shared_memory(gl.bfloat16, [3, C, PART], q.layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [3, C, C], TILE)
    pairs = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], TILE)
    # Apart, or the compiler puts a barrier between one tile's store and the next one's.
    firsts0 = gl.allocate_shared_memory(gl.bfloat16, [1, C, PART], dq.layout)
    firsts1 = gl.allocate_shared_memory(gl.bfloat16, [1, C, PART], dq.layout)
    seconds0 = gl.allocate_shared_memory(gl.bfloat16, [1, C, PART], dq.layout)
    seconds1 = gl.allocate_shared_memory(gl.bfloat16, [1, C, PART], dq.layout)
    rests0 = gl.allocate_shared_memory(gl.bfloat16, [2, C, PART], dq.layout)
    rests1 = gl.allocate_shared_memory(gl.bfloat16, [2, C, PART], dq.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    alone = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    limits = gl.allocate_shared_memory(gl.float32, [4, PART], FLAT)
    tallies0 = gl.allocate_shared_memory(gl.float32, [4, PART], ROWS)
    tallies1 = gl.allocate_shared_memory(gl.float32, [4, PART], ROWS)
    decayed0 = gl.allocate_shared_memory(gl.float32, [PART], FLAT)
    decayed1 = gl.allocate_shared_memory(gl.float32, [PART], FLAT)
    # values: a head's tiles of values have arrived. full: a part's inputs. arrived: its states, and decays to the chunk's end.
    # empty: both halves have read what was needed of a part. done: both are through with the last head's pairs and the last
    # chunk's weights. made: both have written the chunk's weights. ready: both have written the head's pairs.
    values = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(values, count=1)
    mbarrier.init(full, count=1)
    mbarrier.init(arrived.index(0), count=2)
    mbarrier.init(arrived.index(1), count=2)
    mbarrier.init(empty, count=2)
    mbarrier.init(done, count=2)
    mbarrier.init(made, count=2)
    mbarrier.init(ready, count=2)
    gl.warp_specialize(
        [
            (_half, (beta, ids, dq, dk, dg, dbeta, dos, us, ys, ss0, dss0, inputs0, limits, weights, pairs,
                     (firsts0, seconds0, rests0), alone, tallies0, decayed0, values, full, arrived, empty, done, made,
                     ready, chunks, total, scale, HEADS, 0)),
            (_half, (beta, ids, dq, dk, dg, dbeta, dos, us, ys, ss1, dss1, inputs1, limits, weights, pairs,
                     (firsts1, seconds1, rests1), alone, tallies1, decayed1, values, full, arrived, empty, done, made,
                     ready, chunks, total, scale, HEADS, 1)),
            (_copy, ((do, updates, dright, states, dstates, q, k, g, ends),
                     (dos, us, ys, ss0, ss1, dss0, dss1, inputs0, inputs1, limits), values, full, arrived, empty, chunks, HEADS)),
        ],
        [4, 1],  # warps of the second and third
        [240, 24],  # their registers; the first has what is left
    )  # fmt: skip
