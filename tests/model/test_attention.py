import torch
import torch.nn.functional as F

from dwslm.model.attention import ALIGNED, Attention
from dwslm.model.rotary import RopeSettings, Rotary, attention_scale, rotation_frequencies
from dwslm.model.value_embedding import ValueEmbedding
from dwslm.ops.attention.reference import attention_reference
from dwslm.ops.segments import segments
from tests.ops.helpers import boundaries

HEADS, KV_HEADS, HEAD_DIM, WIDTH, TOKENS = 4, 2, 16, 24, 12
OFFSETS = [0, 5, 12, 12]


def layer(value_embedding):
    torch.manual_seed(0)
    made = Attention(
        WIDTH,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        window=None,
        engine="auto",
        qk_norm_engine="auto",
        eps=1e-6,
        value_embedding=ValueEmbedding(50, KV_HEADS, HEAD_DIM) if value_embedding else None,
        dtype=torch.float32,
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def test_value_gates_fill_the_projection_up_to_whole_vectors():
    made, x = layer(value_embedding=True), torch.randn(TOKENS, WIDTH)
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM + KV_HEADS
    y = made.input(x)
    assert made.input.weight.shape[0] == rows and rows % ALIGNED and y.shape[1] == rows + ALIGNED - rows % ALIGNED
    assert torch.equal(y[:, :rows], F.linear(x, made.input.weight)) and not y[:, rows:].any()


def test_the_layer_is_its_equation():
    """Each step spelled out: q and k of unit root mean square, pairs turned by position, values with their gated table."""
    for value_embedding in (False, True):
        made, x, tokens = layer(value_embedding), torch.randn(TOKENS, WIDTH), torch.arange(TOKENS) * 3
        seg, frequencies = segments(boundaries(OFFSETS), TOKENS, TOKENS), rotation_frequencies(HEAD_DIM, RopeSettings())
        scale = attention_scale(HEAD_DIM, RopeSettings())
        got = made(x, tokens, seg, Rotary(seg.positions, frequencies, scale))

        q, k, v, *gate = F.linear(x, made.input.weight).split(made.input.rows, dim=-1)
        q, k, v = (y.view(TOKENS, -1, HEAD_DIM) for y in (q, k, v))
        angle = seg.positions[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (y.double() / y.double().square().mean(-1, keepdim=True).sqrt() for y in (q, k))
        turned = [torch.complex(*y.chunk(2, dim=-1)) * turn for y in (q, k)]
        q, k = (torch.cat([z.real, z.imag], dim=-1) for z in turned)
        if value_embedding:
            table = made.value_embedding.table.weight[tokens].view(TOKENS, KV_HEADS, HEAD_DIM)
            v = v + 2 * torch.sigmoid(gate[0])[:, :, None] * table
        o = attention_reference(q, k, v, boundaries(OFFSETS), scale=scale)
        torch.testing.assert_close(got, made.output(o.flatten(1)), rtol=1e-4, atol=1e-4)
