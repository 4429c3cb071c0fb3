import pytest
import torch

from dwslm.ops.depth_mix import depth_mix, inverse_rms
from dwslm.ops.depth_mix.reference import depth_mix_reference
from tests.ops.helpers import output_and_gradients, relative_error


@pytest.mark.parametrize("sources", [1, 2, 6])
def test_meets_the_reference(sources):
    torch.manual_seed(sources)
    inputs = [*(torch.randn(20, 16) * (i + 1) for i in range(sources)), torch.randn(16), torch.rand(16) + 0.5]
    weight = torch.randn(20, 16)

    def engine(*x):
        return depth_mix(list(x[:-2]), [inverse_rms(v, 1e-6) for v in x[:-2]], x[-2], x[-1])

    got = output_and_gradients(engine, inputs, weight)
    want = output_and_gradients(lambda *x: depth_mix_reference(list(x[:-2]), x[-2], x[-1], 1e-6), inputs, weight)
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() < 1e-5 * max(1.0, w.norm())


def test_a_zero_query_averages():
    values = [torch.full((3, 4), 1.0), torch.full((3, 4), 4.0)]
    mixed = depth_mix(values, [inverse_rms(v, 1e-6) for v in values], torch.zeros(4), torch.ones(4))
    assert torch.allclose(mixed, torch.full((3, 4), 2.5))


def test_bfloat16_is_within_half_a_percent():
    torch.manual_seed(0)
    values = [torch.randn(50, 64).bfloat16() for _ in range(4)]
    query, gain = torch.randn(64) / 8, torch.ones(64)
    got = depth_mix(values, [inverse_rms(v, 1e-6) for v in values], query, gain)
    assert relative_error(got, depth_mix_reference(values, query, gain, 1e-6)) < 0.005
