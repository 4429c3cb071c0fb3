"""Starting and resuming a run: everything is built and checked here, then handed to the trainer."""

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from dwslm.cli import child
from dwslm.cli.branch import open_branch
from dwslm.cli.errors import make_console
from dwslm.cli.find import commit, find_checkpoint, open_split
from dwslm.cli.plan_data import describe_plan, open_stream, show_plan, show_warnings
from dwslm.cli.prepare import prepare_sample
from dwslm.config import SAMPLE_DATA, RunConfig, config_hash, resume_config, to_plain
from dwslm.data.held_out import check_held_out
from dwslm.data.packing import RowStream
from dwslm.data.shards import Dataset
from dwslm.model.lm import DTYPES, LanguageModel, ModelSettings
from dwslm.ops import attention, delta_rule, depth_mix, loss_head, short_conv
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.schedule import learning_rate
from dwslm.runs.folder import RunFolder, create_run, open_run
from dwslm.runs.track import Trackers
from dwslm.runs.writer import RunWriter
from dwslm.train import checkpoint as checkpoints
from dwslm.train.checkpoint import Checkpoint
from dwslm.train.device import choose_device, device_name, set_numerics
from dwslm.train.dry_run import dry_run
from dwslm.train.loop import Position, Trainer, load_checkpoint, load_weights
from dwslm.train.plan import Plan, make_plan
from dwslm.train.report import facts, plan_table, rate, routing_table, size_table
from dwslm.train.signals import Preempted, Signals

PACKAGES = ("dwslm", "torch", "triton", "numpy", "safetensors", "tokenizers", "hydra-core", "fla-core", "flash-attn",
            "nvidia-cudnn-frontend", "transformer-engine")  # fmt: skip


@dataclass
class Built:
    """What a run is made of, on its device."""

    plan: Plan
    model: LanguageModel
    optimizer: Optimizer
    stream: RowStream
    train: Dataset
    valid: Dataset


def launch(config: RunConfig | dict[str, Any], overrides: Sequence[str]) -> None:
    """Runs what the configuration asks for.

    Args:
        config: typed and checked; for a resume it may be plain data, since only what the command line names counts.
        overrides: the command line's own, for the check of a resume.
    """
    console = make_console()
    # cuBLAS picks its workspace, and with it its order of summation, from this; deterministic runs need it fixed.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Installing an unrelated package must not reroute flash-linear-attention's kernels.
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    child.begin(console)
    given = to_plain(config) if isinstance(config, RunConfig) else config
    if not given["runs_dir"]:
        raise ValueError("runs_dir is empty: name the folder for run folders")
    if given["resume"] is not None:
        if given["init_from"] is not None:
            raise ValueError("resume= goes on with a run and init_from= starts a new one: give one of them")
        if given["branch"] is not None:
            raise ValueError("resume= goes on with a run and branch= starts a new one: give one of them")
        resume(given, overrides, console)
        return
    assert isinstance(config, RunConfig)
    sample = config.branch is None and config.data.path == SAMPLE_DATA
    if sample and not Path(SAMPLE_DATA, "train", "manifest.json").is_file():
        console.print(f"{SAMPLE_DATA} is not there yet: preparing the sample that ships with the code")
        prepare_sample(console)
    start(config, overrides, console)


