"""The float32 truth of the gated delta rule: the recurrence, token by token."""

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *, scale: float
) -> Tensor:
    """Arguments as in `delta_rule`, boundaries as a tensor; computed in q's dtype if that is float64, else in float32.

    Returns [T, heads, value_dim].
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    heads, key_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    bounds = cu_seqlens.tolist()
    out = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        state = q.new_zeros(heads, key_dim, value_dim)
        for t in range(start, end):
            state = state * g[t].exp()[:, :, None]
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            out.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)
