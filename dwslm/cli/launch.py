"""Starting and resuming a run: everything is built and checked here, then handed to the trainer."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dwslm.cli import child
from dwslm.cli.branch import open_branch
from dwslm.cli.build import Built, build, check_same_data
from dwslm.cli.find import find_checkpoint
from dwslm.cli.plan_data import describe_plan, show_warnings
from dwslm.cli.prepare import prepare_sample
from dwslm.cli.ranks import holding, meet, rank_console, writing
from dwslm.cli.receipts import check_memory, describe, made_with, make_receipt, record
from dwslm.config import SAMPLE_DATA, RunConfig, resume_config, to_plain
from dwslm.runs.folder import RunFolder, create_run, open_run
from dwslm.runs.writer import RunWriter
from dwslm.train import checkpoint as checkpoints
from dwslm.train.distributed import Ranks
from dwslm.train.dry_run import dry_run
from dwslm.train.loop import Position, Trainer, load_checkpoint, load_weights
from dwslm.train.report import facts
from dwslm.train.signals import Preempted, Signals


def launch(config: RunConfig | dict[str, Any], overrides: Sequence[str]) -> None:
    """Runs what the configuration asks for.

    Args:
        config: typed and checked; for a resume it may be plain data, since only what the command line names counts.
        overrides: the command line's own, for the check of a resume.
    """
    # cuBLAS picks its workspace, and with it its order of summation, from this; deterministic runs need it fixed.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Installing an unrelated package must not reroute flash-linear-attention's kernels.
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with meet() as ranks:
        launch_rank(config, overrides, ranks)


def launch_rank(config: RunConfig | dict[str, Any], overrides: Sequence[str], ranks: Ranks) -> None:
    """`launch` of one process among those that train together."""
    console = rank_console(ranks)
    child.begin(console)
    given = to_plain(config) if isinstance(config, RunConfig) else config
    if not given["runs_dir"]:
        raise ValueError("runs_dir is empty: name the folder for run folders")
    if given["resume"] is not None:
        if given["init_from"] is not None:
            raise ValueError("resume= goes on with a run and init_from= starts a new one: give one of them")
        if given["branch"] is not None:
            raise ValueError("resume= goes on with a run and branch= starts a new one: give one of them")
        resume(given, overrides, ranks, console)
        return
    assert isinstance(config, RunConfig)
    sample = config.branch is None and config.data.path == SAMPLE_DATA
    with ranks.in_turn():
        if sample and not Path(SAMPLE_DATA, "train", "manifest.json").is_file():
            console.print(f"{SAMPLE_DATA} is not there yet: preparing the sample that ships with the code")
            prepare_sample(console)
    start(config, overrides, ranks, console)


def start(config: RunConfig, overrides: Sequence[str], ranks: Ranks, console: Console) -> None:
    """A new run, from fresh weights, from those of `init_from`, or from all of `branch`."""
    branch = None if config.branch is None else open_branch(config, overrides)
    state: dict[str, Any] = {}
    position = Position()
    if branch is not None:
        config, state = branch.config, branch.checkpoint.state
    built = build(config, state.get("lr"), ranks)
    if branch is not None:
        check_same_data(state, built, branch.checkpoint)
        load_checkpoint(branch.checkpoint, built.optimizer)
        position = Position(state["step"], state["tokens"], state["row"])
        console.print(Text(f"goes on from {branch.checkpoint.path}, step {position.step:,}"))
    if config.init_from is not None and branch is None:
        take_weights(config, built, console)
    if not config.dry_run:
        check_memory(config, built)
    with ranks.in_turn():  # the rows of the plan are counted once
        describe(config, built, console)
    if config.dry_run:
        dry_run(built.model, built.optimizer, built.stream, built.plan, config.train, console)
        return
    origin = {"branch": branch.provenance} if branch is not None else {}
    path = ranks.tell(lambda: str(create_run(config.runs_dir, config.name, record(config, built) | origin).path))
    run = open_run(path, config.runs_dir)
    with holding(run, ranks), writing(config, run, ranks, console) as writer:
        console.print(Text(f"run {run.path}"))
        writer.event("start", step=position.step, tokens=position.tokens, **origin)
        save_first = config.init_from is not None or branch is not None
        train(config, built, run, writer, ranks, console, position, state=state, save_first=save_first)


def resume(given: dict[str, Any], overrides: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Goes on with a run from its newest checkpoint that verifies."""
    path = ranks.tell(lambda: str(open_run(given["resume"], given["runs_dir"]).path))
    run = open_run(path, given["runs_dir"])
    rejected: list[tuple[Path, str]] = []
    with holding(run, ranks):
        asked = any(override.lstrip("+").startswith("checkpoint.verify=") for override in overrides)
        verify = (given if asked else run.record["config"])["checkpoint"]["verify"]

        def look() -> str:
            checkpoints.clean(run.checkpoints)
            newest, passed_over = checkpoints.newest_good(run.checkpoints, verify)
            rejected.extend(passed_over)
            return "" if newest is None else str(newest.path)

        good = ranks.tell(look)
        found = checkpoints.open_checkpoint(good) if good else None
        for folder, reason in rejected:
            console.print(Text(f"passed over {folder.name}: {reason}"))
        state = found.state if found else {}
        stored = state.get("config", run.record["config"])
        config, changed = resume_config(stored, given, overrides)
        unsaved = found is None  # killed before it could save what it began with
        if found is None and config.branch is not None:
            found = find_checkpoint(config.branch, config.runs_dir)[0]
            state = found.state
        built = build(config, state.get("lr"), ranks)
        if not given["dry_run"]:
            check_memory(config, built)
        position = Position()
        if found:
            check_same_data(state, built, found)
            load_checkpoint(found, built.optimizer)
            position = Position(state["step"], state["tokens"], state["row"])
        elif config.init_from is not None:
            take_weights(config, built, console)
        with ranks.in_turn():
            show_warnings(describe_plan(built.stream, console), console)
        receipt = make_receipt(config, built, run, found, state, position, verify, len(rejected))
        console.print(facts("Resume", receipt))
        if given["dry_run"]:
            dry_run(built.model, built.optimizer, built.stream, built.plan, config.train, console)
            return
        with writing(config, run, ranks, console) as writer:
            for folder, reason in rejected:
                writer.event("checkpoint_rejected", path=folder.name, reason=reason)
            at = {"step": position.step, "tokens": position.tokens}
            writer.event("resume", **at, changed=changed, receipt=receipt, **made_with(built))
            # A longer plan must outlive a kill before the next save.
            begun_with = config.init_from is not None or config.branch is not None
            save_first = ("train.tokens" in changed and not unsaved) or (begun_with and unsaved)
            train(config, built, run, writer, ranks, console, position, state=state, save_first=save_first)