def start(config: RunConfig, overrides: Sequence[str], console: Console) -> None:
    """A new run, from fresh weights, from those of `init_from`, or from all of `branch`."""
    branch = None if config.branch is None else open_branch(config, overrides)
    state: dict[str, Any] = {}
    position = Position()
    if branch is not None:
        config, state = branch.config, branch.checkpoint.state
    built = build(config, lr=state.get("lr"))
    if branch is not None:
        check_same_data(state, built, branch.checkpoint)
        load_checkpoint(branch.checkpoint, built.optimizer)
        position = Position(state["step"], state["tokens"], state["row"])
        console.print(Text(f"goes on from {branch.checkpoint.path}, step {position.step:,}"))
    if config.init_from is not None and branch is None:
        take_weights(config, built, console)
    describe(config, built, console)
    if config.dry_run:
        dry_run(built.model, built.optimizer, built.stream, built.plan, config.train, console)
        return
    origin = {"branch": branch.provenance} if branch is not None else {}
    run = create_run(config.runs_dir, config.name, record(config, built) | origin)
    with (
        run.lock(),
        RunWriter(run, run.next_attempt()) as writer,
        Trackers(config.track, run, writer.attempt, console.print),
    ):
        console.print(Text(f"run {run.path}"))
        writer.event("start", step=position.step, tokens=position.tokens, **origin)
        save_first = config.init_from is not None or branch is not None
        train(config, built, run, writer, console, position, state=state, save_first=save_first)


def resume(given: dict[str, Any], overrides: Sequence[str], console: Console) -> None:
    """Goes on with a run from its newest checkpoint that verifies."""
    run = open_run(given["resume"], given["runs_dir"])
    with run.lock():
        checkpoints.clean(run.checkpoints)
        asked = any(override.lstrip("+").startswith("checkpoint.verify=") for override in overrides)
        verify = (given if asked else run.record["config"])["checkpoint"]["verify"]
        found, rejected = checkpoints.newest_good(run.checkpoints, verify)
        for path, reason in rejected:
            console.print(Text(f"passed over {path.name}: {reason}"))
        state = found.state if found else {}
        stored = state.get("config", run.record["config"])
        config, changed = resume_config(stored, given, overrides)
        unsaved = found is None  # killed before it could save what it began with
        if found is None and config.branch is not None:
            found = find_checkpoint(config.branch, config.runs_dir)[0]
            state = found.state
        built = build(config, lr=state.get("lr"))
        position = Position()
        if found:
            check_same_data(state, built, found)
            load_checkpoint(found, built.optimizer)
            position = Position(state["step"], state["tokens"], state["row"])
        elif config.init_from is not None:
            take_weights(config, built, console)
        show_warnings(describe_plan(built.stream, console), console)
        receipt = make_receipt(config, built, run, found, state, position, verify, len(rejected))
        console.print(facts("Resume", receipt))
        if given["dry_run"]:
            dry_run(built.model, built.optimizer, built.stream, built.plan, config.train, console)
            return
        with RunWriter(run, run.next_attempt()) as writer, Trackers(config.track, run, writer.attempt, console.print):
            for path, reason in rejected:
                writer.event("checkpoint_rejected", path=path.name, reason=reason)
            writer.event("resume", step=position.step, tokens=position.tokens, changed=changed, receipt=receipt)
            # A longer plan must outlive a kill before the next save.
            begun_with = config.init_from is not None or config.branch is not None
            save_first = ("train.tokens" in changed and not unsaved) or (begun_with and unsaved)
            train(config, built, run, writer, console, position, state=state, save_first=save_first)


def take_weights(config: RunConfig, built: Built, console: Console) -> None:
    """Weights alone, of `init_from`."""
    found, _, passed_over = find_checkpoint(str(config.init_from), config.runs_dir)
    for path, reason in passed_over:
        console.print(Text(f"passed over {path.name}: {reason}"))
    built.optimizer.load_weights(load_weights(found, built.model))
    console.print(f"weights from {found.path}, step {found.step:,}; optimizer and data start anew", highlight=False)


def train(
    config: RunConfig,
    built: Built,
    run: RunFolder,
    writer: RunWriter,
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
        with Signals() as signals:
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
            )
            if state:
                trainer.skips.load(state)
            trainer.train(save_first=save_first)
    except Preempted as asked:
        writer.event("preempted", step=at.step, tokens=at.tokens, signal=asked.name, reason=str(asked))
        go_on = f"python train.py resume={run.path.name}"
        console.print(f"{asked} at step {at.step:,}, all saved; go on with: {go_on}", highlight=False)
        raise
    except BaseException as error:
        reason = str(error).split("\n")[0][:500]
        with suppress(OSError):  # the disk may be what failed; then the error itself must tell
            writer.event("failed", step=at.step, tokens=at.tokens, error=type(error).__name__, reason=reason)
        raise
    writer.event("done", step=position.step, tokens=position.tokens)
    console.print(f"done: {position.tokens:,} tokens in {position.step:,} steps, in {run.path}", highlight=False)


