"""One optimizer step: micro-batches forward and backward, then the update."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dwslm.data.batch import IGNORE
from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.model.lm import LanguageModel
from dwslm.optim.optimizer import Optimizer
from dwslm.train.compiling import prepare_compiler
from dwslm.train.guard import Guard
from dwslm.train.recording import Recorder

# Padded strides would have to be copied away before every kernel that is not the compiler's own.
INDUCTOR: dict[str, Any] = {"comprehensive_padding": False}
SLOTS = 64
"""A micro-batch is run with its segments' number rounded up to this, twice this, four times this and so on: some kernels are paid
by the slot, empty or not, and some libraries keep scratch for each number of slots that they have seen."""


class TrainStep:
    """Runs steps in fixed buffers on the device, so that every step has the same shapes at the same addresses.

    Nothing here waits for the device: loss and gradient norm come back as 0-D tensors on it.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: Optimizer,
        rows: int,
        context: int,
        slots: int,
        *,
        compile: bool,
        record: bool | None = False,
        guard: Guard | None = None,
    ):
        """slots: entries of a batch's `cu_seqlens` less one; rows x context is the micro-batch. record: replay the step as CUDA
        graphs; None does where it is compiled for a GPU. guard: decides which steps are taken; without one, all whose gradient
        is finite.

        Raises:
            ValueError: for `record` without a GPU.
        """
        device = model.embedding.weight.device
        if record and device.type != "cuda":
            raise ValueError(
                f"train.record=true needs an NVIDIA GPU, and the model is on {device}: set train.record=null"
            )
        self.model, self.optimizer, self.context, self.guard = model, optimizer, context, guard
        self.tokens = torch.zeros(rows * context, dtype=torch.int64, device=device)
        self.targets = torch.full((rows * context,), IGNORE, dtype=torch.int64, device=device)
        self.cu_seqlens = torch.full((slots + 1,), rows * context, dtype=torch.int32, device=device)
        self.rate = torch.zeros((), device=device)
        self.scored = torch.ones((), device=device)
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.recorder = Recorder(device) if record or (record is None and compile and device.type == "cuda") else None
        # The loss head stays outside: it makes its own gradients chunk by chunk. Scoring takes the model as it is.
        self.hidden: Callable[..., Tensor] = model.hidden
        # Compilers find out at the first step whether all of it can be one graph (`fullgraph`), and have seen all shapes then.
        self.stance: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.after_first = partial(torch.compiler.set_stance, "fail_on_recompile") if compile else nullcontext
        if compile:
            prepare_compiler()
            self.hidden = torch.compile(model.hidden, fullgraph=True, dynamic=False, options=INDUCTOR)

    def micro_batch(self, batch: TorchBatch) -> None:
        """Forward, backward, and the gradients into the optimizer's accumulators."""
        self.tokens.copy_(batch.tokens, non_blocking=True)
        self.targets.copy_(batch.targets, non_blocking=True)
        self.cu_seqlens.copy_(batch.cu_seqlens, non_blocking=True)
        slots = slots_needed(batch.cu_seqlens)
        self._do(("micro-batch", slots), lambda: self._forward_backward(slots))

    def _forward_backward(self, slots: int) -> None:
        cu_seqlens = self.cu_seqlens[: slots + 1]
        if self.cu_seqlens.shape[0] > SLOTS + 1:
            torch._dynamo.mark_dynamic(cu_seqlens, 0)  # one compilation for any number of slots
        # Divided by the whole batch's count, not the micro-batch's: accumulation must not change the mean.
        hidden = self.hidden(self.tokens, cu_seqlens, self.context)
        loss = self.model.loss(hidden, self.targets) / self.scored
        loss.backward()
        self.model.note_peaks()
        self.loss += loss.detach()
        self.optimizer.accumulate()

    def update(self) -> Tensor:
        """The optimizer's step, if the guard lets it. Returns the gradient norm before clipping, overwritten by the next."""
        ranks = self.optimizer.ranks
        if ranks is None:
            self._do("update", self._update)
        else:
            ranks.sum(self.loss)
            self._update()  # launched: what travels between machines is no matter for a recording
        return self.norm

    def _update(self) -> None:
        guard = self.guard
        if guard is None:
            self.norm.copy_(self.optimizer.step(self.rate))
            return
        guard.limits()
        norm = self.optimizer.step(self.rate, allowed=guard.allowed(self.loss), norm_limit=guard.norm_limit)
        guard.record(self.loss, norm, self.optimizer.accepted)
        self.norm.copy_(norm)

    def _do(self, key: Hashable, function: Callable[[], None]) -> None:
        if self.recorder is None:
            function()
        else:
            self.recorder.run(key, function)

    def run(self, batch: GlobalBatch, rate: float) -> tuple[Tensor, Tensor]:
        """One step at learning rate `rate`.

        Returns:
            Mean nats a scored token over the global batch, and the gradient norm before clipping: float32, 0-D.

        Raises:
            RuntimeError: where a compiled step would have to compile again after the first.
        """
        with self.stance(), nullcontext() if self.recorder is None else self.recorder.stream():
            self.rate.fill_(rate)
            self.scored.fill_(batch.scored)
            self.loss.zero_()
            for micro_batch in batch.micro_batches:
                self.micro_batch(micro_batch)
            self.update()
        self.stance = self.after_first
        return self.loss.clone(), self.norm.clone()


def slots_needed(cu_seqlens: Tensor) -> int:
    """Slots that a batch is run with, out of those of its `cu_seqlens`, which lies on the CPU."""
    most = len(cu_seqlens) - 1
    used = int(torch.count_nonzero(cu_seqlens[1:] != cu_seqlens[:-1]))
    slots = SLOTS
    while slots < used:
        slots *= 2
    return min(most, slots)
