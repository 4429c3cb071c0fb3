import math

import pytest
import torch

from dwslm.model.rotary import RopeSettings, Rotary, attention_scale, rotation_frequencies
from dwslm.ops.qk_norm_rope.plain import rotate


@pytest.mark.parametrize(("theta", "counts"), [(10_000.0, (21, 25, 18)), (100_000.0, (17, 20, 27))])
def test_yarn_keeps_ramps_and_interpolates_the_right_pairs(theta, counts):
    """4,096 to 32,768 tokens, 64 pairs: counts worked out from turns = 4096 theta_d / (2 pi) against 32 and 1."""
    plain = rotation_frequencies(128, RopeSettings(theta=theta))
    yarn = rotation_frequencies(128, RopeSettings(theta=theta, yarn_factor=8.0))
    ratio = plain / yarn
    kept, divided = (
        (ratio == 1).sum().item(),
        torch.isclose(ratio, torch.tensor(8.0, dtype=torch.float64)).sum().item(),
    )
    assert (kept, 64 - kept - divided, divided) == counts


def test_yarn_temperature_is_in_the_logit_scale():
    assert attention_scale(128, RopeSettings()) == pytest.approx(1 / math.sqrt(128))
    ratio = attention_scale(128, RopeSettings(yarn_factor=8.0)) * math.sqrt(128)
    assert ratio == pytest.approx(1.208**2, abs=2e-3)


def test_logits_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    frequencies = rotation_frequencies(16, RopeSettings())

    def logit(i: int, j: int) -> float:
        a, b = (Rotary(torch.tensor([at]), frequencies, 1.0) for at in (i, j))
        return (rotate(q, a.cos, a.sin) * rotate(k, b.cos, b.sin)).sum().item()

    assert logit(7, 3) == pytest.approx(logit(1007, 1003), abs=1e-4)
    assert logit(7, 3) != pytest.approx(logit(8, 3), abs=1e-3)
    assert logit(5, 5) == pytest.approx((q * k).sum().item(), abs=1e-5)


def test_rotation_by_hand():
    """Head of two channels turns by one radian a position."""
    rotary = Rotary(torch.tensor([0, 2]), rotation_frequencies(2, RopeSettings()), 1.0)
    out = rotate(torch.tensor([[[1.0, 0.0]]] * 2), rotary.cos, rotary.sin)
    assert out.flatten().tolist() == pytest.approx([1, 0, math.cos(2), math.sin(2)])


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="yarn_factor >= 1"):
        RopeSettings(yarn_factor=0.5)
