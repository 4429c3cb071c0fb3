"""The two walks over the chunks of a document, in Gluon for Hopper: one warp copies what a chunk needs into shared memory, a step
ahead of two warpgroups that have half of the values' columns each, with half of the state in their registers.

A walk is bound by how soon one product can follow another, so that everything else is kept out of its way: copies are the
other warp's, and results leave shared memory by themselves. Gluon is an experimental part of Triton, see `choice.TRIED`.

A program has a head and a document, or a few: the longest go first, and what is left over when each program has one goes to those
of the shortest. It owns the chunks whose first token is its document's; where the document begins inside a chunk it goes through
that one's end as well. Spare slots cost no program.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STAGES = 2  # chunks in shared memory: as many as it has room for


@triton.jit
def _chunks_of(cu_seqlens, i, slots, C: tl.constexpr):
    """How many a document goes through; none if it has no first token of a chunk, or there is no such document."""
    start, end = tl.load(cu_seqlens + i, mask=i < slots, other=0), tl.load(cu_seqlens + i + 1, mask=i < slots, other=0)
    owned, stop = (start + C - 1) // C, (end + C - 1) // C
    return tl.where(owned < stop, stop - start // C, 0)


@triton.jit
def order_kernel(cu_seqlens, order, slots, C: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """How many documents have chunks, and all of them by number of chunks, the most first. SLOTS: a power of two, at least
    `slots`."""
    i, j = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, SLOTS)
    mine, other = _chunks_of(cu_seqlens, i, slots, C), _chunks_of(cu_seqlens, j, slots, C)
    before = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
    tl.store(order + 1 + tl.sum(before.to(tl.int32), axis=1), i, mask=i < slots)
    tl.store(order, tl.sum((other > 0).to(tl.int32), axis=0), mask=tl.program_id(0) == 0)


@gluon.jit
def _place(turn):
    """Of a program's document among all: there and back again, so that the last ones go where the shortest were."""
    program, programs = gl.program_id(1), gl.num_programs(1)
    return gl.where(turn & 1 == 1, programs - 1 - program, program)


@gluon.jit
def _turns(order):
    """A program's first document, and how many it has."""
    slot, count, programs = gl.load(order + 1 + gl.program_id(1)), gl.load(order), gl.num_programs(1)
    return slot, count // programs + gl.where(_place(count // programs) < count % programs, 1, 0)


@gluon.jit
def _next(order, turn, turns):
    return gl.load(order + 1 + turn * gl.num_programs(1) + _place(turn), mask=turn < turns, other=0)


@gluon.jit
def _stretch(cu_seqlens, slot, C: gl.constexpr):
    """First chunk that a document has part of, first that it owns, and number of chunks from the former on."""
    start, end = gl.load(cu_seqlens + slot), gl.load(cu_seqlens + slot + 1)
    return start // C, (start + C - 1) // C, (end + C - 1) // C - start // C


