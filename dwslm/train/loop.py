"""The trainer: from a plan to a finished run, in the order in which things happen."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dwslm.data.loader import Loader
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
from dwslm.train.device import peak_flops
from dwslm.train.plan import Plan
from dwslm.train.report import MATRIX_FLOPS, TrainProgress
from dwslm.train.scoring import nats_function
from dwslm.train.settings import TrainSettings
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
        settings: train, checkpoint and evaluation settings; `config` is the whole configuration as plain data, which goes into
            every checkpoint.
        model, optimizer: on their device, loaded if this is a resume.
        stream: training rows; `valid`: held-out dataset, None where nothing is scored.
        run, writer: where everything is written.
        position: where to go on.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        train: TrainSettings,
        checkpoint: CheckpointSettings,
        evaluate: EvalSettings,
        config: Mapping[str, Any],
        model: LanguageModel,
        optimizer: Optimizer,
        stream: RowStream,
        valid: Dataset,
        run: RunFolder,
        writer: RunWriter,
        console: Console,
        position: Position,
    ):
        self.plan, self.settings, self.checkpoint, self.evaluate = plan, train, checkpoint, evaluate
        self.config, self.model, self.optimizer, self.stream, self.valid = (
            config,
            model,
            optimizer,
            stream,
            valid,
        )
        self.run, self.writer, self.console, self.position = run, writer, console, position
        self.device = model.embedding.weight.device
        sizes = model.sizes()
        self.flops_per_token = MATRIX_FLOPS * (sizes["matrices"] + sizes["head"])

    def train(self) -> None:
        """Trains to the end of the plan, saving and scoring on the way.

        Raises:
            FloatingPointError: where a reported loss is not finite; the last checkpoint is from before it.
        """
        plan, position = self.plan, self.position
        packing = self.stream.packing
        step = TrainStep(
            self.model,
            self.optimizer,
            plan.micro_batch_rows,
            plan.context,
            plan.micro_batch_rows * packing.segments_per_row,
            compile=self.settings.compile,
        )
        loader = Loader(
            self.stream,
            first_row=position.row,
            rows=plan.micro_batch_rows,
            grad_accum=plan.grad_accum,
            depth=self.settings.prefetch,
            pin=self.device.type == "cuda",
        )
        if position.step > 0 and plan.scores(position.step) and not self._scored(position.step):
            self.score()  # killed between the save and the score
        self._pin_best()  # or between the score and the pin
        with loader, TrainProgress(self.console, plan, position.step) as progress:
            since = time.perf_counter()
            reported = position.step
            for number in range(position.step, plan.steps):
                batch = next(loader)
                rate = plan.rate(number)
                loss, norm = step.run(batch, rate)
                position.step, position.row = number + 1, batch.next_row
                position.tokens += plan.batch_tokens

                if position.step % self.settings.log_every == 0 or position.step == plan.steps:
                    row: dict[str, Any] = {
                        "step": position.step,
                        "tokens": position.tokens,
                        "loss": loss.item(),
                        "grad_norm": norm.item(),
                        "lr": rate,
                        "skipped": int(self.optimizer.skipped),
                        "scored": batch.scored,
                        "segments": batch.segments,
                        "text_share": 1 - batch.padding / plan.batch_tokens,
                    }
                    seconds = (time.perf_counter() - since) / (position.step - reported)
                    since, reported = time.perf_counter(), position.step
                    speed = plan.batch_tokens / seconds
                    peak = peak_flops(self.device)
                    row |= {"tokens_per_second": speed, "mfu": peak and self.flops_per_token * speed / peak}
                    if self.device.type == "cuda":
                        row["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
                    self.writer.metrics(row)
                    progress.report(row, seconds)
                    self._check_finite(row)

                if plan.saves(position.step):
                    paused = time.perf_counter()
                    self.save()
                    if plan.scores(position.step):
                        self.score()
                    since += time.perf_counter() - paused  # speed is of training alone

    def save(self) -> None:
        """Checkpoint, then the event, and only then retention."""
        position, root = self.position, self.run.checkpoints
        reason = self.plan.pins.get(position.step)
        started = time.perf_counter()
        state = {
            "step": position.step,
            "tokens": position.tokens,
            "row": position.row,
            "stream": self.stream.key_until(position.row),
            "lr": self.plan.lr,
            "planned_tokens": self.plan.tokens,
            "tokenizer": self.stream.dataset.tokenizer_hash,
            "config": dict(self.config),
        }
        saved = checkpoints.save(
            root,
            position.step,
            self.optimizer.weights(),
            self.optimizer.state(),
            state,
            pins=[reason] if reason else [],
        )
        self.writer.event(
            "checkpoint",
            step=position.step,
            tokens=position.tokens,
            path=saved.path.name,
            seconds=time.perf_counter() - started,
            pinned=reason,
        )
        self._retain()

    def score(self) -> Report:
        """Scores the held-out set, writes a row per slice, and pins the best checkpoint so far."""
        settings = self.evaluate
        if self.settings.eval_documents is not None:
            settings = replace(settings, max_documents=self.settings.eval_documents)
        started = time.perf_counter()
        scores = score(nats_function(self.model), self.valid, settings, training_context=self.plan.context)
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
        rows = self._overall_rows()
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
        self._retain()

    def _retain(self) -> None:
        for path in checkpoints.retain(self.run.checkpoints, self.checkpoint.keep_last):
            self.writer.event("checkpoint_deleted", path=path.name)

    def _overall_rows(self) -> list[dict[str, Any]]:
        """This run's own overall scores; what others scored of its checkpoints must not steer it."""
        return [row for row in reader.evals(self.run) if row["writer"] == "trainer" and row.get("slice") == "overall"]

    def _scored(self, step: int) -> bool:
        return any(row["step"] == step for row in self._overall_rows())

    def _check_finite(self, row: Mapping[str, Any]) -> None:
        if row["loss"] != row["loss"] or abs(row["loss"]) == float("inf"):
            self.writer.event("not_finite", step=row["step"], tokens=row["tokens"], loss=row["loss"])
            last = next(iter(checkpoints.find(self.run.checkpoints)), None)
            raise FloatingPointError(
                f"the loss is {row['loss']} at step {row['step']}; "
                + (f"the last checkpoint is {last.path}" if last else "there is no checkpoint yet")
                + "; look at grad_norm in the metrics, and try a lower optim.lr"
            )


def load_checkpoint(found: checkpoints.Checkpoint, optimizer: Optimizer) -> None:
    """Weights and optimizer state out of a checkpoint; ValueError where they are of another model."""
    found.check_matches({name: parameter.shape for name, parameter in optimizer.params.items()})
    optimizer.load(found.load_model(), found.load_optimizer())


def load_weights(found: checkpoints.Checkpoint, model: LanguageModel) -> dict[str, Tensor]:
    """Weights alone out of a checkpoint that has been verified; ValueError where they are of another model."""
    found.check_matches({name: parameter.shape for name, parameter in model.named_parameters()})
    return found.load_model()
