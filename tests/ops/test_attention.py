import math

import pytest
import torch

from dwslm.ops.attention import attention, blocked, resolve
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error


@pytest.mark.parametrize("window", [None, 1, 16, 512])
@pytest.mark.parametrize("block", [32, 256])
def test_engine_meets_the_reference(window, block, monkeypatch):
    monkeypatch.setattr(blocked, "QUERY_BLOCK", block)
    torch.manual_seed(window or 0)
    total, cu = 200, boundaries(UNEVEN)
    inputs = [torch.randn(total, heads, 16) for heads in (4, 2, 2)]
    weight = torch.randn(total, 4, 16)
    got = output_and_gradients(
        lambda q, k, v: attention(q, k, v, segments(cu, total, total), scale=0.25, window=window),
        inputs,
        weight,
    )
    want = output_and_gradients(
        lambda q, k, v: attention_reference(q, k, v, cu, scale=0.25, window=window), inputs, weight
    )
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 5e-5


def test_reference_by_hand():
    """Two tokens of one segment, then one of another: softmax of (1, 3) over the first two, itself alone for the third."""
    q = torch.tensor([[[1.0]], [[1.0]], [[1.0]]])
    k = torch.tensor([[[1.0]], [[3.0]], [[5.0]]])
    v = torch.tensor([[[10.0]], [[20.0]], [[30.0]]])
    out = attention_reference(q, k, v, boundaries([0, 2, 3]), scale=1.0)
    second = (10 * math.exp(1) + 20 * math.exp(3)) / (math.exp(1) + math.exp(3))
    assert out.flatten().tolist() == pytest.approx([10, second, 30])


def test_a_window_counts_the_query_itself():
    v = torch.arange(5.0)[:, None, None]
    zero = torch.zeros(5, 1, 1)
    out = attention(zero, zero, v, segments(boundaries([0, 5]), 5, 5), scale=1.0, window=2)
    assert out.flatten().tolist() == pytest.approx([0, 0.5, 1.5, 2.5, 3.5])


def test_rows_are_independent_of_their_batch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 2, 8) for _ in range(3))
    both = attention(q, k, v, segments(boundaries([0, 20, 32, 64]), 64, 32), scale=0.3)
    first = attention(q[:32], k[:32], v[:32], segments(boundaries([0, 20, 32]), 32, 32), scale=0.3)
    assert torch.allclose(both[:32], first, atol=1e-6)


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="unknown attention engine 'flash9'"):
        resolve("flash9")
