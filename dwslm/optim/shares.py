"""Which rank updates what: every block dealt to one rank, long tables cut by rows, and where it lies in flat buffers.

A matrix that its rule sees as a whole stays whole. With one rank its share is everything, in the order of the blocks.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dwslm.ops import choice

from .groups import MATRIX_RULES, Block

ALIGNMENT = 32  # elements: blocks of a flat buffer start at 128-byte multiples, so that kernels load vectors
NEWTON_SCHULZ_RULES = ("muonh", "muon")
# An element of a matrix of this smaller side costs as much to orthogonalise as to send and update: five steps take about
# 22 x side operations an element. At 600 Tflop/s of products and 350 GB/s between ranks.
EQUAL_COST_SIDE = 700
LARGE = 1 << 20
"""Elements from which on moving a tensor takes longer than launching a kernel for it."""
LEAST_ROWS_ELEMENTS = 1024  # a table is not cut into pieces smaller than this


class Ranks(Protocol):
    """What the optimizer asks of the processes that train together. All of it works in place, queued on the device."""

    rank: int
    world: int

    def sum(self, tensor: Tensor) -> None:
        """Adds up a tensor over the ranks; all get the same bits."""

    def scatter_sum(self, flat: Tensor) -> None:
        """Of [world x share]: the rank's own share becomes the sum over the ranks, the rest is undefined."""

    def gather(self, flat: Tensor) -> None:
        """Of [world x share]: fills in the shares of the other ranks."""


@dataclass(frozen=True)
class Place:
    """Where a block lies in a flat buffer [world x share]."""

    rank: int
    block: Block
    offset: int
    """In elements, from the beginning of the whole buffer."""

    def of(self, flat: Tensor) -> Tensor:
        """View of the block, in its shape."""
        shape = torch.Size(self.block.shape)
        return flat[self.offset : self.offset + shape.numel()].view(shape)


def adder(flat: Tensor, places: Sequence[Place]) -> Callable[[list[Tensor]], None]:
    """What adds one tensor a place, all of one dtype, to a flat float32 buffer."""
    if choice.misfit(flat.device) is None:
        from .accumulate import Adder  # Triton is there on GPU machines only

        return Adder(flat, [(place.offset, math.prod(place.block.shape)) for place in places])
    return partial(torch._foreach_add_, [place.of(flat) for place in places])