def build(config: RunConfig, lr: float | None) -> Built:
    """Data, model, plan and optimizer. `lr` is the peak rate that a resumed run keeps.

    Raises:
        ValueError: for anything in the configuration or the data that does not fit together.
    """
    config.track.sinks()  # one that is missing is missed before anything is written
    device = choose_device(config.train.device)
    set_numerics(config.train.deterministic, config.train.threads)
    packing = config.data.packing
    plan = make_plan(config.train, config.optim, config.checkpoint, packing.context, lr, packing.ladder)
    train_set, valid_set = open_split(config.data, "train"), open_split(config.data, "valid")
    check_held_out(train_set, valid_set)
    stream = open_stream(config, plan, train_set, train_set.path)
    model = LanguageModel(config.model, train_set.vocab_size, config.train.seed).to(device)
    optimizer = Optimizer(
        dict(model.named_parameters()), model.roles(), config.optim, lr=plan.lr, compile=config.train.compile
    )
    return Built(plan, model, optimizer, stream, train_set, valid_set)


def describe(config: RunConfig, built: Built, console: Console) -> None:
    """Everything derived, before it costs anything."""
    device = built.optimizer.device
    s = config.model
    console.print(
        facts(
            f"{config.name}: {s.layers} layers ({s.kinds().count('global')} global, "
            f"{s.layers - s.kinds().count('global')} {s.local}), width {s.width:,}, vocabulary {built.model.vocab_size:,}",
            {
                "device": f"{device_name(device)} ({device})",
                "numerics": f"{s.dtype} compute on float32 masters, MLP in {'FP8' if s.mlp_precision == 'fp8' else s.dtype}"
                + (", deterministic" if config.train.deterministic else "")
                + (", compiled" if config.train.compile else ""),
                "engines": f"attention {attention.resolve(s.attention_engine, device, DTYPES[s.dtype], s.head_dim)}, "
                f"delta rule {delta_engine(s, device)}, convolution {conv_engine(s, device)}, "
                f"attention residuals {depth_engine(s, device)}, head {loss_head.resolve(s.head_engine, device)}",
                "residual factor": f"{built.model.layers[0].factor:g}",
                "data": f"{config.data.path}, {len(built.train):,} documents, held out {len(built.valid):,}",
            },
        )
    )
    console.print(size_table(built.model.sizes()))
    console.print(routing_table(built.optimizer.routing()))
    console.print(plan_table(built.plan))
    show_plan(describe_plan(built.stream, console), config.train.micro_batch_tokens, console)


def delta_engine(s: ModelSettings, device: torch.device) -> str:
    """Engine of the linear-attention layers."""
    if s.local == "window":
        return "not used"
    return delta_rule.resolve(
        s.delta_engine,
        device=device,
        dtype=DTYPES[s.dtype],
        head_dim=s.delta_head_dim,
        bounded=s.delta_gate == "bounded",
        scalar_gate=s.local == "gdn",
    )


def conv_engine(s: ModelSettings, device: torch.device) -> str:
    """Engine of the linear-attention layers' convolution."""
    return "not used" if s.local == "window" else short_conv.resolve(s.conv_engine, device, s.delta_head_dim)


def depth_engine(s: ModelSettings, device: torch.device) -> str:
    """Engine of the attention residuals."""
    return depth_mix.resolve(s.depth_engine, device) if s.depth_block else "off"


