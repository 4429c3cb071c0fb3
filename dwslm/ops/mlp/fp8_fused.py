"""The delayed recipe's products with the squared ReLU, its rounding and its transposition inside, in Gluon for Hopper.

    a8  = round(relu(x up^T)^2)                forward: h is never stored
    dh8 = round((dy down) * 2 sqrt(a))         backward: nor is the gradient of a, and a8 tells the derivative

both as they are and transposed, in float8_e4m3. Apart, the product writes 2 bytes a value and a second kernel reads them, which
takes half as long again. As in `dwslm.ops.mlp.fused` the kernel is persistent, one warp copies, and two warpgroups have 64 of a
tile's 128 rows each, an accumulator and an epilogue of its own: while one rounds, the other multiplies.

An accumulator's fragment has two neighbours of a row r in a thread, and the same two of row r + 8. Rounded, they are two words of
16 bits of these rows. For the transposed tile they are paired the other way, r with r + 8, and `movmatrix` gives one thread what
four had of a column: tokens 2q, 2q + 8, 2q + 1 and 2q + 9. Both tiles go through shared memory, two values at a time, without
bank conflicts, and are copied out from there.

The scale has to be known before. Where none is, a first launch multiplies and keeps nothing but peaks; where one is, which the
device alone knows, it ends at once. Sums are the tensor cores' own, as with `fast` products. Same input, same bits.

Gluon is an experimental part of Triton, whose names change from version to version: see `choice.TRIED`.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dwslm.ops.fp8.kernels import _fp8_scale_of_peaks_kernel
from dwslm.ops.mlp import fp8_fit
from dwslm.ops.mlp.fp8_fit import COLUMNS, INNER, ROWS

STAGES = 4  # steps along the inner side that are under way
PEAK_BLOCK = 2048

KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)
# Rows r and r + 8 of columns c and c + 1. Out: words of the rows, and words of a column: tokens 2q, 2q + 1 and 2q + 8, 2q + 9.
ROUND = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 pairs, across;
    cvt.rn.satfinite.e4m3x2.f32 low, $6, $4;
    cvt.rn.satfinite.e4m3x2.f32 high, $7, $5;
    mov.b32 pairs, {low, high};
    movmatrix.sync.aligned.m8n8.trans.b16 across, pairs;
    prmt.b32 pairs, pairs, pairs, 0x3120;
    prmt.b32 across, across, across, 0x3120;
    mov.b32 {$0, $1}, pairs;
    mov.b32 {$2, $3}, across;
}""")
ROUND_PLACES = gl.constexpr("=h,=h,=h,=h,f,f,f,f")
WORD = gl.constexpr((gl.int16, gl.int16, gl.int16, gl.int16))
UNPACK = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 both;
    cvt.rn.f16x2.e4m3x2 both, $2;
    mov.b32 {low, high}, both;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}""")
UNPACKED = gl.constexpr((gl.float32, gl.float32))
# What a thread of a warpgroup has of 64 x 256 sums, as one of the four of `_apart`, and the same places in words of two values.
_LANES, _COLUMNS = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[0, 4 << i] for i in range(5)]
PLACES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, *at] for at in _COLUMNS], [[0, *at] for at in _LANES], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 128]
    )
)
OF_WORDS = gl.constexpr(gl.DistributedLinearLayout([[8, 0], *_COLUMNS], _LANES, [[16, 0], [32, 0]], [], [64, 128]))


@gluon.jit
def _load_part(
    x, w, aux, xs, ws, own0, own1, bars, rows, columns, inner,
    GRADIENT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: halves of x's tile and w's tile into stages, and a8's tile where results will be staged."""
    R: gl.constexpr = 2 * x.block_type.shape[0]
    C: gl.constexpr = w.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    across = columns // C
    # Not before: a warpgroup frees its place in the first step of the next tile, and nobody may wait for that here.
    late = gl.minimum(STAGES * K, inner - K)
    step = 0
    for tile in range(gl.program_id(0), (rows // R) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row, column = tile // across * R, tile % across * C
        for k in range(0, inner, K):
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
            mbarrier.expect(bars.index(stage), 2 * x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [row, k], bars.index(stage), xs.index(2 * stage))
            tma.async_copy_global_to_shared(x, [row + R // 2, k], bars.index(stage), xs.index(2 * stage + 1))
            tma.async_copy_global_to_shared(w, [column, k], bars.index(stage), ws.index(stage))
            if GRADIENT and k == late:
                mbarrier.wait(bars.index(2 * STAGES + 2), turn & 1 ^ 1)
                mbarrier.expect(bars.index(2 * STAGES), aux.block_type.nbytes)
                tma.async_copy_global_to_shared(aux, [row, column // 2], bars.index(2 * STAGES), own0)
                mbarrier.wait(bars.index(2 * STAGES + 3), turn & 1 ^ 1)
                mbarrier.expect(bars.index(2 * STAGES + 1), aux.block_type.nbytes)
                tma.async_copy_global_to_shared(aux, [row + R // 2, column // 2], bars.index(2 * STAGES + 1), own1)
            step += 1


@gluon.jit
def _multiply(xs, ws, bars, step, total, HALF: gl.constexpr, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(bars.index(stage), step // STAGES & 1)
    return warpgroup_mma(xs.index(2 * stage + HALF), ws.index(stage).permute((1, 0)), total, is_async=True)


@gluon.jit
def _halves(x):
    low, high = gl.split(x)
    return gl.convert_layout(low, PLACES, assert_trivial=True), gl.convert_layout(high, PLACES, assert_trivial=True)


@gluon.jit
def _apart(total, H: gl.constexpr, C: gl.constexpr):
    """[64, C] as what a thread has of each 16 rows: (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1), each [4, 8, C / 2]. Nothing
    moves."""
    left, right = gl.split(total.reshape([H // 16, 2, 8, C // 2, 2]).permute((0, 2, 3, 1, 4)))
    a, c = _halves(left)
    b, d = _halves(right)
    return a, b, c, d


@gluon.jit
def _roots(words):
    """Square roots of two float8 values in a word, float32."""
    low, high = gl.inline_asm_elementwise(UNPACK, "=f,=f,h", [words], UNPACKED, is_pure=True, pack=1)
    return gl.sqrt(low), gl.sqrt(high)


@gluon.jit
def _half_part(
    out, out_t, xs, ws, own, own_t, bars, seen, unit, by, rows, columns, inner,
    HALF: gl.constexpr, GRADIENT: gl.constexpr, WRITE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the upper or lower 64 rows of every tile. The other may be stages behind, so that its products run during
    this one's epilogue."""
    H: gl.constexpr = xs.shape[1]
    C: gl.constexpr = ws.shape[1]
    K: gl.constexpr = xs.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32])
    across = columns // C
    peaks = gl.zeros([H // 16, 8], gl.float32, gl.SliceLayout(2, PLACES))
    step = 0
    for tile in range(gl.program_id(0), (rows // (2 * H)) * across, gl.num_programs(0)):
        row, column = tile // across * (2 * H) + HALF * H, tile % across * C
        total = _multiply(xs, ws, bars, step, gl.zeros([H, C], gl.float32, LAYOUT), HALF, STAGES)
        total = warpgroup_mma_wait(1, deps=(total,))
        step += 1
        tma.store_wait(0)  # the last tile has been read out of its places
        if GRADIENT:
            mbarrier.arrive(bars.index(2 * STAGES + 2 + HALF), pred=tile >= gl.num_programs(0))
        for _step in range(K, inner, K):
            total = _multiply(xs, ws, bars, step, total, HALF, STAGES)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES))
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES))
        a, b, c, d = _apart(total, H, C)
        if GRADIENT:
            mbarrier.wait(bars.index(2 * STAGES + HALF), tile // gl.num_programs(0) & 1)
            upper, lower = _halves(own.load(OF_WORDS).reshape([H // 16, 2, 8, C // 2]).permute((0, 2, 3, 1)))
            of_a, of_b = _roots(upper)
            of_c, of_d = _roots(lower)
            a, b, c, d = a * of_a, b * of_b, c * of_c, d * of_d
        else:
            a, b = gl.maximum(a, 0.0, KEEP_NAN), gl.maximum(b, 0.0, KEEP_NAN)
            c, d = gl.maximum(c, 0.0, KEEP_NAN), gl.maximum(d, 0.0, KEEP_NAN)
            a, b, c, d = a * a, b * b, c * c, d * d
        size = gl.maximum(gl.maximum(gl.abs(a), gl.abs(b)), gl.maximum(gl.abs(c), gl.abs(d)))
        peaks = gl.maximum(peaks, gl.max(size, axis=2))
        if WRITE:
            upper, lower, first, second = gl.inline_asm_elementwise(
                ROUND, ROUND_PLACES, [a * by, b * by, c * by, d * by], WORD, is_pure=False, pack=1
            )
            own.store(gl.join(upper, lower).permute((0, 3, 1, 2)).reshape([H, C // 2]))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row, column // 2], own)
            tma.store_wait(0)  # the transposed tile takes its place
            tokens = gl.join(first, second).reshape([H // 16, 8, C // 8, 4, 2]).permute((2, 1, 0, 4, 3))
            own_t.store(tokens.reshape([C, H // 2]))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_t, [column, row // 2], own_t)
    tma.store_wait(0)
    largest = gl.max(peaks, axis=1) * unit
    at = (gl.program_id(0) * 2 + HALF) * (H // 16) + gl.arange(0, H // 16, layout=largest.type.layout)
    gl.store(seen + at, largest)


@gluon.jit
def _delayed_kernel(
    x, w, aux, out, out_t, x_scale, w_scale, aux_scale, inverse, known, seen, rows, columns, inner,
    INDEX: gl.constexpr, GRADIENT: gl.constexpr, WRITE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent: one warp copies, two warpgroups multiply. aux, out and out_t in words of two values. WRITE: give the rounded
    values; without it the peaks alone, and where one is known before nothing."""
    unit = gl.load(x_scale) * gl.load(w_scale)
    by = unit
    if WRITE:
        by *= gl.load(inverse)
    else:
        rows = gl.where(gl.load(known + INDEX) > 0.0, 0, rows)
    if GRADIENT:
        root = 2.0 * gl.sqrt(gl.load(aux_scale))
        by, unit = by * root, unit * root
    else:
        by, unit = by * unit, unit * unit
    by += by * 0.0  # NaN where it is not finite
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_type.shape, w.layout)
    own0 = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    own1 = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    own0_t = own0._reinterpret(out_t.dtype, out_t.block_type.shape, out_t.layout)
    own1_t = own1._reinterpret(out_t.dtype, out_t.block_type.shape, out_t.layout)
    # One tensor, which is used to the end. Apart, the two that a form has no use for lay where what the parts are handed is put;
    # an mbarrier's memory is nobody else's until it is invalidated, and now and then a part had a wrong count and all waited.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(2 * STAGES + i), count=1)
        mbarrier.init(bars.index(2 * STAGES + 2 + i), count=1)
    gl.warp_specialize(
        [
            (_half_part, (out, out_t, xs, ws, own0, own0_t, bars, seen, unit, by, rows, columns, inner,
                          0, GRADIENT, WRITE, STAGES)),
            (_half_part, (out, out_t, xs, ws, own1, own1_t, bars, seen, unit, by, rows, columns, inner,
                          1, GRADIENT, WRITE, STAGES)),
            (_load_part, (x, w, aux, xs, ws, own0, own1, bars, rows, columns, inner, GRADIENT, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, a: Tensor | None, a_scale: Tensor | None,
    peaks: Tensor, index: int, factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operators of `fp8_products`: forward without `a`, backward with it. w [hidden, width] either way."""
    out, out_t, scale, seen = fp8_fit.empty(x, w)
    inverse = torch.empty_like(scale)
    (rows, inner), columns, half = x.shape, w.shape[0], ROWS // 2

    def blocks(of: Tensor, height: int, wide: int, bits: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(min(128, wide * bits // 8), bits, 2)
        return TensorDescriptor(of, list(of.shape), list(of.stride()), [height, wide], layout)

    def words(of: Tensor, height: int, wide: int) -> TensorDescriptor:
        return blocks(of.view(torch.int16), height, wide // 2, 16)

    described = (
        blocks(x.contiguous(), half, INNER, 8), blocks(w.contiguous(), COLUMNS, INNER, 8),
        words(out if a is None else a.contiguous(), half, COLUMNS), words(out, half, COLUMNS), words(out_t, COLUMNS, half),
    )  # fmt: skip

    def multiply(write: bool) -> None:
        _delayed_kernel[(fp8_fit.programs(x, w),)](
            *described, x_scale, w_scale, x_scale if a_scale is None else a_scale, inverse, peaks, seen, rows, columns, inner,
            INDEX=index, GRADIENT=a is not None, WRITE=write, STAGES=STAGES, num_warps=fp8_fit.WARPS,
        )  # fmt: skip

    multiply(False)
    _fp8_scale_of_peaks_kernel[(1,)](
        peaks, seen, scale, inverse, len(seen), INDEX=index, BLOCK=PEAK_BLOCK, factor=factor
    )
    multiply(True)
    return out, out_t, scale, seen
