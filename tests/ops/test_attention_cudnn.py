"""cuDNN's engine without cuDNN: what its graphs are handed, read by a stand-in that goes by addresses and strides as they do."""

import pytest
import torch

from dwslm.ops.attention import attention, cudnn, gpu
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 16, 200
SCALE = 0.25


class StandIn:
    """Computes each slot by itself, found from its length and the first elements it is told."""

    def __init__(self, layout):
        self.layout = layout

    def slots(self, x, starts, lengths, heads, width):
        """One [length, heads, width] view a slot, counted from x's own address."""
        row, head = {1: (heads, 1)}.get(width, x.stride()[:2])
        for start, length in zip(starts.tolist()[:-1], lengths.tolist(), strict=True):
            yield x.as_strided((length, heads, width), (row, head, 1), x.storage_offset() + start)

    def weights(self, q, k):
        """Softmax [heads, query, key] and its log-sum-exp [query, heads, 1]."""
        n, layout = len(q), self.layout
        back = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        seen = (back >= 0) & ((back < layout.window) | (layout.window == 0))
        k = k.repeat_interleave(layout.heads // layout.kv_heads, dim=1)
        scores = (layout.scale * torch.einsum("qhd,khd->hqk", q, k)).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1), scores.logsumexp(-1).T[:, :, None]


class Forward(StandIn):
    def execute(self, buffers):
        lengths, *starts = buffers[:6]
        shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (HEADS, HEAD_DIM), (HEADS, 1)]
        parts = [self.slots(x, s, lengths, *shape) for x, s, shape in zip(buffers[6:], starts, shapes, strict=True)]
        for q, k, v, o, stats in zip(*parts, strict=True):
            p, total = self.weights(q, k)
            o.copy_(torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(HEADS // KV_HEADS, dim=1)))
            stats.copy_(total)


class Backward(StandIn):
    def execute(self, buffers):
        lengths, at_q, at_k, at_v, at_o, *at_gradients = buffers[:8]
        q_like, k_like, group = (HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), HEADS // KV_HEADS
        starts = [at_q, at_k, at_v, at_o, at_o, *at_gradients]
        shapes = [q_like, k_like, k_like, q_like, q_like, q_like, k_like, k_like]
        *packed, padded, dq, dk, dv = buffers[8:]
        packed += [dq, dk, dv]
        parts = [self.slots(x, s, lengths, *shape) for x, s, shape in zip(packed, starts, shapes, strict=True)]
        assert padded.is_contiguous() and padded.shape == (len(lengths), HEADS, self.layout.context)
        for q, k, v, o, do, dq, dk, dv, stats in zip(*parts, padded, strict=True):
            p, total = self.weights(q, k)
            torch.testing.assert_close(stats[:, : len(q)].T[:, :, None], total)
            dp = torch.einsum("qhd,khd->hqk", do, v.repeat_interleave(group, dim=1))
            ds = self.layout.scale * p * (dp - (do * o).sum(-1).T[:, :, None])
            dq.copy_(torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(group, dim=1)))
            dk.copy_(torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (KV_HEADS, group)).sum(2))
            dv.copy_(torch.einsum("hqk,qhd->khd", p, do).unflatten(1, (KV_HEADS, group)).sum(2))


@pytest.fixture
def built(monkeypatch):
    """The layouts for which graphs were asked; stand-ins take their place."""
    layouts = []
    monkeypatch.setattr(cudnn, "_forward_graph", lambda layout: layouts.append(layout) or Forward(layout))
    monkeypatch.setattr(cudnn, "_backward_graph", lambda layout: layouts.append(layout) or Backward(layout))
    return layouts


def views(columns=0):
    """q, k, v side by side in one projection, with columns before and behind that belong to others."""
    x = torch.randn(TOKENS, columns + (HEADS + 2 * KV_HEADS) * HEAD_DIM + 8)
    sizes = [columns, *(n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)), 8]
    _, q, k, v, _ = x.split(sizes, dim=1)
    return tuple(y.unflatten(1, (-1, HEAD_DIM)) for y in (q, k, v))


@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.parametrize("columns", [0, 4, 1], ids=["aligned", "aligned inside", "copied"])
def test_graphs_are_told_where_each_segment_lies(built, window, columns):
    torch.manual_seed(0)
    q, k, v = views(columns)
    cu, weight = boundaries(UNEVEN), torch.randn(TOKENS, HEADS, HEAD_DIM)
    seg = segments(cu, TOKENS, TOKENS)

    def run(*inputs):
        return cudnn.attention_cudnn(*inputs, seg, scale=SCALE, window=window)

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]  # views as they are: a clone would be dense
    out = run(*leaves)
    got = [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
    want = output_and_gradients(lambda *x: attention_reference(*x, cu, scale=SCALE, window=window), [q, k, v], weight)
    for g, w in zip(got, want, strict=True):  # a window of one token has no gradient for q and k but rounding
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    row = (HEADS + 2 * KV_HEADS) * HEAD_DIM + columns + 8
    read = {4: (row, HEAD_DIM), 0: (row, HEAD_DIM), 1: (KV_HEADS * HEAD_DIM, HEAD_DIM)}[columns]
    # The backward kernels go wrong on views (H200, cuDNN 9.19), so all that they read is packed.
    packed = (HEADS * HEAD_DIM, HEAD_DIM), (KV_HEADS * HEAD_DIM, HEAD_DIM), (KV_HEADS * HEAD_DIM, HEAD_DIM)
    assert built[0].v == read and (built[1].q, built[1].k, built[1].v) == packed
    assert [layout.slots for layout in built] == [len(UNEVEN) - 1] * 2


def test_a_window_as_long_as_a_row_is_none(built):
    q, k, v = views()
    seg = segments(boundaries([0, 100, TOKENS]), TOKENS, 100)
    for window in (99, 100, 101, None):
        cudnn.attention_cudnn(q, k, v, seg, scale=SCALE, window=window)
    assert [layout.window for layout in built] == [99, 0, 0, 0]


def test_compiled_is_one_graph_and_boundaries_compile_nothing(built, monkeypatch):
    monkeypatch.setattr(gpu, "choose", torch.compiler.assume_constant_result(lambda engine, *case: engine))

    def step(q, k, v, cu):
        return attention(q, k, v, segments(cu, TOKENS, 100), scale=SCALE, window=16, engine="cudnn")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    weight, inputs = torch.randn(TOKENS, HEADS, HEAD_DIM), list(views())
    cu = boundaries([0, 1, 1, 40, 100, 163, 200, 200])
    for i, offsets in enumerate(([0, 1, 1, 40, 100, 163, 200, 200], [0, 100, 200, 200, 200, 200, 200, 200])):
        cu.copy_(boundaries(offsets))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = output_and_gradients(lambda *x: compiled(*x, cu), inputs, weight)
        want = output_and_gradients(lambda *x: attention_reference(*x, cu, scale=SCALE, window=16), inputs, weight)
        assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
    torch._dynamo.reset()
