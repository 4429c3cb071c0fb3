"""Linear-attention sublayer: Kimi Delta Attention (arXiv 2510.26692) and Gated DeltaNet (arXiv 2412.06464).

    q, k = l2norm(silu(conv(W x)));  v = silu(conv(W_v x))            depthwise, width 4, restarting at segments
    log decay = -5 sigmoid(exp(A) (f(x) + dt_bias))                    bounded gate, or
              = -exp(A) softplus(f(x) + dt_bias)                       softplus gate
    beta = sigmoid(W_beta x)
    out = W_o [ sigmoid(gate(x)) * rmsnorm_head(o) ]

KDA has one decay per key channel, with f and the output gate of low rank; GDN has one decay a head and a full gate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwslm.model.projection import OutputBlock, Projection
from dwslm.model.value_embedding import ValueEmbedding
from dwslm.ops.delta_gate import delta_gate
from dwslm.ops.delta_rule import decay_dtype, delta_rule, gated_delta_rule
from dwslm.ops.fp8 import Operand
from dwslm.ops.gated_norm import gated_norm, gated_norm_linear
from dwslm.ops.segments import Segments
from dwslm.ops.short_conv import projected_short_conv, short_conv

GATE_BOUND = -5.0
"""Least log decay of the bounded gate: what fast kernels can represent (a sub-chunk of 16 steps must fit exp in float32)."""
CONV_WIDTH = 4


class DeltaAttention(nn.Module):
    """`kind` is "kda" or "gdn"; `gate` is "bounded" or "softplus"; `gate_rank` is the rank of KDA's decay and output gate.

    The output is multiplied by `factor`. `precision` is that of the input and output projection; what takes the gates out of
    their low rank is thin, and stays in the compute dtype.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        kind: str,
        gate: str,
        gate_rank: int,
        engine: str,
        conv_engine: str,
        gate_engine: str,
        eps: float,
        value_embedding: ValueEmbedding | None,
        dtype: torch.dtype,
        factor: float = 1.0,
        precision: str = "model",
    ):
        super().__init__()
        inner = heads * head_dim
        # GDN's output gate has no bias and its decay no channels: nothing that the fused kernels were made for.
        self.conv_engine, self.gate_engine = conv_engine, gate_engine if kind == "kda" else "torch"
        self.heads, self.head_dim, self.kind, self.gate, self.engine, self.eps = (
            heads,
            head_dim,
            kind,
            gate,
            engine,
            eps,
        )
        low_rank = kind == "kda"
        blocks = [OutputBlock("q", inner), OutputBlock("k", inner), OutputBlock("v", inner)]
        if low_rank:
            blocks += [OutputBlock("decay_down", gate_rank), OutputBlock("gate_down", gate_rank)]
        else:
            blocks += [OutputBlock("decay", heads, role="vector"), OutputBlock("gate", inner)]
        blocks.append(OutputBlock("beta", heads, role="vector"))
        if value_embedding is not None:
            blocks.append(OutputBlock("value_gate", heads, role="vector", init="zero"))
        self.input = Projection(width, *blocks, dtype=dtype, precision=precision)
        if low_rank:
            self.decay_up = Projection(gate_rank, OutputBlock("", inner), dtype=dtype)
            self.gate_up = Projection(gate_rank, OutputBlock("", inner), dtype=dtype)
            self.gate_bias = nn.Parameter(torch.empty(inner))
        self.conv = nn.Parameter(torch.empty(3 * inner, CONV_WIDTH))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(inner if low_rank else heads))
        self.head_gain = nn.Parameter(torch.empty(head_dim))
        self.value_embedding = value_embedding
        self.output = Projection(inner, OutputBlock("", width), dtype=dtype, precision=precision, factor=factor)

    def forward(self, x: Operand, tokens: Tensor, segments: Segments) -> Tensor:
        """[T, width] to [T, width]."""
        conv, projection = (self.conv, segments, self.heads, self.conv_engine), self.input
        if projection.precision == "fp8_delayed":
            q, k, v, rest = projected_short_conv(x, projection.weight, projection.peaks, *conv)
        else:
            q, k, v, rest = short_conv(projection(x), *conv)
        others = self.input.rows[3:]
        spare = rest.shape[1] - sum(others)
        decay, gate, beta, *value_gate = rest.split([*others, spare] if spare else others, dim=-1)
        if self.value_embedding is not None:
            v = self.value_embedding(v, value_gate[0], tokens)
        if self.kind == "kda":
            decay, gate = self.decay_up(decay), self.gate_up(gate)
        g, beta = self.gates(decay, beta)
        rule = delta_rule if self.kind == "kda" else gated_delta_rule
        o = rule(
            q,
            k,
            v,
            g,
            beta,
            segments,
            scale=self.head_dim**-0.5,
            bounded=self.gate == "bounded",
            engine=self.engine,
        )
        # The norm's eps must lie well under o's mean square, which is about 6e-6 at the half init scale.
        bias = self.gate_bias if self.kind == "kda" else None
        gated, out = (o, gate, self.head_gain, bias, self.eps), self.output
        if out.precision == "fp8_delayed":
            return gated_norm_linear(*gated, out.weight, out.peaks, out.factor, self.gate_engine)
        return out(gated_norm(*gated, self.gate_engine))

    def gates(self, f: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay, at most 0, in the dtype that the engine reads, and beta, float32 [T, heads] from logits [T, heads].

        The decay is [T, heads, head_dim] from f [T, heads * head_dim] (KDA), or [T, heads] from as many (GDN).
        """
        if self.kind == "kda" and self.gate == "bounded":
            dtype = decay_dtype(self.engine, device=f.device, dtype=f.dtype, head_dim=self.head_dim, bounded=True)
            return delta_gate(f, self.A_log, self.dt_bias, logits, GATE_BOUND, self.gate_engine, dtype)
        f = (f.float() + self.dt_bias).unflatten(-1, (self.heads, -1))
        rate = self.A_log.exp()[:, None]
        g = GATE_BOUND * torch.sigmoid(rate * f) if self.gate == "bounded" else -rate * F.softplus(f)
        return g if self.kind == "kda" else g[:, :, 0], torch.sigmoid(logits.float())
