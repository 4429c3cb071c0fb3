"""FlexAttention (arXiv 2412.05496): PyTorch's generated kernel, told by a block mask which tiles hold visible keys.

What a query sees is one stretch of its row, from a first key up to itself, and that first key never moves back along the row.
So the mask needs one integer a query, and the tiles follow from the stretches' ends: no T x T mask is ever made. All windows
share one kernel.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dwslm.ops.segments import Segments

TILE = 128  # queries and keys of a tile


def attention_flex(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """See `attention`. The mask is made once a batch and window, and kept on `segments` for the other layers."""
    mask = segments.masks.get(window)
    if mask is None:
        mask = segments.masks[window] = block_mask(segments, window)

    def by_row(x: Tensor) -> Tensor:
        return x.unflatten(0, (segments.rows, segments.context)).transpose(1, 2)

    run: Callable[..., Tensor]
    if torch.compiler.is_compiling():
        run = flex_attention
    else:
        run = _compiled()  # uncompiled it would write out all the scores
    out = run(by_row(q), by_row(k), by_row(v), block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # fullgraph: one shape too many is an error; without it, it would be an uncompiled call.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def block_mask(segments: Segments, window: int | None) -> BlockMask:
    """Tiles with something to see, per row and query tile: the wholly visible ones apart from those to be masked.

    Args:
        segments: boundaries.
        window: tokens that a query sees, itself included; None for all before it in its segment.
    """
    context = segments.context
    first, *lists = _tiles(segments.positions, context, context if window is None else window)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[row, query])

    a, b, c, d, e, f, g, h = lists
    return BlockMask((context, context), a, b, c, d, e, f, g, h, (TILE, TILE), visible)


# An operator, so that the compiler takes its results as they are: traced, they are formulas to it, and its attention kernel
# then reads something else (21 % off on an H200 with torch 2.11).
@torch.library.custom_op("dwslm::flex_tiles", mutates_args=())
def _tiles(positions: Tensor, context: int, window: int) -> list[Tensor]:
    """int32: the first key that each query sees [rows, context], then counts [rows, 1, tiles] and indices [rows, 1, tiles, tiles]
    of key tiles by query tile, to be masked and wholly visible, and of query tiles by key tile, the same two."""
    index = torch.arange(context, device=positions.device)
    first = torch.maximum(index - positions.view(-1, context), index - (window - 1))

    own = torch.arange(-(-context // TILE), device=index.device)  # a query tile's own number, and that of its key tile
    start = own * TILE
    lowest = first[:, start]  # of the tile's first query
    highest = first[:, (start + TILE - 1).clamp(max=context - 1)]  # of its last
    seen = lowest.clamp(min=0) // TILE  # first key tile with a visible key; all up to `own` have one
    whole = torch.minimum((highest + TILE - 1) // TILE, own)  # first that all of its queries see wholly; else `own`
    # To be masked: seen .. whole - 1, then `own`. Wholly visible: whole .. own - 1.
    masked = whole - seen
    offset = own.expand(len(first), own.numel(), own.numel())  # the place in a list of tiles
    masked_keys = torch.where(offset < masked[..., None], seen[..., None] + offset, own[:, None])
    whole_keys = torch.minimum(whole[..., None] + offset, own[:, None])

    # The same seen from a key tile, for its gradient. Neither first visible tile moves back along the row, so both kinds of
    # query tile are stretches: wholly seeing ones right after the key tile's own number, then those to be masked.
    seeing = (seen[:, None, :] <= own[:, None]).sum(
        -1
    )  # query tiles before this number see the key tile, or lie before it
    wholly = (whole[:, None, :] <= own[:, None]).sum(-1)
    masked_queries = torch.where(offset == 0, own[:, None], wholly[..., None] + offset - 1).clamp(max=own.numel() - 1)
    whole_queries = (own[:, None] + 1 + offset).clamp(max=own.numel() - 1)
    lists = (
        masked + 1,
        masked_keys,
        own - whole,
        whole_keys,
        seeing - wholly + 1,
        masked_queries,
        wholly - own - 1,
        whole_queries,
    )
    return [first.int(), *(x.int()[:, None].contiguous() for x in lists)]


@_tiles.register_fake
def _(positions: Tensor, context: int, window: int) -> list[Tensor]:
    rows, tiles = positions.shape[0] // context, -(-context // TILE)
    sizes = [(rows, context), *[(rows, 1, tiles), (rows, 1, tiles, tiles)] * 4]
    return [positions.new_empty(size, dtype=torch.int32) for size in sizes]
