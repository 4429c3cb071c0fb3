"""`dwslm preflight experiment=main`: refuses an unfit machine or dataset before minute one, and says why."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.text import Text

from dwslm.cli import child, preflight_step
from dwslm.cli.errors import make_console
from dwslm.cli.find import open_split
from dwslm.cli.launch import Built, build
from dwslm.cli.plan_data import describe_plan
from dwslm.cli.prepare import prepare_sample
from dwslm.cli.run import VISIBLE, visible
from dwslm.config import CONFIGS, SAMPLE_DATA, RunConfig, register, to_object
from dwslm.data.describe import check_epochs
from dwslm.data.tokenizer import load_tokenizer
from dwslm.machine.health import Gpu, list_gpus
from dwslm.machine.lease import Lease, Taken
from dwslm.machine.preflight import (
    FAILED,
    OK,
    SKIPPED,
    WARNING,
    Check,
    check_disk,
    check_gpu,
    fit,
)
from dwslm.train import checkpoint as checkpoints
from dwslm.train.device import choose_device
from dwslm.train.report import count

EPOCHS_FAILED = 40.0
"""Text that was read so often teaches nothing more (arXiv 2305.16264)."""
ROW_BYTES = 500  # of a row of metrics


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "preflight",
        help="check machine, dataset, saving and one step at full size before a run",
        description="Takes the words that would follow `python train.py`. Exit code 0 where the run may start, else 1.",
    )
    parser.add_argument("overrides", nargs="*", metavar="name=value")
    parser.add_argument("--clock-cap", type=int, metavar="MHZ", help="the cap that the GPU's clock should have")
    parser.add_argument("--quick", action="store_true", help="sizes of shards instead of checksums")
    parser.add_argument("--config-dir", metavar="DIR", help="as in train.py: a folder of experiments of your own")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    console = make_console()
    config = composed(arguments.overrides, arguments.config_dir)
    child.begin(console)
    if config.data.path == SAMPLE_DATA and not Path(SAMPLE_DATA, "train", "manifest.json").is_file():
        prepare_sample(console)
    checks: list[Check] = []
    for check in preflight(config, arguments.clock_cap, arguments.quick, console):
        checks.append(check)
        console.print(line(check))  # at once: some take minutes
    failed = [check.name for check in checks if check.status == FAILED]
    if not fit(checks):
        console.print(Text(f"unfit: {', '.join(failed)}"))
        sys.exit(1)
    console.print("fit for the run")


def composed(overrides: list[str], folder: str | None) -> RunConfig:
    """The configuration that train.py would make of these words.

    Raises:
        ValueError: for a resume, which has checks of its own.
    """
    register()
    search = [f"hydra.searchpath=[file://{Path(folder).resolve()}]"] if folder else []
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = to_object(compose("config", [*overrides, *search]), RunConfig)
    if config.resume is not None:
        raise ValueError(
            "preflight is for a new run; a resume is checked with `python train.py resume=RUN dry_run=true`"
        )
    return config


def line(check: Check) -> Text:
    colour = {FAILED: "bold red", WARNING: "yellow", SKIPPED: "dim", OK: "green"}
    return Text.assemble((f"{check.status:>7}", colour[check.status]), f"  {check.name}: {check.said}")


def preflight(config: RunConfig, clock_cap: int | None, quick: bool, console: Console) -> Iterator[Check]:
    """All checks, each as soon as it is done. One that cannot be made since another failed is left out with the reason."""
    gpu = lease = None
    try:
        device = choose_device(config.train.device)
        if device.type == "cuda":
            gpu, lease, machine = leased(device)
        else:
            machine = [on_a_cpu(config)]
    except ValueError as error:
        device, machine = torch.device("cpu"), [Check("device", FAILED, str(error))]
    yield from machine
    try:
        if clock_cap is not None and gpu is None:
            yield Check("clock cap", SKIPPED, "no GPU whose clock could be checked")
        yield check_cache()
        data = list(check_data(config, quick))
        yield from data
        if not fit([*machine, *data]):
            yield Check("the rest", SKIPPED, "model, saving and one step need a fit machine and dataset")
            return
        with watched("model and plan") as caught:
            built = build(config, lr=None)
        if caught:
            yield from caught
            yield Check("the rest", SKIPPED, "saving and one step need the model")
            return
        yield from check_text(config, built, console)
        yield check_space(config, built)
        yield from check_saving(config, built)
        yield from (
            preflight_step.on_gpu(config, built, gpu, clock_cap)
            if device.type == "cuda"
            else preflight_step.on_cpu(config, built)
        )
    finally:
        if lease is not None:
            lease.release()


@contextmanager
def watched(name: str) -> Iterator[list[Check]]:
    """Collects what is raised inside as a failed check."""
    caught: list[Check] = []
    try:
        yield caught
    except (ValueError, OSError) as error:
        caught.append(Check(name, FAILED, " ".join(str(error).split())))


# ---- machine --------------------------------------------------------------------------------------------


def on_a_cpu(config: RunConfig) -> Check:
    """A run on a CPU, which is meant or is not."""
    gpus = list_gpus() if config.train.device == "auto" else []
    if gpus:
        told = f"driver {gpus[0].facts()['driver']} shows {len(gpus)} GPUs and torch {torch.__version__} sees none: take a torch "
        return Check("GPU", FAILED, told + "built for CUDA no newer than the driver's, or train.device=cpu")
    told = (
        f"the run computes on a CPU (train.device={config.train.device}): no driver, clocks or memory errors to look at"
    )
    return Check("GPU", SKIPPED, told)


def leased(device: torch.device) -> tuple[Gpu | None, Lease | None, list[Check]]:
    """The GPU that torch would use, its lease, and what the driver says of it."""
    there = visible(list_gpus(), os.environ.get(VISIBLE))
    if not there:
        return None, None, [Check("GPU", WARNING, "nvidia-ml-py finds no GPU that torch sees: no health, no lease")]
    uuid = list(there)[min(device.index or 0, len(there) - 1)]
    if torch.cuda.is_available():  # the driver may count in another order than torch
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        if uuid not in there:
            return None, None, [Check("GPU", WARNING, f"the driver does not know {uuid}: no health, no lease")]
    try:
        lease = Lease(uuid, what="dwslm preflight")
    except Taken as error:
        return None, None, [Check("GPU", FAILED, str(error))]
    there[uuid].watch_xid()
    return there[uuid], lease, check_gpu(there[uuid])


def check_cache() -> Check:
    place = child.cache_root()
    kind = child.file_system(place)
    told = f"{place / child.cache_key()} on {kind or 'a disk'}"
    remote = kind in child.REMOTE
    return Check(
        "compiler cache", WARNING if remote else OK, told + (": a network disk is slow here" if remote else "")
    )


# ---- dataset --------------------------------------------------------------------------------------------


def check_data(config: RunConfig, quick: bool) -> Iterator[Check]:
    data = replace(config.data, verify="size" if quick else "sha256")
    for split in ("train", "valid"):
        started = time.perf_counter()
        with watched(f"dataset {split}") as caught:
            dataset = open_split(data, split)
        yield from caught
        if not caught:
            shards = len(dataset.manifest["shards"])
            told = f"{shards} shard{'s' * (shards != 1)}, {count(dataset.manifest['totals']['tokens'])} tokens, "
            told += "sizes only (--quick)" if quick else f"sha256 of all files in {time.perf_counter() - started:.1f} s"
            yield Check(f"dataset {split}", OK, told)
    with watched("tokenizer") as caught:
        file = Path(data.path, "tokenizer.json")
        tokenizer = load_tokenizer(file)
        text = "Grüße, 世界!\n\tx = 1"
        if tokenizer.decode(tokenizer.encode(text).ids) != text:
            raise ValueError(f"{file} does not give back the text that it was given")
    yield from caught
    if not caught:
        yield Check("tokenizer", OK, f"{file}: the datasets' own, text comes back as it went in")


def check_text(config: RunConfig, built: Built, console: Console) -> Iterator[Check]:
    """Whether there is enough text for the plan."""
    planned, there = built.plan.tokens, built.train.manifest["totals"]["tokens"]
    if planned > EPOCHS_FAILED * there:  # before its rows are counted, which would take as long as it is pointless
        told = f"{count(planned)} tokens planned, {count(there)} there: read {planned / there:,.0f} times"
        yield Check(
            "enough text",
            FAILED,
            f"{told}. After {EPOCHS_FAILED:.0f} times it teaches nothing more; take more text or a shorter plan",
        )
        return
    with watched("enough text") as caught:
        description = describe_plan(built.stream, console)
        check_epochs(description)
    yield from caught
    if not caught:
        most = max((row["epochs"], name) for name, row in description["sources"].items())
        yield Check(
            "enough text",
            OK,
            f"{count(planned)} tokens planned; {most[1]} is read {most[0]:.1f} times, the most of all",
        )
        for warning in description["warnings"]:
            yield Check("enough text", WARNING, warning)


def check_space(config: RunConfig, built: Built) -> Check:
    """Whether the checkpoints that will be kept at once, and the rows, have room."""
    weights = sum(4 * p.numel() for p in built.optimizer.params.values())
    state = sum(t.numel() * t.element_size() for t in built.optimizer.state().values())
    kept = config.checkpoint.keep_last + len(built.plan.pins) + 2  # the best one, and the one being written
    needed = kept * (weights + state) + ROW_BYTES * built.plan.steps // config.train.log_every
    return check_disk(
        Path(config.runs_dir), needed, f"{kept} checkpoints of {(weights + state) / 1e9:.2f} GB, and rows"
    )


def check_saving(config: RunConfig, built: Built) -> Iterator[Check]:
    """A checkpoint of this model written, verified, loaded and compared, where the run would write it."""
    place = Path(config.runs_dir, f".preflight-{os.getpid()}")
    optimizer = built.optimizer
    made = not place.parent.exists()
    with watched("save and load") as caught:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            weights, state = optimizer.weights(), optimizer.state()
            started = time.perf_counter()
            checkpoints.save(place, 0, weights, state, {"step": 0})
            saved = time.perf_counter()
            found, _ = checkpoints.newest_good(place)
            assert found is not None, "what was just saved is there"
            optimizer.load(found.load_model(), found.load_optimizer())
            loaded = time.perf_counter()
            back = optimizer.weights() | optimizer.state()
            for name, tensor in (weights | state).items():
                if not torch.equal(tensor, back[name]):
                    raise ValueError(f"{name} came back otherwise than it was saved in {place}")
            size = sum(file.stat().st_size for file in found.path.iterdir())
        finally:
            shutil.rmtree(place, ignore_errors=True)
            if made:
                place.parent.rmdir()
    yield from caught
    if not caught:
        told = f"{size / 1e6:,.0f} MB saved in {saved - started:.1f} s, verified and loaded in {loaded - saved:.1f} s, equal"
        yield Check("save and load", OK, told)
