"""One optimizer step: micro-batches forward and backward, then the update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dwslm.data.batch import IGNORE
from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.model.lm import LanguageModel
from dwslm.optim.optimizer import Optimizer
from dwslm.train.guard import Guard

# Padded strides would have to be copied away before every kernel that is not the compiler's own.
INDUCTOR: dict[str, Any] = {"comprehensive_padding": False}


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
        guard: Guard | None = None,
    ):
        """slots: entries of `cu_seqlens` less one; rows x context is the micro-batch. guard: decides which steps are taken;
        without one, all whose gradient is finite."""
        device = model.embedding.weight.device
        self.model, self.optimizer, self.context, self.guard = model, optimizer, context, guard
        self.tokens = torch.zeros(rows * context, dtype=torch.int64, device=device)
        self.targets = torch.full((rows * context,), IGNORE, dtype=torch.int64, device=device)
        self.cu_seqlens = torch.full((slots + 1,), rows * context, dtype=torch.int32, device=device)
        self.rate = torch.zeros((), device=device)
        self.scored = torch.ones((), device=device)
        self.loss = torch.zeros((), device=device)
        # The loss head stays outside: it makes its own gradients chunk by chunk. Scoring takes the model as it is.
        self.hidden: Callable[..., Tensor] = model.hidden
        # Compilers find out at the first step whether all of it can be one graph (`fullgraph`), and have seen all shapes then.
        self.stance: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.after_first = partial(torch.compiler.set_stance, "fail_on_recompile") if compile else nullcontext
        if compile:
            self.hidden = torch.compile(model.hidden, fullgraph=True, dynamic=False, options=INDUCTOR)

    def micro_batch(self, batch: TorchBatch) -> None:
        """Forward, backward, and the gradients into the optimizer's accumulators."""
        self.tokens.copy_(batch.tokens, non_blocking=True)
        self.targets.copy_(batch.targets, non_blocking=True)
        self.cu_seqlens.copy_(batch.cu_seqlens, non_blocking=True)
        # Divided by the whole batch's count, not the micro-batch's: accumulation must not change the mean.
        hidden = self.hidden(self.tokens, self.cu_seqlens, self.context)
        loss = self.model.loss(hidden, self.targets) / self.scored
        loss.backward()
        self.loss += loss.detach()
        self.optimizer.accumulate()

    def update(self) -> Tensor:
        """The optimizer's step, if the guard lets it. Returns the gradient norm before clipping."""
        guard = self.guard
        if guard is None:
            return self.optimizer.step(self.rate)
        guard.limits()
        norm = self.optimizer.step(self.rate, allowed=guard.allowed(self.loss), norm_limit=guard.norm_limit)
        guard.record(self.loss, norm, self.optimizer.accepted)
        return norm

    def run(self, batch: GlobalBatch, rate: float) -> tuple[Tensor, Tensor]:
        """One step at learning rate `rate`.

        Returns:
            Mean nats a scored token over the global batch, and the gradient norm before clipping: float32, 0-D.

        Raises:
            RuntimeError: where a compiled step would have to compile again after the first.
        """
        self.rate.fill_(rate)
        self.scored.fill_(batch.scored)
        self.loss.zero_()
        with self.stance():
            for micro_batch in batch.micro_batches:
                self.micro_batch(micro_batch)
            norm = self.update()
        self.stance = self.after_first
        return self.loss.clone(), norm
