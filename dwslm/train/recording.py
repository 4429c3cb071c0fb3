"""The parts of a step as CUDA graphs: launched once, then recorded, then replayed.

A replay costs the host next to nothing and leaves no gaps between kernels. It does what was recorded, at the addresses of the
recording, so whatever differs from step to step lies in buffers that stay where they are.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage is collected now and not in here. It may hold the graphs of an earlier step, of another context, and to
    free those invalidates a recording."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Recorder:
    """Graphs of functions without arguments that work on fixed buffers, by key.

    The first run of a key is launched kernel by kernel, since compilers, tuning and libraries' scratch belong outside a
    graph; the second is recorded and replayed, those after it are replayed. Launched or recorded, all share one pool of
    memory on one stream: what a function allocates is free again after it, so a pool holds what the largest of them needs, once,
    and the scratch that libraries keep.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.MemPool()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work in here is queued after what the caller has queued, and what the caller queues later comes after it."""
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        # Gradients are made by a thread of their own otherwise, which neither the pool nor a recording reaches.
        with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
            yield
        outside.wait_stream(self._stream)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call inside `stream`. A function must do the same for the same key whenever it is called."""
        if key not in self._graphs:
            with torch.cuda.use_mem_pool(self._pool, self._stream.device):
                function()
            self._graphs[key] = None
            return
        graph = self._graphs[key]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads pin batches and write checkpoints meanwhile, which a stricter mode would take for errors.
            pool: Any = self._pool.id  # a pair of numbers, which torch's annotations know under another name
            with (
                no_collection(),
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                function()
            self._graphs[key] = graph
        graph.replay()
