"""The gradients of all parameters added to their float32 sums by one kernel, in Triton.

PyTorch fuses a list of additions only where all of it has one dtype; bfloat16 gradients and float32 sums take a launch each, and
reach a third of the memory's rate. The same bits come out: each sum is one float32 addition.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements that a program adds."""
LISTED = 128
"""Tensors whose addresses one launch writes down: a kernel's arguments have room for 4 KB."""


@triton.jit
def _gradient_addresses_kernel(tensors, table, COUNT: tl.constexpr):
    """Where tensors lie, as integers on the device: arguments of a kernel are part of a recording, a copy is not.

    The attention residuals have the same under another name: here no operator stands around it, so a profile goes by the name.
    """
    for i in tl.static_range(COUNT):
        tl.store(table + i, tensors[i].to(tl.int64))


@triton.jit
def _gradient_add_kernel(
    addresses, pieces, sums, like, GRADIENTS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr
):
    """GRADIENTS: bytes that all addresses are a multiple of; SUMS: elements that all places in `sums` are a multiple of."""
    piece = pieces + tl.program_id(0) * 4
    which, first, place, count = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    gradient = tl.load(addresses + which).to(tl.pointer_type(like.dtype.element_ty))
    gradient, sums = (
        tl.multiple_of(gradient, GRADIENTS) + tl.multiple_of(first, BLOCK),
        sums + tl.multiple_of(place, SUMS),
    )
    i = tl.arange(0, BLOCK)
    if count == BLOCK:  # without a mask, which would have elements moved one by one
        tl.store(sums + i, tl.load(sums + i) + tl.load(gradient + i).to(tl.float32))
    else:
        inside = i < count
        more = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums + i, tl.load(sums + i, mask=inside, other=0.0) + more, mask=inside)


class Adder:
    """Adds tensors of one dtype to their places in a flat float32 buffer. No place may overlap another.

    Attributes:
        places: (first element, number of elements) of each in the buffer.
    """

    def __init__(self, sums: Tensor, places: Sequence[tuple[int, int]]):
        self.sums, self.places = sums, list(places)
        pieces = [
            (which, first, place + first, min(BLOCK, size - first))
            for which, (place, size) in enumerate(places)
            for first in range(0, size, BLOCK)
        ]
        self._pieces = torch.tensor(pieces, dtype=torch.int64, device=sums.device)
        self._multiple = 4 if all(place % 4 == 0 for place, _ in places) else 1
        self._addresses = torch.empty(len(places), dtype=torch.int64, device=sums.device)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """gradients: one a place, on the buffer's device, of as many elements.

        Raises ValueError for others: the kernel would read memory of somebody else.
        """
        if [gradient.numel() for gradient in gradients] != [size for _, size in self.places]:
            raise ValueError("gradients to be added must be as many and as large as their places")
        dense = [gradient.contiguous() for gradient in gradients]
        for start in range(0, len(dense), LISTED):
            some = tuple(dense[start : start + LISTED])
            _gradient_addresses_kernel[(1,)](some, self._addresses[start:], COUNT=len(some))
        width = 16 if all(gradient.data_ptr() % 16 == 0 for gradient in dense) else dense[0].element_size()
        _gradient_add_kernel[(len(self._pieces),)](
            self._addresses, self._pieces, self.sums, dense[0],
            GRADIENTS=width, SUMS=self._multiple, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
