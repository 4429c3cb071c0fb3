import math

import pytest
import torch

from dwslm.ops.qk_norm_rope import qk_norm_rope, resolve
from dwslm.ops.qk_norm_rope.reference import qk_norm_rope_reference
from tests.ops.helpers import output_and_gradients, relative_error

EPS = 1e-6


def case(tokens, head_dim, seed=0):
    """Tables of tokens in two segments, and the same rotations as complex numbers."""
    torch.manual_seed(seed)
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return rotations(torch.arange(tokens) % max(tokens // 2, 1), frequencies)


def rotations(positions, frequencies):
    angle = positions[:, None].double() * frequencies
    return angle.cos().float()[:, None], angle.sin().float()[:, None], torch.polar(torch.ones_like(angle), angle)


def joined(f):
    """The results side by side, so that one weight meets them all."""
    return lambda x: torch.cat([y.flatten(1) for y in f(x)], dim=1)


def errors(got, want, columns):
    """Relative errors of the outputs' and the gradient's parts; columns are those of q, k and the rest."""
    parts = [
        (g, w)
        for a, b in zip(got, want, strict=True)
        for g, w in zip(a.split(columns, 1), b.split(columns, 1), strict=True)
    ]
    return [relative_error(g, w) for g, w in parts]


@pytest.mark.parametrize("more", [0, 19])
def test_torch_meets_the_reference(more):
    cos, sin, turn = case(37, 16)
    columns = [64, 32, more]
    x, weight = torch.randn(37, sum(columns)), torch.randn(37, sum(columns))
    got = output_and_gradients(joined(lambda x: qk_norm_rope(x, cos, sin, 4, 2, eps=EPS)), [x], weight)
    want = output_and_gradients(joined(lambda x: qk_norm_rope_reference(x, turn, 4, 2, eps=EPS)), [x.double()], weight)
    assert max(errors(got, want, columns)) < 1e-5


def test_by_hand():
    """A head (3, 4) has root mean square sqrt(12.5); at position 1 with frequency pi / 2 it turns from (a, b) to (-b, a)."""
    cos, sin, _ = rotations(torch.tensor([0, 1]), torch.tensor([math.pi / 2], dtype=torch.float64))
    x = torch.tensor([[3.0, 4.0, 1.0, 1.0, 7.0], [3.0, 4.0, 1.0, 1.0, 8.0]])
    q, k, more = qk_norm_rope(x, cos, sin, 1, 1, eps=0.0)
    size = math.sqrt(12.5)
    torch.testing.assert_close(q[:, 0], torch.tensor([[3 / size, 4 / size], [-4 / size, 3 / size]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(k[:, 0], torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), atol=1e-6, rtol=0)
    assert more.tolist() == [[7.0], [8.0]]


def test_auto_is_torch_on_a_cpu_and_what_cannot_be_had_is_refused():
    assert resolve("auto", torch.device("cpu"), 128) == "torch"
    with pytest.raises(ValueError, match="QK-norm engine 'fused' needs a GPU"):
        resolve("fused", torch.device("cpu"), 128)
    with pytest.raises(ValueError, match="unknown QK-norm engine 'norm9'"):
        resolve("norm9", torch.device("cpu"), 128)


@pytest.mark.gpu
def test_fused_refuses_what_it_cannot_take():
    gpu = torch.device("cuda")
    assert resolve("auto", gpu, 128) == resolve("fused", gpu, 16) == "fused" and resolve("auto", gpu, 96) == "torch"
    with pytest.raises(ValueError, match="head_dim is 96"):
        resolve("fused", gpu, 96)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tokens", "heads", "kv_heads", "head_dim", "more", "spare"), [
    (torch.bfloat16, 2048, 8, 2, 128, 256, 0),  # the main model's
    (torch.bfloat16, 2048, 8, 2, 128, 264, 0),  # and with value gates
    (torch.float32, 333, 8, 2, 128, 258, 6),  # a view of longer rows, tokens that fill no tile
    (torch.float32, 100, 4, 4, 64, 0, 0),
    (torch.bfloat16, 17, 2, 1, 16, 3, 0),  # rows of an odd length
    (torch.float32, 1, 1, 1, 256, 2, 0),
])  # fmt: skip
def test_fused_meets_the_reference(dtype, tokens, heads, kv_heads, head_dim, more, spare):
    cos, sin, turn = case(tokens, head_dim)
    cos, sin = cos.cuda(), sin.cuda()
    columns = [heads * head_dim, kv_heads * head_dim, more]
    x, weight = torch.randn(tokens, sum(columns) + spare).to(dtype), torch.randn(tokens, sum(columns))

    def run(f, x, weight):
        x = x.detach().requires_grad_()  # kept whole: a view of it goes in
        y = joined(f)(x[:, : sum(columns)])
        return [y.detach(), torch.autograd.grad((y * weight).sum(), x)[0][:, : sum(columns)]]

    def fused(x):
        return qk_norm_rope(x, cos, sin, heads, kv_heads, eps=EPS, engine="fused")

    want = run(
        lambda x: qk_norm_rope_reference(x, turn, heads, kv_heads, eps=EPS),
        x.double(),
        weight.double(),
    )
    got, again = (run(fused, x.cuda(), weight.cuda()) for _ in range(2))
    bound = 0.005 if dtype == torch.bfloat16 else 5e-5
    assert max(errors([y.cpu() for y in got], want, columns)) < bound
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
def test_fused_keeps_the_rules_of_custom_operators():
    cos, sin = (y.cuda() for y in case(64, 32)[:2])
    x = torch.randn(64, 3 * 32 + 40, device="cuda", requires_grad=True)
    qk_norm_rope(x, cos, sin, 2, 1, eps=EPS, engine="fused")  # loads the operator
    torch.library.opcheck(torch.ops.dwslm.qk_norm_rope.default, (x, cos, sin, 2, 1, EPS))


@pytest.mark.gpu
def test_fused_in_a_compiled_function_is_one_graph_and_meets_torch():
    cos, sin = (y.cuda() for y in case(256, 64)[:2])
    x, weight = torch.randn(256, 7 * 64, device="cuda"), torch.randn(256, 7 * 64, device="cuda")

    def run(engine):
        return joined(lambda x: qk_norm_rope(2 * x, cos, sin, 4, 2, eps=EPS, engine=engine))

    got = output_and_gradients(torch.compile(run("fused"), fullgraph=True, dynamic=False), [x], weight)
    want = output_and_gradients(run("torch"), [x], weight)
    assert max(errors(got, want, [256, 128, 64])) < 1e-5
