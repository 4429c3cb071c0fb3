"""What a run says of itself: the tables before it, the receipt of a resume, and run.json."""

import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dwslm.cli.build import Built, machine_memory
from dwslm.cli.engines import slower
from dwslm.cli.find import commit, installed
from dwslm.cli.plan_data import describe_plan, show_plan
from dwslm.config import RunConfig, config_hash, to_plain
from dwslm.optim.schedule import learning_rate
from dwslm.runs import reader
from dwslm.runs.folder import RunFolder
from dwslm.train.checkpoint import Checkpoint
from dwslm.train.device import device_name
from dwslm.train.dry_run import estimate
from dwslm.train.loop import Position
from dwslm.train.report import facts, gigabytes, plan_table, rate, routing_table, size_table

PACKAGES = ("dwslm", "torch", "triton", "numpy", "safetensors", "tokenizers", "hydra-core", "fla-core", "flash-attn",
            "nvidia-cudnn-frontend", "transformer-engine")  # fmt: skip


def describe(config: RunConfig, built: Built, console: Console) -> None:
    """Everything derived, before it costs anything."""
    device = built.optimizer.device
    s = config.model
    console.print(
        facts(
            f"{config.name}: {s.layers} layers ({s.kinds().count('global')} global, "
            f"{s.layers - s.kinds().count('global')} {s.local}), width {s.width:,}, vocabulary {built.model.vocab_size:,}",
            {
                "device": f"{device_name(device)} ({device})"
                + (f", one on each of {built.plan.world} ranks" if built.plan.world > 1 else ""),
                "numerics": f"{s.dtype} compute on float32 masters, MLP in "
                + (s.dtype if s.mlp_precision == "model" else s.mlp_precision)
                + ("" if s.projection_precision == "model" else f", projections in {s.projection_precision}")
                + ("" if s.head_precision == "model" else f", head in {s.head_precision}")
                + (", deterministic" if config.train.deterministic else "")
                + (", compiled" if config.train.compile else ""),
                "engines": ", ".join(f"{part} {name}" for part, name in built.engines.items() if name != "not used"),
                **({"left out": left} if (left := slower(s, device, built.engines)) else {}),
                "residual factor": f"{s.residual_factor:g}",
                "data": f"{config.data.path}, {len(built.train):,} documents, held out {len(built.valid):,}",
            },
        )
    )
    console.print(size_table(built.model.sizes()))
    console.print(routing_table(built.optimizer.routing()))
    console.print(plan_table(built.plan))
    show_plan(describe_plan(built.stream, console), built.plan.micro_batch_tokens, console)


def check_memory(config: RunConfig, built: Built) -> None:
    """A run that found no GPU and is too large for this machine's CPU ends here, not in hours or in swap.

    Raises:
        ValueError: where nobody asked for the CPU and the memory estimate is above the machine's memory.
    """
    if config.train.device != "auto" or built.optimizer.device.type != "cpu":
        return
    needed = sum(estimate(built.model, built.optimizer, built.plan.micro_batch_tokens).values())
    if needed > (there := machine_memory()):
        raise ValueError(
            f"no GPU is here, and on a CPU this run needs {gigabytes(needed)} or more, of which there are {gigabytes(there)}: "
            "take a small one such as experiment=demo, or train.device=cpu if this is meant"
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
    if other := other_engines(run, built):
        receipt["engines"] = (
            f"{other}: sums are grouped otherwise, so the last digits of all that follows can differ; see versions in run.json "
            "and the resume events"
        )
    if found and found.world != plan.world:
        receipt["ranks"] = (
            f"{found.world} before, {plan.world} now, {plan.grad_accum} micro-batches on each: the same data, the optimizer's "
            "state dealt anew; sums are grouped otherwise, so the last digits of all that follows can differ"
        )
    if found:
        before = state.get("micro_batch_tokens", state["config"]["train"]["micro_batch_tokens"])
        if before != plan.micro_batch_tokens:
            receipt["micro-batch"] = (
                f"{before:,} tokens before, {plan.micro_batch_tokens:,} now: sums are grouped otherwise, so the last digits of "
                "all that follows can differ"
            )
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


def other_engines(run: RunFolder, built: Built) -> str:
    """Where another engine trains than at the start before this one, in words; "" where none does, or where a run from before
    they were kept does not tell."""
    kept = [run.record, *(event for event in reader.events(run) if event["event"] == "resume")]
    before: dict[str, str] = next((row["engines"] for row in reversed(kept) if "engines" in row), {})
    return "; ".join(
        f"{part} {before[part]} before, {name} now"
        for part, name in built.engines.items()
        if before.get(part, name) != name
    )


def made_with(built: Built) -> dict[str, Any]:
    """The code of one start and what it runs on: run.json tells it of the first, resume events of the others."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version()} | installed(PACKAGES),
        "engines": built.engines,
    }


def record(config: RunConfig, built: Built) -> dict[str, Any]:
    """run.json: what the run is, written once."""
    device = built.optimizer.device
    hardware: dict[str, Any] = {
        "device": device_name(device),
        "host": platform.node(),
        "cpus": torch.get_num_threads(),
        "ranks": built.plan.world,
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
        **made_with(built),
        "seed": config.train.seed,
        "planned_tokens": built.plan.tokens,
        "steps": built.plan.steps,
        "lr": built.plan.lr,
        "micro_batch_tokens": built.plan.micro_batch_tokens,
        "sizes": built.model.sizes(),
        "routing": [{key: value if not isinstance(value, tuple) else list(value) for key, value in row.items()}
                    for row in built.optimizer.routing()],
        "dataset": {"path": str(built.train.path), "fingerprint": built.train.fingerprint, "valid": built.valid.fingerprint},
        "stream": built.stream.key,
        "hardware": hardware,
        "free_disk": shutil.disk_usage(config.runs_dir if Path(config.runs_dir).exists() else ".").free,
    }  # fmt: skip
