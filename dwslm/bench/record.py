"""Recording: an operation as a CUDA graph over fixed buffers, replayed with other inputs and other boundaries.

What is checked is the same for any recording: fill the buffers, replay, compare with a run that was never recorded, bit for bit.
So the check takes a recorder, and a test can give it one that remembers old boundaries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dwslm.bench.gate import equal

Values = dict[str, Tensor | None]
Step = Callable[[Sequence[Tensor], Tensor], Values]
"""Inputs and `cu_seqlens` to outputs and gradients; must derive everything from what these tensors hold when it runs."""
Recorder = Callable[[Callable[[], Values]], Callable[[], Values]]
"""A step over fixed buffers to what replays it."""
Batch = tuple[Sequence[Tensor], Tensor]

WARM_UP = 3
LEAST_BATCHES = 3


@dataclass(frozen=True)
class Buffers:
    """Inputs and boundaries at fixed addresses."""

    inputs: list[Tensor]
    cu_seqlens: Tensor

    @classmethod
    def like(cls, batch: Batch) -> "Buffers":
        inputs, cu_seqlens = batch
        return cls([x.detach().clone() for x in inputs], cu_seqlens.clone())

    def load(self, batch: Batch) -> None:
        """Copies a batch of the same shapes in."""
        inputs, cu_seqlens = batch
        for buffer, x in zip(self.inputs, inputs, strict=True):
            buffer.copy_(x)
        self.cu_seqlens.copy_(cu_seqlens)


def record_cuda(step: Callable[[], Values]) -> Callable[[], Values]:
    """Records `step` as one CUDA graph after warming up on the stream it is recorded on.

    The outputs are the graph's own memory: each replay writes over them.
    """
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    before.wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            values = step()
    except BaseException:
        torch.cuda.set_stream(before)  # a recording that breaks off leaves its own stream behind
        raise

    def replay() -> Values:
        graph.replay()
        return values

    return replay


def check_replay(recorder: Recorder, step: Step, batches: Sequence[Batch]) -> list[str]:
    """Replays a recording over all batches, the first one last, and compares with unrecorded runs.

    Args:
        recorder: `record_cuda`, or any other.
        step: what is recorded.
        batches: at least `LEAST_BATCHES`, of equal shapes, with different boundaries.

    Returns:
        What differed, one line each; empty if every bit is the same.
    """
    assert len(batches) >= LEAST_BATCHES
    buffers = Buffers.like(batches[0])
    replay = recorder(lambda: step(buffers.inputs, buffers.cu_seqlens))
    differences = []
    for i in [*range(1, len(batches)), 0]:
        buffers.load(batches[i])
        got = {name: None if x is None else x.clone() for name, x in replay().items()}
        want = step(*batches[i])
        for name, value in want.items():
            if not equal(value, got[name]):
                differences.append(f"{name} on batch {i + 1}")
    return differences


def check_padding(step: Step, batch: Batch, more: int) -> list[str]:
    """Names of outputs and gradients whose bits `more` empty segments at the end change."""
    inputs, cu_seqlens = batch
    padded = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(more)])
    plain, other = step(inputs, cu_seqlens), step(inputs, padded)
    return [name for name in plain if not equal(plain[name], other[name])]
