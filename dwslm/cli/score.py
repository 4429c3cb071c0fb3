"""Scoring a checkpoint: bits per byte by slice, by position, or of one's own text; and questions about spelling."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dwslm.cli.engines import had_here
from dwslm.cli.find import find_checkpoint, open_split
from dwslm.cli.ranks import meet, rank_console
from dwslm.config import RunConfig, ScoreConfig, from_plain
from dwslm.data.batch import Batch
from dwslm.data.tokenizer import load_tokenizer, token_bytes
from dwslm.evaluate.bands import band_table, score_bands
from dwslm.evaluate.baselines import (
    byte_entropy,
    document_texts,
    token_spellings,
    uniform_bits_per_byte,
    xz_bits_per_byte,
)
from dwslm.evaluate.bits_per_byte import EvalSettings, NatsFn, score, score_text
from dwslm.evaluate.report import make_report, report_rows, run_row, slice_table, tables
from dwslm.evaluate.spelling import score_spelling, spelling_items, spelling_table
from dwslm.model.lm import LanguageModel
from dwslm.model.rotary import RopeSettings
from dwslm.runs.writer import RunWriter
from dwslm.train.checkpoint import Checkpoint
from dwslm.train.device import set_numerics
from dwslm.train.distributed import Ranks
from dwslm.train.loop import load_weights
from dwslm.train.report import facts
from dwslm.train.scoring import nats_function


def score_checkpoint(config: ScoreConfig, overrides: Sequence[str]) -> None:
    """Scores what the configuration names, prints tables, and leaves the figures in the run.

    `overrides` are the command line's own: an `evaluate.` setting that they do not name is the run's. Started by torchrun, the
    ranks share the held-out set; everything else each of them does by itself.
    """
    with meet() as ranks:
        score_rank(config, overrides, ranks)


def score_rank(config: ScoreConfig, overrides: Sequence[str], ranks: Ranks) -> None:
    """`score_checkpoint` of one process among those that score together."""
    console = rank_console(ranks)
    if not config.checkpoint:
        raise ValueError("eval.py needs checkpoint=RUN (or RUN@STEP, RUN@best, or a checkpoint's folder)")
    found, run, passed_over = find_checkpoint(config.checkpoint, config.runs_dir)
    for path, reason in passed_over:
        console.print(Text(f"passed over {path.name}: {reason}"))
    if run is not None and config.text is None and not os.access(run.path, os.W_OK):
        raise ValueError(
            f"scores cannot be written to {run.path}: name a copy of the checkpoint's folder that is in no run"
        )
    state = found.state
    trained = from_plain(state["config"])
    if config.data:
        trained.data.path = config.data
    settings = given_settings(config, trained, overrides)
    bands = band_ropes(trained, settings, config) if config.bands else {}
    valid = open_split(trained.data, "valid")
    tokenizer_path = Path(trained.data.path) / "tokenizer.json"  # the held-out set's own: open_split has checked
    if valid.tokenizer_hash != state["tokenizer"]:
        raise ValueError(
            f"{tokenizer_path} is not the tokenizer that {found.path} was trained with: give that dataset with data="
        )
    tokenizer = load_tokenizer(tokenizer_path)
    device = ranks.choose_device(config.device)
    trained.model, told = had_here(trained.model, device)
    for line in told:
        console.print(Text(line))
    model = load_model(trained, found, valid.vocab_size, device)
    nats = nats_function(model)
    console.print(Text(f"{found.path}: step {state['step']:,}, {state['tokens']:,} tokens"))

    context = trained.data.packing.last_context
    if config.text is not None:
        own = score_text(nats, config.text, tokenizer, settings, eod=valid.eod, training_context=context)
        console.print(
            slice_table(f"Bits per byte, context {settings.context or context:,}", ["text"], [([config.text], own)])
        )
        return
    spelling = None
    if config.spelling:  # first of all, since only here a question shows that does not fit the context
        items = spelling_items(config.spelling_tests)
        at_tests = {"eod": valid.eod, "training_context": context}
        with progress_bar(console) as show:
            spelling = score_spelling(nats, items, tokenizer, settings, progress=show, **at_tests)
    share: dict[str, Any] = {"rank": ranks.rank, "world": ranks.world, "total": ranks.total}
    with progress_bar(console) as show:
        scores = score(nats, valid, settings, training_context=context, progress=show, **share)
    report = make_report(scores, samples=settings.bootstrap_samples, seed=settings.seed)
    console.print(tables(report))
    rows: list[dict[str, Any]] = report_rows(report)
    if config.baselines:
        texts = list(document_texts(valid, scores.documents["index"], token_spellings(tokenizer)))
        overall = report.overall
        uniform = uniform_bits_per_byte(valid.vocab_size, overall.tokens, overall.bytes)
        console.print(
            facts(
                "The same text, bits per byte",
                {
                    "this checkpoint": f"{overall.bits_per_byte:.4f}",
                    "order-0 byte model": f"{byte_entropy(texts):.4f}",
                    "xz -9": f"{xz_bits_per_byte(texts):.4f}",
                    "uniform over the vocabulary": f"{uniform:.4f}",
                },
            )
        )
    if bands:
        nats_fns = {name: with_rope(model, rope) for name, rope in bands.items()}
        band_report = score_bands(nats_fns, valid, token_bytes(tokenizer), settings)
        console.print(band_table(band_report))
        rows += [run_row("band", row) for row in band_report.to_dict()["rows"]]
    if spelling is not None:
        console.print(spelling_table(spelling))
        rows += [row | {"settings": asdict(config.spelling_tests)} for row in spelling.to_rows()]
    if run is not None and ranks.leads:
        at = {"step": state["step"], "tokens": state["tokens"]}
        with RunWriter(run, run.next_attempt("score"), writer="score") as writer:
            for row in rows:
                writer.evals(at | row)
            writer.event("score", **at, checkpoint=str(found.path), bits_per_byte=report.overall.bits_per_byte)
        console.print(Text(f"written to {run.path / 'evals-score.jsonl'}"))


def load_model(trained: RunConfig, found: Checkpoint, vocab_size: int, device: torch.device) -> LanguageModel:
    """The checkpoint's model on its device, weights rounded to its compute dtype as in training."""
    set_numerics(deterministic=False, threads=0)
    model = LanguageModel(trained.model, vocab_size)
    for name, weight in load_weights(found, model).items():
        model.get_parameter(name).data.copy_(weight)
    return model.to(device).requires_grad_(False)


