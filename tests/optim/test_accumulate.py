"""Gradients added by one kernel: the same bits as a float32 addition of each by itself, and nothing between them touched."""

import pytest
import torch

pytestmark = pytest.mark.gpu

SIZES = [(300, 40), (7,), (), (5000, 3), (128, 1024)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("before", "gap"), [(0, 0), (4, 8), (5, 3)], ids=["dense", "aligned", "unaligned"])
def test_each_gradient_is_added_at_its_place(dtype, before, gap):
    from dwslm.optim.accumulate import Adder

    torch.manual_seed(0)
    sums = torch.randn(200_000, device="cuda")
    want, places, at = sums.clone(), [], before
    gradients = [torch.randn(size, device="cuda").to(dtype) for size in SIZES]
    gradients[0] = gradients[0].t().contiguous().t()  # not as it lies in memory
    for gradient in gradients:
        places.append((at, gradient.numel()))
        want[at : at + gradient.numel()] += gradient.flatten().float()
        at += gradient.numel() + gap
    Adder(sums, places)(gradients)
    assert torch.equal(sums, want)


def test_more_tensors_than_one_launch_lists():
    from dwslm.optim.accumulate import LISTED, Adder

    count = 2 * LISTED + 3
    gradients = [torch.full((5,), float(i), device="cuda") for i in range(count)]
    sums = torch.zeros(5 * count, device="cuda")
    Adder(sums, [(5 * i, 5) for i in range(count)])(gradients)
    assert torch.equal(sums, torch.arange(count, device="cuda").repeat_interleave(5).float())


def test_a_recording_follows_its_gradients():
    from dwslm.optim.accumulate import Adder

    sums, gradient = torch.zeros(10_000, device="cuda"), torch.ones(100, 100, device="cuda", dtype=torch.bfloat16)
    add = Adder(sums, [(0, 10_000)])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add([gradient])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add([gradient])
    for value in (2.0, 3.0):
        gradient.fill_(value)
        graph.replay()
    assert torch.equal(sums, torch.full_like(sums, 6.0))