def check_same_data(state: dict[str, Any], built: Built, found: Checkpoint) -> None:
    """Raises ValueError where the rows so far would not be the ones that this run has seen."""
    stream = built.stream
    if stream.dataset.tokenizer_hash != state["tokenizer"]:
        raise ValueError(
            f"{stream.dataset.path} was tokenized with another tokenizer than {found.path} was trained with: "
            "point data.path at the run's own dataset"
        )
    if stream.key_until(state["row"]) != state["stream"]:
        if built.plan.tokens != state["planned_tokens"] and stream.phase_of(stream.planned_rows) > 1:
            raise ValueError(
                f"train.tokens={built.plan.tokens} would move the start of a phase or rung that began before {found.path}: "
                f"leave the plan at {state['planned_tokens']}, or start a new run with init_from="
            )
        raise ValueError(
            f"{stream.dataset.path} or its order is not what {found.path} was trained on (text, seed, mixture or packing): "
            "point data.path at the run's own dataset, or start a new run with init_from="
        )


def make_receipt(
    config: RunConfig,
    built: Built,
    run: RunFolder,
    found: Checkpoint | None,
    state: dict[str, Any],
    position: Position,
    verify: str,
    rejected: int,
) -> dict[str, str]:
    """What a resume says it goes on from."""
    plan = built.plan
    receipt = {
        "run": str(run.path),
        "checkpoint": str(found.path) if found else "none yet: starts again at step 0",
        "step": f"{position.step:,} of {plan.steps:,}",
        "tokens": f"{position.tokens:,} of {plan.tokens:,}",
        "data position": f"row {position.row:,}",
        "rate": f"peak {rate(plan.lr)}, next step {plan.rate(min(position.step, plan.steps - 1)):.6g}",
    }
    threads = run.record["hardware"]["cpus"]
    if built.optimizer.device.type == "cpu" and threads != torch.get_num_threads():
        receipt["threads"] = (
            f"{torch.get_num_threads()} now, {threads} at the start: sums are grouped otherwise, so the last digits of all "
            f"that follows can differ; train.threads or OMP_NUM_THREADS={threads} avoids it"
        )
    if found:
        how = "sizes and sha256" if verify == "sha256" else "sizes"
        receipt["verified"] = (
            f"{how} of {len(found.manifest['files'])} files, shapes of {len(found.manifest['model'])} tensors, "
            "tokenizer, order of the data so far" + (f"; {rejected} newer passed over" if rejected else "")
        )
        if state["planned_tokens"] != plan.tokens:
            receipt["plan"] = (
                f"{state['planned_tokens']:,} tokens before, {plan.tokens:,} now; the peak rate stays {rate(plan.lr)}"
            )
            if config.optim.lr is None:
                law = learning_rate(plan.tokens, plan.batch_tokens, config.optim)
                receipt["plan"] += f" (the law gives {rate(law)} for the new plan)"
    return receipt


def record(config: RunConfig, built: Built) -> dict[str, Any]:
    """run.json: what the run is, written once."""
    device = built.optimizer.device
    hardware: dict[str, Any] = {
        "device": device_name(device),
        "host": platform.node(),
        "cpus": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {
            "memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return {
        "config": to_plain(config),
        "config_hash": config_hash(config),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "versions": {"python": platform.python_version()} | installed_versions(),
        "seed": config.train.seed,
        "planned_tokens": built.plan.tokens,
        "steps": built.plan.steps,
        "lr": built.plan.lr,
        "sizes": built.model.sizes(),
        "routing": [{key: value if not isinstance(value, tuple) else list(value) for key, value in row.items()}
                    for row in built.optimizer.routing()],
        "dataset": {"path": str(built.train.path), "fingerprint": built.train.fingerprint, "valid": built.valid.fingerprint},
        "stream": built.stream.key,
        "hardware": hardware,
        "free_disk": shutil.disk_usage(config.runs_dir if Path(config.runs_dir).exists() else ".").free,
    }  # fmt: skip


def installed_versions() -> dict[str, str]:
    """Versions of the packages that can change a run's numbers."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