def take_weights(config: RunConfig, built: Built, console: Console) -> None:
    """Weights alone, of `init_from`."""
    found, _, passed_over = find_checkpoint(str(config.init_from), config.runs_dir)
    for path, reason in passed_over:
        console.print(Text(f"passed over {path.name}: {reason}"))
    dataset = built.stream.dataset
    if found.state["tokenizer"] != dataset.tokenizer_hash:
        raise ValueError(
            f"{found.path} was trained with another tokenizer than {dataset.path} was made with, so its embedding rows mean "
            "other tokens: prepare the text with that run's, `dwslm prepare --tokenizer FILE`"
        )
    built.optimizer.load_weights(load_weights(found, built.model))
    console.print(f"weights from {found.path}, step {found.step:,}; optimizer and data start anew", highlight=False)


def train(
    config: RunConfig,
    built: Built,
    run: RunFolder,
    writer: RunWriter,
    ranks: Ranks,
    console: Console,
    position: Position,
    *,
    state: dict[str, Any] | None = None,
    save_first: bool,
) -> None:
    """Trains and leaves the event that says how it ended."""
    child.announce(run.path)
    at = position
    try:
        with Signals(says=ranks.leads) as signals:
            trainer = Trainer(
                plan=built.plan,
                train=config.train,
                checkpoint=config.checkpoint,
                guard=config.guard,
                evaluate=config.evaluate,
                config=to_plain(config),
                model=built.model,
                optimizer=built.optimizer,
                stream=built.stream,
                valid=built.valid,
                run=run,
                writer=writer,
                console=console,
                signals=signals,
                position=position,
                ranks=ranks,
            )
            if state:
                trainer.skips.load(state)
            trainer.train(save_first=save_first)
    except BaseException as raised:
        error = ranks.why(raised)
        if isinstance(error, Preempted):
            writer.event("preempted", step=at.step, tokens=at.tokens, signal=error.name, reason=str(error))
            which = run.path.name if config.runs_dir == RunConfig.runs_dir else str(run.path)
            go_on = f"python train.py resume={shlex.quote(which)}"
            kept = "all saved" if checkpoints.find(run.checkpoints) else "nothing to save yet"
            console.print(f"{error} at step {at.step:,}, {kept}; go on with: {go_on}", highlight=False)
            raise
        reason = str(error).split("\n")[0][:500]
        with suppress(OSError):  # the disk may be what failed; then the error itself must tell
            writer.event("failed", step=at.step, tokens=at.tokens, error=type(error).__name__, reason=reason)
        if error is raised:
            raise
        raise error from raised
    writer.event("done", step=position.step, tokens=position.tokens)
    console.print(f"done: {position.tokens:,} tokens in {position.step:,} steps, in {run.path}", highlight=False)