def alike(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks that one group can hold together."""
    found: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        elements = torch.Size(block.shape).numel()
        shape = block.shape if block.rule in MATRIX_RULES else elements >= LARGE
        found.setdefault((block.rule, shape, block.lr_factor, block.weight_decay), []).append(block)
    return list(found.values())


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def offsets(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Where each block of a group begins in its flat slice, and the slice's size; a stack has no gaps."""
    gaps = blocks[0].rule not in MATRIX_RULES
    begins, size = [], 0
    for block in blocks:
        begins.append(size)
        elements = torch.Size(block.shape).numel()
        size += aligned(elements) if gaps else elements
    return begins, size


def lay_out(blocks: Sequence[Block]) -> tuple[list[tuple[list[Block], int, list[int], int]], int]:
    """The groups of one share as (blocks, start, offsets, size), and the share's size; the same for all who know the blocks."""
    groups: list[tuple[list[Block], int, list[int], int]] = []
    end = 0
    for group in alike(blocks):
        start = aligned(end)
        begins, size = offsets(group)
        groups.append((group, start, begins, size))
        end = start + size
    return groups, end


def deal(blocks: Sequence[Block], world: int) -> list[list[Block]]:
    """The blocks of each rank; a share may be empty. Every rank finds the same.

    Most costly first, always to the rank that has least: what a block costs is sending and updating it, and
    orthogonalising it where its rule does.
    """
    if world == 1:
        return [list(blocks)]
    pieces = [piece for block in blocks for piece in cut(block, world)]
    order = sorted(range(len(pieces)), key=lambda i: (-_cost(pieces[i]), i))
    loads, owner = [0.0] * world, [0] * len(pieces)
    for i in order:
        rank = min(range(world), key=lambda r: (loads[r], r))
        owner[i] = rank
        loads[rank] += _cost(pieces[i])
    return [[piece for piece, of in zip(pieces, owner, strict=True) if of == rank] for rank in range(world)]


def cut(block: Block, world: int) -> list[Block]:
    """A block as it is, or in `world` runs of rows where its rule goes element by element and it is long enough.

    A run of rows is named "<block>@<its first row in the block>".
    """
    elements = torch.Size(block.shape).numel()
    if block.rule in MATRIX_RULES or not block.shape or block.shape[0] < world:
        return [block]
    if elements < world * LEAST_ROWS_ELEMENTS:
        return [block]
    begins = [block.shape[0] * r // world for r in range(world + 1)]
    return [
        replace(block, name=f"{block.name}@{a}", start=block.start + a, shape=(b - a, *block.shape[1:]))
        for a, b in zip(begins, begins[1:], strict=False)
    ]


def _cost(block: Block) -> float:
    elements = torch.Size(block.shape).numel()
    return elements * (1 + min(block.shape) / EQUAL_COST_SIDE if block.rule in NEWTON_SCHULZ_RULES else 1)


def part_of(state: Mapping[str, Tensor], name: str, part: Tensor) -> Tensor:
    """What belongs into `part`, a rank's own piece of state called `name`, out of the state of whole blocks."""
    whole, first = _whole(name)
    return state[whole] if first is None else state[whole][first : first + len(part)]


def join(shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of whole blocks out of every rank's. Raises ValueError where rows are missing or there twice."""
    joined: dict[str, Tensor] = {}
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for share in shares:
        for name, tensor in share.items():
            whole, first = _whole(name)
            if first is not None:
                pieces.setdefault(whole, []).append((first, tensor))
            elif joined.setdefault(whole, tensor) is not tensor:
                raise ValueError(f"{name} is in the files of two ranks")
    for name, parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        end = 0
        for first, tensor in parts:
            if first != end or name in joined:
                raise ValueError(f"rows {end} to {first} of {name} are in no rank's file, or in two")
            end += len(tensor)
        joined[name] = torch.cat([tensor for _, tensor in parts])
    return joined


def _whole(name: str) -> tuple[str, int | None]:
    """ "a.weight@8.momentum" as ("a.weight.momentum", 8); another name as it is, with None."""
    match = re.fullmatch(r"(.+)@(\d+)(\.\w+)", name)
    return (match[1] + match[3], int(match[2])) if match else (name, None)


@dataclass(frozen=True)
class Mail:
    """One exchange of compute copies: those of one dtype, packed by owner into a flat buffer. Views throughout."""

    flat: Tensor
    """[world x share]"""
    sent: list[Tensor]
    """Places of the rank's own blocks in `flat`, filled from `sent_from`, the parameters."""
    sent_from: list[Tensor]
    received: list[Tensor]
    """Places of the others' blocks, which go into `received_by`."""
    received_by: list[Tensor]


Packed = list[tuple[list[Block], list[int]]]


def _packed(shares: Sequence[Sequence[Block]], params: Mapping[str, Tensor]) -> dict[torch.dtype, tuple[Packed, int]]:
    """For each dtype of parameters: every rank's blocks of it, where each begins in the rank's share, and the share's size."""
    packed = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in params.values()):
        held = [[block for block in blocks if params[block.parameter].dtype == dtype] for blocks in shares]
        ends = [[0, *accumulate(aligned(torch.Size(b.shape).numel()) for b in blocks)] for blocks in held]
        of_ranks = [(blocks, begins[:-1]) for blocks, begins in zip(held, ends, strict=True)]
        packed[dtype] = of_ranks, max(end[-1] for end in ends)
    return packed


def mail_bytes(shares: Sequence[Sequence[Block]], params: Mapping[str, Tensor]) -> int:
    """What the largest exchange needs; more than the gradients where these lie in stacks, which have no gaps."""
    sizes = [share * dtype.itemsize for dtype, (_, share) in _packed(shares, params).items()]
    return len(shares) * max(sizes, default=0)


def make_mail(shares: Sequence[Sequence[Block]], rank: int, params: Mapping[str, Tensor], memory: Tensor) -> list[Mail]:
    """An exchange for each dtype of parameters. memory: float32, `mail_bytes` of it or more, free when copies are sent."""
    mails = []
    for dtype, (held, share) in _packed(shares, params).items():
        flat = memory.view(dtype)[: len(shares) * share]
        # A slice that is too short would be no error by itself, and the ranks' models would come apart.
        assert len(flat) == len(shares) * share, (
            f"{memory.nbytes} bytes for copies that need {mail_bytes(shares, params)}"
        )
        mail = Mail(flat, [], [], [], [])
        for owner, (blocks, begins) in enumerate(held):
            for block, begin in zip(blocks, begins, strict=True):
                place, copy = Place(owner, block, owner * share + begin), block.of(params[block.parameter].detach())
                here, there = (mail.sent, mail.sent_from) if owner == rank else (mail.received, mail.received_by)
                here.append(place.of(flat))
                there.append(copy)
        mails.append(mail)
    return mails