def given_settings(config: ScoreConfig, trained: RunConfig, overrides: Sequence[str]) -> EvalSettings:
    """The run's way of scoring, with what the command line names of `evaluate` in any of Hydra's spellings."""
    names = [override.split("=", 1)[0].lstrip("+~") for override in overrides]
    if "evaluate" in names:
        return config.evaluate
    own = [name.removeprefix("evaluate.").split(".")[0] for name in names if name.startswith("evaluate.")]
    return replace(trained.evaluate, **{name: getattr(config.evaluate, name) for name in own})


def band_ropes(trained: RunConfig, settings: EvalSettings, config: ScoreConfig) -> dict[str, RopeSettings]:
    """Rotary settings as trained, and with YaRN stretching the trained context over the last band.

    Raises:
        ValueError: where there are no bands, or the factor makes no sense.
    """
    context = trained.data.packing.last_context
    if not settings.bands:
        raise ValueError("evaluate.bands is empty: bands=true needs the positions where bands end")
    factor = max(1.0, settings.bands[-1] / context) if config.yarn_factor is None else config.yarn_factor
    if not 1 <= factor < float("inf"):
        raise ValueError(f"yarn_factor={factor} must be 1 or more")
    yarn = replace(trained.model.rope, yarn_factor=factor, yarn_context=context)
    return {"as trained": trained.model.rope, f"YaRN x{factor:g}": yarn}


def with_rope(model: LanguageModel, rope: RopeSettings) -> NatsFn:
    """The model's nats under other rotary settings."""

    def nats(batch: Batch) -> np.ndarray:
        model.set_rope(rope)
        return nats_function(model)(batch)

    return nats


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress callable for `score` that draws nothing where the output is no terminal. The terminal is given back at the
    end, whatever the last count was: of several ranks each sees its own batches alone."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("scoring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
