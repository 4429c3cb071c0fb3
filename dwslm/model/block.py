"""One layer, two sublayers, and the residual stream they read from and add to.

plain:                 x += factor * f(norm(x))
attention residuals:   h = depth_mix(embedding, finished blocks, partial sum);  partial += factor * f(norm(h))
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dwslm.model.attention import Attention
from dwslm.model.delta import DeltaAttention
from dwslm.model.mlp import MLP
from dwslm.model.projection import Norm
from dwslm.model.rotary import Rotary
from dwslm.ops.depth_mix import depth_mix, inverse_rms
from dwslm.ops.segments import Segments


class DepthQuery(nn.Module):
    """What one reader of the stream looks for: query and key gain, float32 [width]. A zero query averages its sources."""

    def __init__(self, width: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(width))


# Streams are values: `add` gives a new one. A compiler follows that exactly, which cannot be said of attributes that change.


@dataclass(frozen=True)
class PlainStream:
    """The usual residual stream: every reader sees the running sum x, [T, width]."""

    x: Tensor

    def read(self, query: DepthQuery | None) -> Tensor:
        return self.x

    def add(self, y: Tensor) -> "PlainStream":
        return PlainStream(self.x + y)


@dataclass(frozen=True)
class DepthStream:
    """Block attention residuals (arXiv 2603.15031): sums of `block_size` sublayers, mixed anew for every reader.

    Attributes:
        block_size: sublayers whose outputs add up to one block.
        eps: of the key norm.
        blocks: the embedding and the finished blocks, [T, width] each.
        inverse: their `inverse_rms`.
        partial: sum of the block in progress, None at its start.
        added: sublayers so far.
    """

    block_size: int
    eps: float
    blocks: tuple[Tensor, ...] = ()
    inverse: tuple[Tensor, ...] = ()
    partial: Tensor | None = None
    added: int = 0

    def with_block(self, block: Tensor) -> "DepthStream":
        """The stream with one more finished block, and none in progress."""
        blocks, inverse = (*self.blocks, block), (*self.inverse, inverse_rms(block, self.eps))
        return replace(self, blocks=blocks, inverse=inverse, partial=None)

    def read(self, query: DepthQuery | None) -> Tensor:
        assert query is not None
        sources, inverse = list(self.blocks), list(self.inverse)
        if self.partial is not None:
            sources, inverse = [*sources, self.partial], [*inverse, inverse_rms(self.partial, self.eps)]
        return depth_mix(sources, inverse, query.query, query.gain)

    def add(self, y: Tensor) -> "DepthStream":
        total = y if self.partial is None else self.partial + y
        after = replace(self, partial=total, added=self.added + 1)
        return after.with_block(total) if after.added % self.block_size == 0 else after


class Block(nn.Module):
    """Pre-norm mixer and MLP sublayers; `factor` is the residual scaling, base depth over depth."""

    def __init__(
        self,
        mixer: Attention | DeltaAttention,
        mlp: MLP,
        width: int,
        factor: float,
        eps: float,
        depth_mix: bool,
    ):
        super().__init__()
        self.factor = factor
        self.mixer_norm, self.mixer = Norm(width, eps), mixer
        self.mlp_norm, self.mlp = Norm(width, eps), mlp
        self.mixer_query = DepthQuery(width) if depth_mix else None
        self.mlp_query = DepthQuery(width) if depth_mix else None

    def forward(
        self, stream: PlainStream | DepthStream, tokens: Tensor, segments: Segments, rotary: Rotary
    ) -> PlainStream | DepthStream:
        """Reads the stream twice and adds to it twice."""
        x = self.mixer_norm(stream.read(self.mixer_query))
        if isinstance(self.mixer, Attention):
            y = self.mixer(x, tokens, segments, rotary)
        else:
            y = self.mixer(x, tokens, segments)
        stream = stream.add(self.factor * y)
        return stream.add(self.factor * self.mlp(self.mlp_norm(stream.read(self.mlp_query))))
