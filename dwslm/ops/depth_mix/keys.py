"""The keys of all readers as one operator: a compiler would make a kernel for each of them, and as many for their gradients."""

from typing import Any

import torch
from torch import Tensor


def reader_keys(queries: list[Tensor], gains: list[Tensor]) -> Tensor:
    """Query times key gain of every reader, float32 [readers, width] out of [width] each."""
    return _keys(queries, gains)


@torch.library.custom_op("dwslm::depth_keys", mutates_args=())
def _keys(queries: list[Tensor], gains: list[Tensor]) -> Tensor:
    return torch.stack(queries) * torch.stack(gains)


@_keys.register_fake
def _(queries: list[Tensor], gains: list[Tensor]) -> Tensor:
    return queries[0].new_empty(len(queries), len(queries[0]))


@torch.library.custom_op("dwslm::depth_keys_backward", mutates_args=())
def _keys_backward(dkeys: Tensor, queries: list[Tensor], gains: list[Tensor]) -> tuple[Tensor, Tensor]:
    return dkeys * torch.stack(gains), dkeys * torch.stack(queries)


@_keys_backward.register_fake
def _(dkeys: Tensor, queries: list[Tensor], gains: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dkeys), torch.empty_like(dkeys)


def _keys_save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _keys_differentiate(ctx: Any, dkeys: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    both = list(ctx.saved_tensors)
    dqueries, dgains = _keys_backward(dkeys.contiguous(), both[: len(both) // 2], both[len(both) // 2 :])
    return list(dqueries.unbind()), list(dgains.unbind())


_keys.register_autograd(_keys_differentiate, setup_context=_keys_save)
