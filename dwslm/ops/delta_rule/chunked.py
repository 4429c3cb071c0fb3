"""The gated delta rule in chunks, in plain PyTorch: matrix products inside a chunk, a short loop over chunks.

Inside a chunk, with G the running sum of log decays and S the state before it, the recurrence unrolls to

    u_t = beta_t (v_t - (k_t * exp(G_t))^T S - sum_{j<t} A_tj u_j)        A_tj = sum_c k_tc k_jc exp(G_tc - G_jc)
    o_t = (q_t * exp(G_t))^T S + sum_{j<=t} B_tj u_j                       B_tj = sum_c q_tc k_jc exp(G_tc - G_jc)
    S'  = exp(G_C) * S + sum_j (k_j * exp(G_C - G_j)) u_j^T

so u solves one unit lower triangular system a chunk (the WY form, arXiv 2406.06484 and 2510.26692).

exp(G_t - G_j) is at most 1, but exp(G_t) exp(-G_j) overflows where the decay is fast. A and B are therefore filled by
halves: the pairs whose later token lies in the second half of a block and whose earlier one lies in the first half are split
at the border b between them, exp(G_t - G_b) exp(G_b - G_j), where both factors are at most 1 whatever the gate; then each
half in the same way, down to pairs. No bound on the gate is needed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.ops.segments import Segments

CHUNK = 32
# exp(-40) = 4e-18 is nothing in float32; keeping G small keeps differences of its sums accurate.
MIN_LOG_DECAY = -40.0


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, *, scale: float
) -> Tensor:
    """See `delta_rule`. Computes in float32."""
    total, heads, _ = q.shape
    rows, context, dtype = segments.rows, segments.context, v.dtype
    padded = -(-context // CHUNK) * CHUNK
    chunks = padded // CHUNK

    def split(x: Tensor) -> Tensor:  # [T, heads, d] -> [rows * heads, chunks, CHUNK, d]
        x = F.pad(x.float().view(rows, context, heads, -1), (0, 0, 0, 0, 0, padded - context))
        return x.view(rows, chunks, CHUNK, heads, -1).permute(0, 3, 1, 2, 4).flatten(0, 1)

    q, k, v, g, beta = (
        split(q * scale),
        split(k),
        split(v),
        split(g.clamp(min=MIN_LOG_DECAY)),
        split(beta[:, :, None]),
    )
    same, carried, kept, open_end = _masks(segments, chunks, padded, heads)

    gsum = _running_sum(g)
    keys, queries = _pair_products(torch.stack([k, q]), k, gsum)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    queries = queries.masked_fill(~(same & lower), 0.0)
    system = beta * keys.masked_fill(~(same & lower.tril(-1)), 0.0)

    decay = gsum.exp() * carried
    q_in = q * decay
    right = torch.cat([beta * k * decay, beta * v], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u0 = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    k_out = (k * (gsum[:, :, -1:] - gsum).exp() * kept).transpose(2, 3)
    state_decay = (gsum[:, :, -1].exp() * open_end)[..., None]

    state = q.new_zeros(rows * heads, k.shape[-1], v.shape[-1])
    states, updates = [], []
    for c in range(chunks):
        u = torch.baddbmm(u0[:, c], w[:, c], state, alpha=-1)
        states.append(state)
        updates.append(u)
        state = torch.baddbmm(state_decay[:, c] * state, k_out[:, c], u)
    out = q_in @ torch.stack(states, dim=1) + queries @ torch.stack(updates, dim=1)
    out = out.unflatten(0, (rows, heads)).permute(0, 2, 3, 1, 4).reshape(rows, padded, heads, -1)
    return out[:, :context].reshape(total, heads, -1).to(dtype)


def _running_sum(x: Tensor) -> Tensor:
    """Sums over the tokens of a chunk so far. A GPU's cumsum is refused where results must be deterministic."""
    size = 1
    while size < CHUNK:
        x = x + F.pad(x[..., :-size, :], (0, 0, size, 0))
        size *= 2
    return x


def _masks(segments: Segments, chunks: int, padded: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which pairs share a segment, which tokens see the state before the chunk, which ones reach the state after it.

    Returns masks that broadcast over [rows * heads, chunks, CHUNK, ...]; the last one, [rows * heads, chunks, 1], says whether
    the chunk's last segment was already open before it.
    """
    rows, context = segments.rows, segments.context

    def split(x: Tensor, fill: int) -> Tensor:
        x = F.pad(x.view(rows, context), (0, padded - context), value=fill)
        return x.view(rows, 1, chunks, CHUNK).expand(-1, heads, -1, -1).flatten(0, 1)

    ids, positions = split(segments.ids, -1), split(segments.positions, 0)
    same = ids[..., :, None] == ids[..., None, :]
    carried = positions > torch.arange(CHUNK, device=ids.device)
    kept = ids == ids[..., -1:]
    return same, carried[..., None].float(), kept[..., None].float(), carried[..., -1:].float()


def _pair_products(left: Tensor, right: Tensor, gsum: Tensor) -> Tensor:
    """[..., CHUNK, CHUNK]: sum_c left_tc right_jc exp(G_tc - G_jc) for t >= j, zero for t < j; all blocks of a size at once."""
    products = (left * right).sum(-1)[..., None, None]  # blocks of one token, [..., CHUNK, 1, 1]
    size = 1
    while size < CHUNK:
        g = gsum.unflatten(-2, (-1, 2, size))
        border = g[..., :1, -1:, :]
        later = left.unflatten(-2, (-1, 2, size))[..., 1, :, :] * (g[..., 1, :, :] - border[..., 0, :, :]).exp()
        earlier = right.unflatten(-2, (-1, 2, size))[..., 0, :, :] * (border[..., 0, :, :] - g[..., 0, :, :]).exp()
        across = later @ earlier.transpose(-1, -2)
        first, second = products[..., 0::2, :, :], products[..., 1::2, :, :]
        products = torch.cat([F.pad(first, (0, size)), torch.cat([across, second], dim=-1)], dim=-2)
        size *= 2
    return products[..., 0, :, :]
