import pytest
import torch
import torch.nn.functional as F

from dwslm.ops.delta_rule import delta_rule, gated_delta_rule
from dwslm.ops.delta_rule.reference import delta_rule_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import UNEVEN, boundaries, output_and_gradients, relative_error

HEADS, KEY, VALUE = 2, 32, 24

GATES = {
    "typical": lambda shape: -5 * torch.sigmoid(torch.randn(shape) - 3),
    "slow": lambda shape: -1e-3 * torch.rand(shape),
    "none": torch.zeros,
    "fast": lambda shape: -5 * torch.rand(shape),
    "mixed extremes": lambda shape: torch.where(torch.rand(shape) < 0.5, -5.0, -1e-4),
    "unbounded": lambda shape: -torch.exp(4 * torch.randn(shape)),
    "total forgetting": lambda shape: torch.where(torch.rand(shape) < 0.1, -1e4, -1e-2),
}


def draw(total: int, gate: str) -> list[torch.Tensor]:
    q, k = (F.normalize(torch.randn(total, HEADS, KEY), dim=-1) for _ in range(2))
    return [
        q,
        k,
        torch.randn(total, HEADS, VALUE),
        GATES[gate]((total, HEADS, KEY)),
        torch.rand(total, HEADS),
    ]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("offsets", [UNEVEN, [0, 200], list(range(201)), [0, 31, 32, 33, 95, 96, 200]])
def test_engine_meets_the_recurrence(gate, offsets):
    torch.manual_seed(len(offsets))
    total, cu = offsets[-1], boundaries(offsets)
    inputs, weight = draw(total, gate), torch.randn(total, HEADS, VALUE)
    got = output_and_gradients(lambda *x: delta_rule(*x, segments(cu, total, total), scale=0.2), inputs, weight)
    want = output_and_gradients(
        lambda *x: delta_rule_reference(*x, cu, scale=0.2), [x.double() for x in inputs], weight.double()
    )
    for name, g, w in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, want, strict=True):
        assert relative_error(g, w) < 1e-4, name


def test_recurrence_by_hand():
    """One channel: S1 = b1 k1 v1; S2 = a S1 + b2 k2 (v2 - k2 a S1) with a = exp(g2)."""
    one = torch.ones(2, 1, 1)
    v, g, beta = (
        torch.tensor([[[3.0]], [[5.0]]]),
        torch.log(torch.tensor([[[0.9]], [[0.5]]])),
        torch.tensor([[0.5], [0.25]]),
    )
    out = delta_rule_reference(one, one, v, g, beta, boundaries([0, 2]), scale=2.0)
    s1 = 0.5 * 3.0
    s2 = 0.5 * s1 + 0.25 * (5.0 - 0.5 * s1)
    assert out.flatten().tolist() == pytest.approx([2 * s1, 2 * s2])


def test_one_decay_a_head_is_gated_deltanet():
    """Gated DeltaNet's own form (arXiv 2412.06464, eq. 10): S_t = a_t S_{t-1} (I - b k k^T) + b v k^T, S in R^{dv x dk}."""
    torch.manual_seed(0)
    q, k, v, _, beta = draw(50, "slow")
    a = torch.rand(50, HEADS) * 0.5 + 0.5
    state, want = torch.zeros(HEADS, VALUE, KEY), []
    for t in range(50):
        keep = torch.eye(KEY) - beta[t][:, None, None] * k[t][:, :, None] * k[t][:, None, :]
        state = a[t][:, None, None] * state @ keep + beta[t][:, None, None] * v[t][:, :, None] * k[t][:, None, :]
        want.append(torch.einsum("hvk,hk->hv", state, q[t]))
    got = gated_delta_rule(q, k, v, a.log(), beta, segments(boundaries([0, 50]), 50, 50), scale=1.0)
    assert relative_error(got, torch.stack(want)) < 1e-5


def test_later_tokens_change_nothing_before_them():
    torch.manual_seed(0)
    inputs = draw(200, "fast")
    seg = segments(boundaries([0, 200]), 200, 200)
    before = delta_rule(*inputs, seg, scale=1.0)
    changed = [x.clone() for x in inputs]
    for x, y in zip(changed, draw(200, "fast"), strict=True):
        x[77:] = y[77:]
    assert torch.equal(before[:77], delta_rule(*changed, seg, scale=1.0)[:77])


def test_bfloat16_values_give_bfloat16_outputs():
    inputs = draw(64, "typical")
    out = delta_rule(*[x.bfloat16() for x in inputs[:3]], *inputs[3:], segments(boundaries([0, 64]), 64, 64), scale=1.0)
    assert out.dtype == torch.bfloat16


def test_new_boundaries_cost_no_recompilation():
    torch.manual_seed(0)
    inputs = draw(96, "typical")
    compiled = torch.compile(
        lambda cu, *x: delta_rule(*x, segments(cu, 96, 96), scale=0.2),
        backend="aot_eager",
        fullgraph=True,
        dynamic=False,
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for offsets in ([0, 96, 96], [0, 50, 96]):
            cu = boundaries(offsets)
            want = delta_rule(*inputs, segments(cu, 96, 96), scale=0.2)
            assert relative_error(compiled(cu, *inputs), want) < 1e-6
