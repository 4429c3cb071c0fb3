"""Ranks that are threads of one process: the optimizer's collectives without a launcher or a backend."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Table:
    """Where the ranks of one world meet: each lays down a tensor, and all see all of them."""

    def __init__(self, world: int):
        self.world = world
        self.barrier = threading.Barrier(world, timeout=120)
        self.laid: list[Tensor] = [torch.empty(0)] * world

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.laid[rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.laid)
        self.barrier.wait()
        return found


class ThreadRanks:
    """What the optimizer asks of its ranks."""

    def __init__(self, rank: int, table: Table):
        self.rank, self.world, self.table = rank, table.world, table
        self.sent: list[int] = []

    def sum(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.table.exchange(self.rank, tensor)).sum(0))

    def scatter_sum(self, flat: Tensor) -> None:
        assert len(flat) % self.world == 0
        self.sent.append(len(flat))
        share = len(flat) // self.world
        total = torch.stack(self.table.exchange(self.rank, flat)).sum(0)
        flat.fill_(torch.nan)  # the rest is undefined: nobody may count on it
        flat[self.rank * share : (self.rank + 1) * share] = total[self.rank * share : (self.rank + 1) * share]

    def gather(self, flat: Tensor) -> None:
        share = len(flat) // self.world
        for rank, theirs in enumerate(self.table.exchange(self.rank, flat)):
            flat[rank * share : (rank + 1) * share] = theirs[rank * share : (rank + 1) * share]


def on_ranks(world: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Results of `work`, by rank; the first error of any is raised."""
    table, results, errors = Table(world), [None] * world, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, table))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results