@gluon.jit
def _copy(
    copied, stages, full, empty, cu_seqlens, order, head, HEADS: gl.constexpr, BACK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies; of `value` each warpgroup gets its columns."""
    value, take, ask, give, solve, score = copied
    values, takes, asks, gives, solves, scores = stages
    C: gl.constexpr = take.block_type.shape[0]
    PART: gl.constexpr = value.block_type.shape[1]
    item = 0
    slot, turns = _turns(order)
    for turn in range(turns):
        first, _, steps = _stretch(cu_seqlens, slot, C)
        for step in range(steps):
            stage, phase = item % STAGES, item // STAGES & 1
            item += 1
            chunk = first + (steps - 1 - step if BACK else step)
            row = (chunk * HEADS + head) * C
            column = head * 2 * PART
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(bar, 3 * take.block_type.nbytes + 2 * solve.block_type.nbytes + 2 * value.block_type.nbytes)
            tma.async_copy_global_to_shared(take, [row, 0], bar, takes.index(stage))
            tma.async_copy_global_to_shared(ask, [row, 0], bar, asks.index(stage))
            tma.async_copy_global_to_shared(give, [row, 0], bar, gives.index(stage))
            tma.async_copy_global_to_shared(solve, [row, 0], bar, solves.index(stage))
            tma.async_copy_global_to_shared(score, [row, 0], bar, scores.index(stage))
            tma.async_copy_global_to_shared(value, [chunk * C, column], bar, values.index(2 * stage))
            tma.async_copy_global_to_shared(value, [chunk * C, column + PART], bar, values.index(2 * stage + 1))
        slot = _next(order, turn + 1, turns)


@gluon.jit
def _vectors(
    ends, beta, chunk, head, total, HEADS: gl.constexpr, C: gl.constexpr, K: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """What a chunk wants besides its tiles, asked for a step ahead: G_end in powers of two, and beta."""
    token = chunk * C + gl.arange(0, C, ROW)
    end = gl.load(ends + (chunk * HEADS + head) * K + gl.arange(0, K, ROW))
    return end, gl.load(beta + token * HEADS + head, mask=token < total, other=0.0)


@gluon.jit
def _forward_half(
    out, updates, states, beta, ends, stages, held, right, update, full, empty,
    cu_seqlens, order, head, total, HEADS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    values, takes, asks, gives, solves, scores = stages
    K: gl.constexpr = held.shape[0]
    PART: gl.constexpr = held.shape[1]
    C: gl.constexpr = right.shape[0]
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    nothing = gl.zeros([C, PART], gl.float32, TILE)
    column = (head * 2 + HALF) * PART
    item = 0
    slot, turns = _turns(order)
    for turn in range(turns):
        first, owned, steps = _stretch(cu_seqlens, slot, C)
        tma.store_wait(0)  # of the document before, whatever it has left
        state = gl.zeros([K, PART], gl.float32, TILE)
        next_end, next_rate = _vectors(ends, beta, first, head, total, HEADS, C, K, ROW)
        for step in range(steps):
            stage, phase = item % STAGES, item // STAGES & 1
            item += 1
            chunk = first + step
            here = chunk * HEADS + head
            mine = chunk >= owned
            decay, rate = gl.exp2(next_end), next_rate
            after = gl.where(step + 1 < steps, chunk + 1, chunk)
            next_end, next_rate = _vectors(ends, beta, after, head, total, HEADS, C, K, ROW)

            tma.store_wait(2)  # of the step before, what left `held`
            held.store(state.to(gl.bfloat16))
            fence_async_shared()
            if mine:
                tma.async_copy_shared_to_global(states, [here * K, HALF * PART], held)
            mbarrier.wait(full.index(stage), phase)
            known = warpgroup_mma(takes.index(stage), held, nothing, is_async=True)
            result = warpgroup_mma(asks.index(stage), held, nothing, is_async=True)
            known = warpgroup_mma_wait(1, deps=(known,))
            value = values.index(2 * stage + HALF).load(TILE).to(gl.float32)
            tma.store_wait(1)  # and the other two
            right.store((rate[:, None] * value - known).to(gl.bfloat16))
            fence_async_shared()
            solved = warpgroup_mma(solves.index(stage), right, nothing, is_async=True)
            solved, result = warpgroup_mma_wait(0, deps=(solved, result))
            update.store(solved.to(gl.bfloat16))
            fence_async_shared()
            if mine:
                tma.async_copy_shared_to_global(updates, [chunk * C, column], update)
            state = warpgroup_mma(gives.index(stage).permute((1, 0)), update, state * decay[:, None], is_async=True)
            result = warpgroup_mma(scores.index(stage), update, result, is_async=True)
            state, result = warpgroup_mma_wait(0, deps=(state, result))
            mbarrier.arrive(empty.index(stage))
            right.store(result.to(gl.bfloat16))
            fence_async_shared()
            if mine:
                tma.async_copy_shared_to_global(out, [chunk * C, column], right)
        slot = _next(order, turn + 1, turns)
    tma.store_wait(0)


@gluon.jit
def _backward_half(
    rights, values_back, dright, dv, dstates, beta, ends, ids, stages, held, work, more, full, empty,
    cu_seqlens, order, head, total, HEADS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    values, takes, asks, gives, solves, scores = stages
    K: gl.constexpr = held.shape[0]
    PART: gl.constexpr = held.shape[1]
    C: gl.constexpr = work.shape[0]
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    nothing = gl.zeros([C, PART], gl.float32, TILE)
    t, e = gl.arange(0, C, ROW), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    column = (head * 2 + HALF) * PART
    place = t[:, None] * (HEADS * 2 * PART) + (column + e)[None, :]
    item = 0
    slot, turns = _turns(order)
    for turn in range(turns):
        first, owned, steps = _stretch(cu_seqlens, slot, C)
        tma.store_wait(0)  # of the document before, whatever it has left
        dstate = gl.zeros([K, PART], gl.float32, TILE)
        # Every chunk but the last ends inside the document, which then owns all tokens of it from `owned` on.
        chunk = first + steps - 1
        end = chunk * C + C
        last = gl.load(ids + end - 1, mask=end <= total, other=-2).to(gl.int32)
        following = gl.load(ids + end, mask=end < total, other=-3).to(gl.int32)
        closing = (last == slot) | (last != following)
        next_end, next_rate = _vectors(ends, beta, chunk, head, total, HEADS, C, K, ROW)
        for step in range(steps):
            stage, phase = item % STAGES, item // STAGES & 1
            item += 1
            chunk = first + steps - 1 - step
            here = chunk * HEADS + head
            mine = (step > 0) | closing
            whole = mine & (chunk >= owned)
            decay, rate = gl.exp2(next_end), next_rate
            before = gl.where(step + 1 < steps, chunk - 1, chunk)
            next_end, next_rate = _vectors(ends, beta, before, head, total, HEADS, C, K, ROW)

            tma.store_wait(2)  # of the step before, what left `held`
            held.store(dstate.to(gl.bfloat16))
            fence_async_shared()
            if mine:
                tma.async_copy_shared_to_global(dstates, [here * K, HALF * PART], held)
            mbarrier.wait(full.index(stage), phase)
            value = values.index(2 * stage + HALF)
            d = warpgroup_mma(scores.index(stage).permute((1, 0)), value, nothing, is_async=True)
            d = warpgroup_mma(gives.index(stage), held, d, is_async=True)
            d = warpgroup_mma_wait(0, deps=(d,))
            tma.store_wait(1)  # and the other two
            work.store(d.to(gl.bfloat16))
            fence_async_shared()
            d = warpgroup_mma(solves.index(stage).permute((1, 0)), work, nothing, is_async=True)
            dstate = warpgroup_mma(asks.index(stage).permute((1, 0)), value, dstate * decay[:, None], is_async=True)
            d = warpgroup_mma_wait(1, deps=(d,))
            rounded = d.to(gl.bfloat16)
            of_value = (rate[:, None] * d).to(gl.bfloat16)
            work.store(-rounded)
            more.store(rounded)
            fence_async_shared()
            dstate = warpgroup_mma(takes.index(stage).permute((1, 0)), work, dstate, is_async=True)
            if whole:
                tma.async_copy_shared_to_global(rights, [chunk * C, column], more)
            else:
                token = chunk * C + t
                own = gl.load(ids + token, mask=token < total, other=-2).to(gl.int32)
                written = gl.where(chunk < owned, own == slot, own != last) & (token < total)
                there = chunk.to(gl.int64) * (C * HEADS * 2 * PART)
                gl.store(dright + there + place, rounded, mask=written[:, None])
                gl.store(dv + there + place, of_value, mask=written[:, None])
            dstate = warpgroup_mma_wait(0, deps=(dstate,))
            mbarrier.arrive(empty.index(stage))
            work.store(of_value)
            fence_async_shared()
            if whole:
                tma.async_copy_shared_to_global(values_back, [chunk * C, column], work)
        slot = _next(order, turn + 1, turns)
    tma.store_wait(0)


@gluon.jit
def walk_kernel(
    value, take, ask, give, solve, score, out, updates, states, dright, dv, beta, ends, cu_seqlens, ids, order, total,
    HEADS: gl.constexpr, BACK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0)
    values = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES] + value.block_type.shape, value.layout)
    takes = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + take.block_type.shape, take.layout)
    asks = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + take.block_type.shape, take.layout)
    gives = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + take.block_type.shape, take.layout)
    solves = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + solve.block_type.shape, solve.layout)
    scores = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + solve.block_type.shape, solve.layout)
    held0 = gl.allocate_shared_memory(gl.bfloat16, states.block_type.shape, states.layout)
    held1 = gl.allocate_shared_memory(gl.bfloat16, states.block_type.shape, states.layout)
    work0 = gl.allocate_shared_memory(gl.bfloat16, value.block_type.shape, value.layout)
    work1 = gl.allocate_shared_memory(gl.bfloat16, value.block_type.shape, value.layout)
    more0 = gl.allocate_shared_memory(gl.bfloat16, value.block_type.shape, value.layout)
    more1 = gl.allocate_shared_memory(gl.bfloat16, value.block_type.shape, value.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    stages = (values, takes, asks, gives, solves, scores)
    copy = ((value, take, ask, give, solve, score), stages, full, empty, cu_seqlens, order, head, HEADS, BACK, STAGES)
    if BACK:
        gl.warp_specialize(
            [
                (_backward_half, (out, updates, dright, dv, states, beta, ends, ids, stages, held0, work0, more0, full,
                                  empty, cu_seqlens, order, head, total, HEADS, 0, STAGES)),
                (_backward_half, (out, updates, dright, dv, states, beta, ends, ids, stages, held1, work1, more1, full,
                                  empty, cu_seqlens, order, head, total, HEADS, 1, STAGES)),
                (_copy, copy),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_forward_half, (out, updates, states, beta, ends, stages, held0, work0, more0, full, empty, cu_seqlens,
                                 order, head, total, HEADS, 0, STAGES)),
                (_forward_half, (out, updates, states, beta, ends, stages, held1, work1, more1, full, empty, cu_seqlens,
                                 order, head, total, HEADS, 1, STAGES)),
                (_copy, copy),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
