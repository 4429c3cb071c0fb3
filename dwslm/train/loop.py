"""The trainer: from a plan to a finished run, in the order in which things happen."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dwslm.data.loader import GlobalBatch, Loader
from dwslm.data.packing import RowStream
from dwslm.data.shards import Dataset
from dwslm.evaluate.bits_per_byte import EvalSettings, score
from dwslm.evaluate.report import Report, make_report, report_rows
from dwslm.model.lm import LanguageModel
from dwslm.optim.optimizer import Optimizer
from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.runs.writer import RunWriter
from dwslm.train import checkpoint as checkpoints
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.device import RunAhead, peak_flops
from dwslm.train.distributed import Ranks
from dwslm.train.guard import Guard, GuardSettings
from dwslm.train.plan import Plan
from dwslm.train.report import MATRIX_FLOPS, TrainProgress
from dwslm.train.saver import Saver
from dwslm.train.scoring import nats_function
from dwslm.train.settings import TrainSettings
from dwslm.train.signals import Preempted, Signals
from dwslm.train.skips import Skips
from dwslm.train.step import TrainStep


@dataclass
class Position:
    """How far a run is. One row number is all the state that the data has."""

    step: int = 0
    tokens: int = 0
    row: int = 0


class Trainer:
    """Owns what one attempt needs; `train` reads top to bottom.

    Args:
        plan: see `make_plan`.
        settings: train, checkpoint, guard and evaluation settings; `config` is the whole configuration as plain data, which
            goes into every checkpoint.
        model, optimizer: on their device, loaded if this is a resume.
        stream: training rows; `valid`: held-out dataset, None where nothing is scored.
        run, writer: where everything is written.
        signals: open, so that they are noted.
        ranks: those that train this together, None for this process alone. All but the first have a writer and a console
            that keep silent.
        position: where to go on.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        train: TrainSettings,
        checkpoint: CheckpointSettings,
        guard: GuardSettings,
        evaluate: EvalSettings,
        config: Mapping[str, Any],
        model: LanguageModel,
        optimizer: Optimizer,
        stream: RowStream,
        valid: Dataset,
        run: RunFolder,
        writer: RunWriter,
        console: Console,
        signals: Signals,
        position: Position,
        ranks: Ranks | None = None,
    ):
        self.plan, self.settings, self.evaluate = plan, train, evaluate
        self.config, self.model, self.optimizer, self.stream, self.valid = (
            config,
            model,
            optimizer,
            stream,
            valid,
        )
        self.run, self.writer, self.console, self.position = run, writer, console, position
        self.signals, self.ranks = signals, ranks or Ranks()
        self.device = model.embedding.weight.device
        self.guard = Guard(guard, self.device)
        self.skips = Skips(self.guard, writer, console)
        self.saver = Saver(run, writer, console, optimizer, checkpoint, self.ranks)
        self.run_ahead = RunAhead(self.device)
        self.step: TrainStep | None = None
        self.warm = False  # whether this process has run a step
        sizes = model.sizes()
        self.flops_per_token = MATRIX_FLOPS * (sizes["matrices"] + sizes["head"])

    def train(self, *, save_first: bool = False) -> None:
        """Trains to the end of the plan, saving and scoring on the way. Returns once everything is on disk.

        save_first: save before the first step, where the run has something new that a kill must not lose.

        Raises:
            Preempted: where a signal asked it to leave; what was trained is saved.
            FloatingPointError: where too many steps had to be left out and the run may not go back again.
            OSError: where saving failed too often, or at the end.
        """
        plan, position = self.plan, self.position
        with self.saver, TrainProgress(self.console, plan, position.step) as progress:
            if save_first:
                self.save()
            if position.step > 0 and plan.scores(position.step) and not self.ranks.first(self._scored(position.step)):
                self.score()  # killed between the save and the score
            self.saver.wait()
            self._pin_best()  # or between the score and the pin
            while position.step < plan.steps:
                with self._loader() as loader:
                    self._steps(loader, progress)
            self._finish_saving()

    def _steps(self, loader: Loader, progress: TrainProgress) -> None:
        """Steps to the end of the plan, or until the guard has sent the run back: the data then go on elsewhere."""
        plan, position = self.plan, self.position
        since, reported = time.perf_counter(), position.step
        for number in range(position.step, plan.steps):
            batch = self.run_ahead.timed("data", loader.__next__)
            rate = plan.rate(number)
            if self._new_phase(batch.first_row, batch.next_row):
                self.guard.restart()
            step = self._step(batch)
            # The first step compiles, which may take minutes and leaves nothing to save.
            with nullcontext() if self.warm else self.signals.at_once():
                step.run(batch, rate)
            self.warm = True
            self.ranks.compiling(False)
            self.run_ahead.wait()
            position.step, position.row = number + 1, batch.next_row
            position.tokens += plan.batch_tokens
            self.skips.note(position.step, position.tokens, batch)

            report = position.step % self.settings.log_every == 0 or position.step == plan.steps
            leave = self.ranks.agree(self.signals.received)
            self.signals.pass_on(leave)
            save = plan.saves(position.step)
            if report or save or leave or self.skips.must_hear:
                verdict = self.run_ahead.timed("device", self.skips.hear)
            if report:
                row: dict[str, Any] = {
                    "step": position.step,
                    "tokens": position.tokens,
                    "loss": verdict.loss,
                    "grad_norm": verdict.norm,
                    "lr": rate,
                    "skipped": int(self.optimizer.skipped),
                    "scored": batch.scored,
                    "segments": batch.segments,
                    "text_share": 1 - batch.padding / plan.batch_tokens,
                }
                row |= self.run_ahead.waits(position.step - reported)
                seconds = (time.perf_counter() - since) / (position.step - reported)
                busy = self.ranks.busy(seconds, position.step - reported)
                since, reported = time.perf_counter(), position.step
                speed = plan.batch_tokens / seconds
                peak = peak_flops(self.device)
                mfu = peak and self.flops_per_token * speed / (peak * plan.world)
                row |= {"tokens_per_second": speed, "mfu": mfu, **busy}
                if self.device.type == "cuda":
                    row["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
                self.writer.metrics(row)
                progress.report(row, seconds)
            if self.skips.too_many:
                with self.ranks.patience():  # a save is waited for, and every rank reads a whole checkpoint
                    self._go_back()
                return

            if save:
                paused = time.perf_counter()
                self.save()
                if plan.scores(position.step):
                    self.score()
                since += time.perf_counter() - paused  # speed is of training alone
            self.saver.check()
            if leave:
                self._leave(leave)

    def save(self) -> None:
        """Copies the state now, to be written while training goes on: checkpoint, then the event, and only then retention."""
        position = self.position
        state = {
            "step": position.step,
            "tokens": position.tokens,
            "row": position.row,
            "stream": self.stream.key_until(position.row),
            "lr": self.plan.lr,
            "planned_tokens": self.plan.tokens,
            "micro_batch_tokens": self.plan.micro_batch_tokens,
            "tokenizer": self.stream.dataset.tokenizer_hash,
            "guard": self.skips.state(),
            "config": dict(self.config),
        }
        with self.ranks.patience():  # the save before may have to be waited for
            self.saver.save(position.step, position.tokens, state, self.plan.pins.get(position.step))

    def _finish_saving(self) -> None:
        """Returns once the last save is on disk; raises OSError where it has failed."""
        with self.ranks.patience():
            self.saver.wait()
        if self.saver.failure is not None:
            raise self.saver.failure

    def _leave(self, signal: str) -> None:
        """Saves this step, unless that was done, and raises Preempted."""
        with self.ranks.patience():
            self.saver.wait()
        if self.saver.saved_step != self.position.step:
            self.save()
        self._finish_saving()
        raise Preempted(signal)

    def _go_back(self) -> None:
        """Back to the last checkpoint from before the steps that were left out, with the data from after them.

        Raises FloatingPointError where it has gone back too often, or there is no such checkpoint.
        """
        failed, past = f"{self.skips.told} (see the skip events)", self.skips.recent[-1].next_row
        if self.skips.rollbacks == self.guard.settings.max_rollbacks:
            raise FloatingPointError(f"{failed}, after going back {self.skips.rollbacks} times; try a lower optim.lr")
        self.saver.wait()
        good = self._newest_before(self.skips.recent[0].step)
        if good is None:
            raise FloatingPointError(f"{failed}, and there is no checkpoint from before them; try a lower optim.lr")
        load_checkpoint(good, self.optimizer)
        state, rollbacks = good.state, self.skips.rollbacks + 1
        self.writer.event(
            "rollback",
            step=self.position.step,
            tokens=self.position.tokens,
            reason=failed,
            path=good.path.name,
            rows=[state["row"], past],
            rollbacks=rollbacks,
            allowed=self.guard.settings.max_rollbacks,
        )
        self.console.print(f"{failed}: back to {good.path.name}, past these data", highlight=False)
        self.skips.load(state)
        self.skips.rollbacks = rollbacks
        if self._phase(past) != self._phase(state["row"]):
            self.guard.restart()
        at = self.position
        at.step, at.tokens, at.row = state["step"], state["tokens"], past
        # To readers it is a resume: what came after that checkpoint is no longer this run's past.
        self.writer.next_attempt(self.run.next_attempt())
        self.writer.event("resume", step=at.step, tokens=at.tokens, changed={}, rollback=rollbacks)
        self.save()  # a kill from here on must not lose the way round

    def _newest_before(self, step: int) -> checkpoints.Checkpoint | None:
        """As `checkpoints.newest_before`; rank 0 reads them all, and the others open what it has found."""

        def look() -> str:
            found = checkpoints.newest_before(self.run.checkpoints, step)
            return "" if found is None else str(found.path)

        path = self.ranks.tell(look)
        return checkpoints.open_checkpoint(path) if path else None

    def _loader(self) -> Loader:
        return Loader(
            self.stream,
            first_row=self.position.row,
            micro_batch_tokens=self.plan.micro_batch_tokens,
            rank=self.ranks.rank,
            world=self.ranks.world,
            grad_accum=self.plan.grad_accum,
            depth=self.settings.prefetch,
            pin=self.device.type == "cuda",
        )

    def _step(self, batch: GlobalBatch) -> TrainStep:
        """The step for batches of this shape: each rung of the ladder has its own."""
        shape = batch.micro_batches[0]
        if self.step is None or self.step.context != shape.context:
            self.ranks.compiling(True)
            self.step = TrainStep(
                self.model,
                self.optimizer,
                shape.rows,
                shape.context,
                shape.slots,
                compile=self.settings.compile,
                record=self.settings.record,
                guard=self.guard,
            )
            if self.plan.rungs[1:]:
                at = {"step": self.position.step, "tokens": self.position.tokens}
                self.writer.event("rung", **at, context=shape.context, rows=shape.rows, slots=shape.slots)
        return self.step

    def _phase(self, row: int) -> int:
        """How many phases of the mixture, and rungs of the ladder, have begun by `row`."""
        return self.stream.phase_of(row)

    def _new_phase(self, first_row: int, next_row: int) -> bool:
        """Whether a step of these rows is the first of a phase; the same answer after a resume."""
        return self._phase(first_row) != self._phase(2 * first_row - next_row)

    def score(self) -> Report:
        """Scores the held-out set, writes a row per slice, and pins the best checkpoint so far."""
        settings = self.evaluate
        if self.settings.eval_documents is not None:
            settings = replace(settings, max_documents=self.settings.eval_documents)
        with self.ranks.patience():
            self.saver.wait()  # scoring may fail or be killed: what is scored is safe first
        started = time.perf_counter()
        with self.signals.at_once(), self.ranks.patience():
            scores = score(
                nats_function(self.model),
                self.valid,
                settings,
                training_context=self.plan.context,
                rank=self.ranks.rank,
                world=self.ranks.world,
                total=self.ranks.total,
            )
            report = make_report(scores, samples=settings.bootstrap_samples, seed=settings.seed)
        at = {"step": self.position.step, "tokens": self.position.tokens}
        for row in report_rows(report):
            self.writer.evals(at | row)
        overall = report.overall.bits_per_byte
        self.writer.event("score", **at, bits_per_byte=overall, seconds=time.perf_counter() - started)
        self._pin_best()
        self.console.print(f"step {self.position.step:,}: held-out bits per byte {overall:.4f}", highlight=False)
        return report

    def _pin_best(self) -> None:
        """Pins the checkpoint of the lowest score among those that compare with the last one: same text, same context."""
        rows = self._overall_rows() if self.ranks.leads else []
        if not rows:
            return
        same = ("context", "dataset", "documents")
        alike = [row for row in rows if all(row[key] == rows[-1][key] for key in same)]
        best = min(alike, key=lambda row: row["bits_per_byte"])["step"]
        root = self.run.checkpoints
        pinned = checkpoints.pins(root)
        if best not in {found.step for found in checkpoints.find(root)} or pinned.get(best, []).count("best"):
            return
        checkpoints.pin(root, best, "best")
        for step, reasons in pinned.items():
            if "best" in reasons:
                checkpoints.unpin(root, step, "best")
        self.saver.retain()

    def _overall_rows(self) -> list[dict[str, Any]]:
        """This run's own overall scores; what others scored of its checkpoints must not steer it."""
        return [row for row in reader.evals(self.run) if row["writer"] == "trainer" and row.get("slice") == "overall"]

    def _scored(self, step: int) -> bool:
        return any(row["step"] == step for row in self._overall_rows())


def load_checkpoint(found: checkpoints.Checkpoint, optimizer: Optimizer) -> None:
    """Weights and optimizer state out of a checkpoint; ValueError where they are of another model."""
    found.check_matches({name: parameter.shape for name, parameter in optimizer.params.items()})
    optimizer.load(found.load_model(), found.load_optimizer())


def load_weights(found: checkpoints.Checkpoint, model: LanguageModel) -> dict[str, Tensor]:
    """Weights alone out of a checkpoint that has been verified; ValueError where they are of another model."""
    found.check_matches({name: parameter.shape for name, parameter in model.named_parameters()})
    return found.load_model()
