"""Document boundaries of a packed batch, in the forms that attention, convolution, recurrence and rotary positions need."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where each token's segment begins. One object serves every op, so that none can forget a boundary.

    Attributes:
        cu_seqlens: int32 [slots + 1], offsets of the segments, non-decreasing from 0 to T. Spare slots at the end are
            empty segments (repeats of T).
        ids: int64 [T], index of the segment that holds each token.
        positions: int64 [T], position of each token inside its segment.
        context: row length; T is a multiple of it and no segment crosses a multiple of it.
        masks: attention masks by window, made by the first layer that wants one for the other layers of this batch.
    """

    cu_seqlens: Tensor
    ids: Tensor
    positions: Tensor
    context: int
    masks: dict[int | None, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def rows(self) -> int:
        return self.ids.shape[0] // self.context


def segments(cu_seqlens: Tensor, tokens: int, context: int) -> Segments:
    """Derives `Segments` from boundaries alone, on their device and without a host wait.

    Args:
        cu_seqlens: int32 [slots + 1]; must cover all tokens.
        tokens: T, the number of tokens in the batch.
        context: row length that divides T.

    Raises:
        ValueError: if `context` does not divide `tokens`.
    """
    if tokens % context:
        raise ValueError(f"a batch of {tokens} tokens is not a whole number of rows of {context}")
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    # right=True steps over empty segments: of several equal offsets the last one owns the token.
    ids = torch.searchsorted(cu_seqlens, index, right=True) - 1
    positions = index.long() - cu_seqlens.long()[ids]
    return Segments(cu_seqlens, ids, positions, context)
