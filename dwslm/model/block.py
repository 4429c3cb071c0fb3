"""One layer, two sublayers, and the residual stream they read from and add to.

plain:                 x += factor * f(norm(x))
attention residuals:   h = depth_mix(embedding, finished blocks, partial sum);  partial += factor * f(norm(h))
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dwslm.model.attention import Attention
from dwslm.model.delta import DeltaAttention
from dwslm.model.mlp import MLP
from dwslm.model.projection import Norm
from dwslm.model.rotary import Rotary
from dwslm.ops.add_norm import add_norm, add_norm_rounded, last_norm
from dwslm.ops.depth_mix import depth_mix, inverse_rms
from dwslm.ops.fp8 import Operand, Rounding
from dwslm.ops.segments import Segments

if TYPE_CHECKING:
    from dwslm.ops.depth_mix.fused import Closed, Partial


class DepthQuery(nn.Module):
    """What one reader of the stream looks for: query and key gain, float32 [width]. A zero query averages its sources."""

    def __init__(self, width: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(width))


# Streams are values: `read` and `add` give a new one; `last` is for the final reader. A compiler follows that exactly, which
# cannot be said of attributes that change. `read` is told how the reader's product rounds its input, if it does: a stream that
# can then hands it out rounded.


@dataclass(frozen=True)
class PlainStream:
    """The usual residual stream: every reader sees the running sum x, [T, width].

    Attributes:
        engine: of `add_norm`.
        pending: output of the last sublayer, which the next reader adds to x, in the pass in which it reads.
    """

    x: Tensor
    engine: str
    pending: Tensor | None = None

    def read(
        self, query: DepthQuery | None, norm: Norm, rounding: Rounding | None = None
    ) -> tuple[Operand, "PlainStream"]:
        normed: Operand
        if rounding is None:
            x, normed = add_norm(self.x, self.pending, norm.gain, norm.eps, self.engine)
        else:
            x, normed = add_norm_rounded(self.x, self.pending, norm.gain, norm.eps, rounding, self.engine)
        return normed, replace(self, x=x, pending=None)

    def last(self, query: DepthQuery | None, norm: Norm) -> Tensor:
        return last_norm(self.x, self.pending, norm.gain, norm.eps, self.engine)

    def add(self, y: Tensor) -> "PlainStream":
        assert self.pending is None, "one reader between two additions"
        return replace(self, pending=y)


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

    def read(
        self, query: DepthQuery | None, norm: Norm, rounding: Rounding | None = None
    ) -> tuple[Tensor, "DepthStream"]:
        assert query is not None
        sources, inverse = list(self.blocks), list(self.inverse)
        if self.partial is not None:
            sources, inverse = [*sources, self.partial], [*inverse, inverse_rms(self.partial, self.eps)]
        return norm(depth_mix(sources, inverse, query.query, query.gain)), self

    def last(self, query: DepthQuery | None, norm: Norm) -> Tensor:
        return self.read(query, norm)[0]

    def add(self, y: Tensor) -> "DepthStream":
        total = y if self.partial is None else self.partial + y
        after = replace(self, partial=total, added=self.added + 1)
        return after.with_block(total) if after.added % self.block_size == 0 else after


class Finished(NamedTuple):
    """A block that is complete: the number of its first reader, and what `close` gave out for them all."""

    first: int
    closed: "Closed"


@dataclass(frozen=True)
class FusedDepthStream:
    """`DepthStream` for the fused kernels, which want the keys of all readers beforehand: float32 [readers, width].

    Attributes:
        partial: the block in progress as the last reader saw it.
        pending: output of the last sublayer, which the next reader adds to it, in the pass in which it reads.
    """

    block_size: int
    eps: float
    keys: Tensor
    finished: tuple[Finished, ...] = ()
    partial: "Partial | None" = None
    pending: Tensor | None = None
    added: int = 0

    def with_block(self, block: Tensor) -> "FusedDepthStream":
        return self._close(None, block)

    def read(
        self, query: DepthQuery | None, norm: Norm, rounding: Rounding | None = None
    ) -> tuple[Tensor, "FusedDepthStream"]:
        from dwslm.ops.depth_mix.fused import read  # Triton is there on GPU machines only

        # A reader's number is that of the sublayers before it.
        columns = [
            (b.value, b.scores[i], b.rows[i], b.pairs[i]) for first, b in self.finished for i in (self.added - first,)
        ]
        sources, scores, rows, pairs = (list(column) for column in zip(*columns, strict=True))
        key = self.keys[self.added]
        x, partial = read(sources, scores, rows, pairs, self.partial, self.pending, key, norm.gain, norm.eps)
        return x, replace(self, partial=partial, pending=None)

    def last(self, query: DepthQuery | None, norm: Norm) -> Tensor:
        return self.read(query, norm)[0]

    def add(self, y: Tensor) -> "FusedDepthStream":
        assert self.pending is None, "one reader between two additions"
        after = replace(self, pending=y, added=self.added + 1)
        return after._close(self.partial, y) if after.added % self.block_size == 0 else after

    def _close(self, partial: "Partial | None", y: Tensor) -> "FusedDepthStream":
        from dwslm.ops.depth_mix.fused import close

        one = Finished(self.added, close(partial, y, self.keys[self.added :], self.eps))
        return replace(self, finished=(*self.finished, one), partial=None, pending=None)


Stream = PlainStream | DepthStream | FusedDepthStream


class Block(nn.Module):
    """Pre-norm mixer and MLP sublayers, whose outputs come multiplied by the residual scaling, base depth over depth."""

    def __init__(
        self,
        mixer: Attention | DeltaAttention,
        mlp: MLP,
        width: int,
        eps: float,
        depth_mix: bool,
    ):
        super().__init__()
        self.mixer_norm, self.mixer = Norm(width, eps), mixer
        self.mlp_norm, self.mlp = Norm(width, eps), mlp
        self.mixer_query = DepthQuery(width) if depth_mix else None
        self.mlp_query = DepthQuery(width) if depth_mix else None

    def forward(self, stream: Stream, tokens: Tensor, segments: Segments, rotary: Rotary) -> Stream:
        """Reads the stream twice and adds to it twice."""
        x, stream = stream.read(self.mixer_query, self.mixer_norm, self.mixer.input.rounding())
        if isinstance(self.mixer, Attention):
            y = self.mixer(x, tokens, segments, rotary)
        else:
            y = self.mixer(x, tokens, segments)
        x, stream = stream.add(y).read(self.mlp_query, self.mlp_norm, self.mlp.rounding())
        return stream.add(self.mlp(x))
