"""The layer in bfloat16 with its squared ReLU inside the products, as one Gluon kernel for Hopper.

    a  = relu(x up^T)^2                       forward: what a product leaves is squared before it is rounded and written
    dh = factor * (dy down) * 2 sqrt(a)       backward: a, which the next product keeps anyway, tells the derivative

A pass over the hidden layer takes a third of such a product's time, and they are two forward and three backward. The kernel is
persistent: one warp copies, two warpgroups multiply. Each of these has 64 of a tile's 128 rows, with an accumulator and an
epilogue of its own, and the two are not held together: while one writes, the other multiplies, as far as the stages between them
reach. Sums are float32, rounded once. Same input, same bits. The other four products are ordinary ones.

Gluon is an experimental part of Triton, whose names change from version to version: see `choice.TRIED`.
"""

from typing import Any

import torch
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

from dwslm.ops.mlp.fit import COLUMNS, INNER, ROWS
from dwslm.ops.scaled_product import scaled_matmul

STAGES = 3  # steps along the inner side that are under way: as many as shared memory has room for


@gluon.jit
def _load_part(
    x, w, aux, xs, ws, own0, own1, bars, rows, columns, inner, UP: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The warp that copies: halves of x's tile and w's tile into stages, and a's tile where results will be staged."""
    R: gl.constexpr = 2 * x.block_type.shape[0]
    C: gl.constexpr = w.block_type.shape[0] if UP else w.block_type.shape[1]
    K: gl.constexpr = x.block_type.shape[1]
    across = columns // C
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
            if UP:
                tma.async_copy_global_to_shared(w, [column, k], bars.index(stage), ws.index(stage))
            else:
                tma.async_copy_global_to_shared(w, [k, column], bars.index(stage), ws.index(stage))
                if (
                    k == 4 * K
                ):  # not before: the last tile's results must have left, and its products must not wait for that
                    mbarrier.wait(bars.index(2 * STAGES + 2), turn & 1 ^ 1)
                    mbarrier.expect(bars.index(2 * STAGES), aux.block_type.nbytes)
                    tma.async_copy_global_to_shared(aux, [row, column], bars.index(2 * STAGES), own0)
                    mbarrier.wait(bars.index(2 * STAGES + 3), turn & 1 ^ 1)
                    mbarrier.expect(bars.index(2 * STAGES + 1), aux.block_type.nbytes)
                    tma.async_copy_global_to_shared(aux, [row + R // 2, column], bars.index(2 * STAGES + 1), own1)
            step += 1


@gluon.jit
def _leave(total, own, out, row, column):
    """Rounds, stages and writes a half tile."""
    tma.store_wait(0)
    own.store(total.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], own)


@gluon.jit
def _half_part(
    out, xs, ws, own, bars, rows, columns, inner, factor,
    HALF: gl.constexpr, UP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the upper or lower 64 rows of every tile. The other may be stages behind, so that its products run during
    this one's epilogue."""
    R: gl.constexpr = 2 * xs.shape[1]
    C: gl.constexpr = ws.shape[1] if UP else ws.shape[2]
    K: gl.constexpr = xs.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    across = columns // C
    step = 0
    for tile in range(gl.program_id(0), (rows // R) * across, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        row, column = tile // across * R + HALF * (R // 2), tile % across * C
        total = gl.zeros([R // 2, C], gl.float32, LAYOUT)
        for k in range(0, inner, K):
            stage = step % STAGES
            mbarrier.wait(bars.index(stage), step // STAGES & 1)
            b = ws.index(stage)
            if UP:
                b = b.permute((1, 0))
            total = warpgroup_mma(xs.index(2 * stage + HALF), b, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(bars.index(STAGES + (step + STAGES - 1) % STAGES))
        if UP:
            r = gl.where(total < 0, 0.0, total)  # which keeps what is not a number
            _leave(r * r, own, out, row, column)
        else:
            mbarrier.wait(bars.index(2 * STAGES + HALF), turn & 1)
            a = own.load(LAYOUT).to(gl.float32)
            _leave(total * (factor * gl.sqrt(a)), own, out, row, column)
            tma.store_wait(0)
            mbarrier.arrive(bars.index(2 * STAGES + 2 + HALF))
    tma.store_wait(0)


@gluon.jit
def _squared_relu_kernel(x, w, aux, out, rows, columns, inner, factor, UP: gl.constexpr, STAGES: gl.constexpr):
    """Persistent: one warp copies, two warpgroups multiply."""
    xs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w.block_type.shape, w.layout)
    own0 = gl.allocate_shared_memory(gl.bfloat16, out.block_type.shape, out.layout)
    own1 = gl.allocate_shared_memory(gl.bfloat16, out.block_type.shape, out.layout)
    # Full and empty for each stage, then ready and free for each half. One tensor: see `fp8_fused`.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(2 * STAGES + i), count=1)
        mbarrier.init(bars.index(2 * STAGES + 2 + i), count=1)
    gl.warp_specialize(
        [
            (_half_part, (out, xs, ws, own0, bars, rows, columns, inner, factor, 0, UP, STAGES)),
            (_half_part, (out, xs, ws, own1, bars, rows, columns, inner, factor, 1, UP, STAGES)),
            (_load_part, (x, w, aux, xs, ws, own0, own1, bars, rows, columns, inner, UP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def _launch(x: Tensor, weight: Tensor, a: Tensor | None, factor: float) -> Tensor:
    forward, (rows, inner) = a is None, x.shape
    columns = weight.shape[0] if forward else weight.shape[1]
    out = x.new_empty(rows, columns)
    layout = gl.NVMMASharedLayout(128, 16, 2)

    def blocks(of: Tensor, height: int, wide: int) -> TensorDescriptor:
        return TensorDescriptor(of, list(of.shape), list(of.stride()), [height, wide], layout)

    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    step, half = (COLUMNS, INNER) if forward else (INNER, COLUMNS), (ROWS // 2, COLUMNS)
    _squared_relu_kernel[(min(programs, rows // ROWS * (columns // COLUMNS)),)](
        blocks(x.contiguous(), ROWS // 2, INNER), blocks(weight.contiguous(), *step),
        blocks(out if a is None else a.contiguous(), *half), blocks(out, *half),
        rows, columns, inner, factor, UP=forward, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out


@torch.library.custom_op("dwslm::squared_relu_up", mutates_args=())
def squared_relu_up(x: Tensor, up: Tensor) -> Tensor:
    """relu(x up^T)^2 [T, hidden] of x [T, width] and up [hidden, width], bfloat16, without a gradient."""
    return _launch(x, up, None, 0.0)


@torch.library.custom_op("dwslm::squared_relu_down_gradient", mutates_args=())
def squared_relu_down_gradient(dy: Tensor, down: Tensor, a: Tensor, factor: float) -> Tensor:
    """factor * (dy down) * 2 sqrt(a) [T, hidden], for dy [T, width], down [width, hidden] and a [T, hidden], bfloat16."""
    return _launch(dy, down, a, 2.0 * factor)


@squared_relu_up.register_fake
def _(x: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], up.shape[0])


@squared_relu_down_gradient.register_fake
def _(dy: Tensor, down: Tensor, a: Tensor, factor: float) -> Tensor:
    return dy.new_empty(a.shape)


class FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, factor: float) -> Tensor:
        a = squared_relu_up(x, up)
        ctx.save_for_backward(x, up, down, a)
        ctx.factor = factor
        return scaled_matmul(a, down.t(), factor)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, up, down, a = ctx.saved_tensors
        dh = squared_relu_down_gradient(dy, down, a, ctx.factor)
        return dh @ up, dh.t() @ x, scaled_matmul(dy.t(), a, ctx.factor), None


def fused_mlp(x: Tensor, up: Tensor, down: Tensor, factor: float) -> Tensor:
    """`squared_relu_mlp` for what fits, see `dwslm.ops.mlp.fit.misfit`."""
    y: Tensor = FusedMLP.apply(x, up, down, factor)
    return y
