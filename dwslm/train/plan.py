"""What a run is going to do, derived once from its settings: steps, rows, rates, and when it saves and scores."""

import math
from dataclasses import dataclass

from dwslm.optim.schedule import learning_rate, schedule
from dwslm.optim.settings import OptimSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.settings import TrainSettings


@dataclass(frozen=True)
class Plan:
    """Derived figures of a run.

    Attributes:
        steps: optimizer steps in all.
        batch_tokens: token slots a step.
        grad_accum: micro-batches a step and process.
        micro_batch_rows: rows of `context` in a micro-batch.
        context: slots in a row.
        lr: peak learning rate of the matrices.
        save_stride, score_stride: a checkpoint is written, and the held-out set scored, after every so many steps; 0 for never.
            Both happen after the last step too, and whatever is scored is saved first.
        pins: step -> reason for keeping its checkpoint.
    """

    steps: int
    batch_tokens: int
    grad_accum: int
    micro_batch_rows: int
    context: int
    lr: float
    save_stride: int
    score_stride: int
    pins: dict[int, str]
    optim: OptimSettings

    @property
    def tokens(self) -> int:
        """Token slots in all, whole steps."""
        return self.steps * self.batch_tokens

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` steps."""
        return step in self.pins or self.scores(step) or (step > 0 and step % self.save_stride == 0)

    def scores(self, step: int) -> bool:
        """Whether the held-out set is scored after `step` steps."""
        return step == self.steps or (self.score_stride > 0 and step > 0 and step % self.score_stride == 0)

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, counted from 0; the schedule is taken at the step's middle."""
        return self.lr * schedule((step + 0.5) / self.steps, self.optim)


def make_plan(
    train: TrainSettings,
    optim: OptimSettings,
    checkpoint: CheckpointSettings,
    context: int,
    lr: float | None = None,
) -> Plan:
    """Derives the plan.

    Args:
        context: slots in a row of the packed data.
        lr: peak rate that a resumed run keeps; None takes it from the settings or the law.

    Raises:
        ValueError: where the sizes do not divide, or no learning rate can be derived.
    """
    if train.micro_batch_tokens % context:
        raise ValueError(
            f"train.micro_batch_tokens={train.micro_batch_tokens} is not a multiple of the context {context}"
        )
    steps = -(-train.tokens // train.batch_tokens)

    def stride(tokens: int) -> int:
        return max(1, tokens // train.batch_tokens)

    # The small number undoes what a fraction like 0.07 of 100 steps is too large by.
    pins = {math.ceil(f * steps - 1e-9): f"at-{100 * f:g}-percent" for f in checkpoint.pin_fractions}
    return Plan(
        steps=steps,
        batch_tokens=train.batch_tokens,
        grad_accum=train.batch_tokens // train.micro_batch_tokens,
        micro_batch_rows=train.micro_batch_tokens // context,
        context=context,
        lr=lr if lr is not None else learning_rate(steps * train.batch_tokens, train.batch_tokens, optim),
        save_stride=stride(checkpoint.every_tokens),
        score_stride=stride(train.eval_every_tokens) if train.eval_every_tokens else 0,
        pins=pins,
        optim=optim,
    )
