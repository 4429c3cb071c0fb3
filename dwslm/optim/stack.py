"""Blocks that are updated together: their masters and their state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .groups import MATRIX_RULES, STATE, Block


@dataclass
class Group:
    """Blocks updated together: a stack of same-shaped matrices, or any shapes under an elementwise rule.

    Its gradient is one flat float32 buffer where block i starts at offsets[i]; a stack has no gaps.
    """

    blocks: list[Block]
    start: int
    """Of its slice in the optimizer's own share of the gradient."""
    size: int
    offsets: list[int]
    masters: list[Tensor]
    """One a block, in its shape: a view of `stack`, the parameter itself (`in_place`), or a separate copy."""
    stack: Tensor | None
    """float32 [N, m, n], for a rule that sees whole matrices."""
    state: dict[str, Tensor]
    """Kind -> float32 [N, m, n] (radius: [N]) for a stack, [size] laid out as the gradient otherwise."""

    @property
    def rule(self) -> str:
        return self.blocks[0].rule

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat [size] buffer, one a block, in its shape."""
        shapes = [torch.Size(block.shape) for block in self.blocks]
        return [flat[o : o + s.numel()].view(s) for o, s in zip(self.offsets, shapes, strict=True)]

    def changing(self) -> list[Tensor]:
        """What a step rewrites: weights, then state, but for the radius."""
        weights = self.masters if self.stack is None else [self.stack]
        return [*weights, *(tensor for kind, tensor in self.state.items() if kind != "radius")]

    def block_state(self) -> dict[str, Tensor]:
        """Views of the state, keyed "<block name>.<kind>"; a radius is 0-D."""
        views: dict[str, Tensor] = {}
        for kind, buffer in self.state.items():
            pieces = self.pieces(buffer) if self.stack is None else list(buffer)
            views |= {f"{block.name}.{kind}": piece for block, piece in zip(self.blocks, pieces, strict=True)}
        return views


def make_group(
    blocks: Sequence[Block], params: Mapping[str, torch.nn.Parameter], start: int, offsets: list[int], size: int
) -> Group:
    """The group of these blocks, masters taken from the parameters, state zero."""
    device = params[blocks[0].parameter].device
    values = [block.of(params[block.parameter].detach()) for block in blocks]
    stack = None
    if blocks[0].rule in MATRIX_RULES:
        stack = torch.stack([value.float() for value in values])
        masters = list(stack)
    else:
        masters = [
            value if block.in_place else value.to(torch.float32, copy=True)
            for block, value in zip(blocks, values, strict=True)
        ]
    shape = (size,) if stack is None else stack.shape
    state = {
        kind: torch.zeros(len(blocks) if kind == "radius" else shape, device=device) for kind in STATE[blocks[0].rule]
    }
    return Group(list(blocks), start, size, offsets, masters, stack, state)
