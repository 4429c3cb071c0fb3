"""What a run is going to do, derived once from its settings: steps, rows, rates, and when it saves and scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dwslm.data.packing_settings import Rung, first_step
from dwslm.optim.schedule import learning_rate, schedule
from dwslm.optim.settings import OptimSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.micro_batch import candidates
from dwslm.train.settings import AUTO, TrainSettings


@dataclass(frozen=True)
class Plan:
    """Derived figures of a run.

    Attributes:
        steps: optimizer steps in all.
        batch_tokens: token slots a step, on all ranks together.
        world: processes that share a step.
        grad_accum: micro-batches a step and process.
        rungs: (first step, slots in a row) of each rung of the context ladder; one that begins with 0 where there is none.
        micro_batch_tokens: slots of a micro-batch, on every rung.
        lr: peak learning rate of the matrices.
        save_stride, score_stride: a checkpoint is written, and the held-out set scored, after every so many steps; 0 for never.
            Both happen after the last step too, and whatever is scored is saved first.
        pins: step -> reason for keeping its checkpoint.
    """

    steps: int
    batch_tokens: int
    grad_accum: int
    micro_batch_tokens: int
    world: int
    rungs: tuple[tuple[int, int], ...]
    lr: float
    save_stride: int
    score_stride: int
    pins: dict[int, str]
    optim: OptimSettings

    @property
    def context(self) -> int:
        """Slots in a row at the end of the run: what the model is scored at."""
        return self.rungs[-1][1]

    @property
    def tokens(self) -> int:
        """Token slots in all, whole steps."""
        return self.steps * self.batch_tokens

    def with_micro_batch(self, tokens: int) -> "Plan":
        """The same plan in other micro-batches: one of its `candidates`."""
        return replace(self, micro_batch_tokens=tokens, grad_accum=self.batch_tokens // (self.world * tokens))

    def candidates(self) -> list[int]:
        """Micro-batches that it may be done in, largest first; see `dwslm.train.micro_batch`."""
        return candidates(self.batch_tokens, [context for _, context in self.rungs], self.world)

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
    ladder: Sequence[Rung] = (),
    world: int = 1,
) -> Plan:
    """Derives the plan. With `auto` its micro-batch is the smallest candidate, until somebody who knows the device says more.

    Args:
        context: slots in a row of the packed data.
        lr: peak rate that a resumed run keeps; None takes it from the settings or the law.
        ladder: rungs with longer rows.
        world: processes that share each step.

    Raises:
        ValueError: where the sizes do not divide, or no learning rate can be derived.
    """
    micro_batch = _micro_batch(train, [context, *(rung.context for rung in ladder)], world, begun=lr is not None)
    steps = -(-train.tokens // train.batch_tokens)

    def stride(tokens: int) -> int:
        return max(1, tokens // train.batch_tokens)

    pins = {first_step(f, steps): f"at-{100 * f:g}-percent" for f in checkpoint.pin_fractions}
    return Plan(
        steps=steps,
        batch_tokens=train.batch_tokens,
        grad_accum=train.batch_tokens // (world * micro_batch),
        micro_batch_tokens=micro_batch,
        world=world,
        rungs=((0, context), *((first_step(rung.start, steps), rung.context) for rung in ladder)),
        lr=lr if lr is not None else learning_rate(steps * train.batch_tokens, train.batch_tokens, optim),
        save_stride=stride(checkpoint.every_tokens),
        score_stride=stride(train.eval_every_tokens) if train.eval_every_tokens else 0,
        pins=pins,
        optim=optim,
    )


def _micro_batch(train: TrainSettings, contexts: list[int], world: int, begun: bool) -> int:
    """Checked against everything that it must divide or be divided by. begun: whether the batch may no longer change."""
    if train.micro_batch_tokens == AUTO:
        sizes = candidates(train.batch_tokens, contexts, world)
        if not sizes:
            row = math.lcm(*contexts)
            way = f"take ranks that divide its {train.batch_tokens // row} rows"
            if not begun:
                way = f"make it a multiple of {world * row}, or take other ranks"
            raise ValueError(
                f"train.micro_batch_tokens=auto finds none: train.batch_tokens={train.batch_tokens} can't be dealt to {world} "
                f"ranks in whole rows of context {' and '.join(map(str, contexts))}; {way}"
            )
        return sizes[-1]
    tokens = int(train.micro_batch_tokens)
    for slots in contexts:
        if tokens % slots:
            raise ValueError(f"train.micro_batch_tokens={tokens} is not a multiple of the context {slots}")
    if train.batch_tokens % (world * tokens):
        raise ValueError(
            f"train.batch_tokens={train.batch_tokens} can't be dealt to {world} ranks in micro-batches of "
            f"train.micro_batch_tokens={tokens}: their product {world * tokens} must divide "
            "it; make the micro-batch smaller, or take fewer ranks"
        )
    return tokens
