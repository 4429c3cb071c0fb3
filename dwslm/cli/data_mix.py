"""`dwslm data mix`: what a mixture will serve, before a GPU is paid for."""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from rich.console import Console

from dwslm.cli.errors import make_console
from dwslm.cli.find import open_split
from dwslm.cli.plan_data import describe_plan, open_data, open_stream, show_plan
from dwslm.config import CONFIGS, RunConfig, register, to_object
from dwslm.data.describe import check_epochs, share_errors
from dwslm.data.loader import Loader
from dwslm.train.plan import Plan, make_plan
from dwslm.train.report import count, facts

MEASURED_SECONDS = 3.0


def add_arguments_mix(parser: argparse.ArgumentParser) -> None:
    """What `dwslm data mix` takes."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="SETTING",
        help="as for train.py: experiment=main, data.path=data/corpus, data.mixture.anneal.sources=[books], ...",
    )
    parser.add_argument("--config-dir", help="a folder of your own with experiment/NAME.yaml, as for train.py")
    parser.add_argument("--cache", help="folder for the count of rows; beside the dataset unless given")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    parser.add_argument(
        "--measure", action="store_true", help="also time the loader on this machine, from the start of each rung"
    )
    parser.add_argument(
        "--shares",
        type=float,
        metavar="TOKENS",
        help="also lay out so many tokens of each rung, and say how far shares are from the weights over any 20M and 500M",
    )


def run_mix(arguments: argparse.Namespace) -> int:
    """Prints tokens and epochs by source and phase, and rows and padding by rung.

    Raises:
        ValueError: for whatever a run with these settings would be refused for, where it is in the data.
    """
    if arguments.shares is not None and not 1 <= arguments.shares < math.inf:
        raise ValueError(f"--shares {arguments.shares:g}: must be a number of tokens, 1 or more")
    config = composed(arguments.overrides, arguments.config_dir)
    console = Console(stderr=True, soft_wrap=True) if arguments.json else make_console()
    packing = config.data.packing
    # The rate plays no part here, and a plan outside its law has one all the same.
    plan = make_plan(
        config.train, config.optim, config.checkpoint, packing.context, config.optim.lr or 0.0, packing.ladder
    )
    train, _ = open_data(config, console)
    cache = Path(arguments.cache) if arguments.cache else train.path

    started = time.perf_counter()
    stream = open_stream(config, plan, train, cache)
    description = describe_plan(stream, console)
    counted = time.perf_counter() - started
    measured = {}
    if arguments.measure:
        measured = measure(config, plan, cache) | {"count_seconds": counted}
    errors = share_errors(stream, int(arguments.shares)) if arguments.shares else []
    if arguments.json:
        extra = ({"measured": measured} if measured else {}) | ({"share_errors": errors} if arguments.shares else {})
        print(json.dumps(description | extra, indent=1))
        check_epochs(description)
        return 0
    if measured:
        console.print(facts("Loader, on one core", _said(measured)))
    if errors:
        console.print(facts("Shares, worst difference from the weights", _said_shares(errors)))
    show_plan(description, plan.micro_batch_tokens, console)
    return 0


def composed(settings: list[str], config_dir: str | None) -> RunConfig:
    """The configuration that train.py would run with these settings."""
    register()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_object(compose("config", overrides=[*search, *settings]), RunConfig)


def measure(config: RunConfig, plan: Plan, cache: Path | None) -> dict[str, float]:
    """Times the loader alone: nothing is computed with what it serves.

    Returns seconds to the first batch, with the dataset opened anew and the rows counted before; for each context the
    tokens that were packed and ready, in a second and in a second of processor time (another process on the same core
    makes the two differ); and the memory in MiB of this process, which is more than a loader needs, and that which the
    loader has added.
    """
    before, started = _resident_mib(), time.perf_counter()
    stream = open_stream(config, plan, open_split(config.data, "train"), cache)
    figures: dict[str, float] = {}
    for first_row, leg in zip(stream.first_rows, stream.legs, strict=True):
        tokens = plan.micro_batch_tokens
        with Loader(
            stream, first_row=first_row, micro_batch_tokens=tokens, grad_accum=plan.grad_accum, depth=1
        ) as loader:
            next(loader)
            figures.setdefault("first_batch_seconds", time.perf_counter() - started)
            began, processor, steps = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < MEASURED_SECONDS:
                next(loader)
                steps += 1
            served = steps * plan.batch_tokens
            figures[f"tokens_per_second_{leg.context}"] = served / (time.perf_counter() - began)
            figures[f"tokens_per_processor_second_{leg.context}"] = served / (time.process_time() - processor)
    return figures | {"resident_mib": _resident_mib(), "loader_mib": _resident_mib() - before}


def _said_shares(errors: list[dict[str, Any]]) -> dict[str, str]:
    return {
        f"context {row['context']:,}, any {count(row['stretch'])} tokens": f"{row['worst']:.3%} of the tokens, over "
        f"{row['stretches']:,} stretches"
        for row in errors
    }


def _resident_mib() -> float:
    """Memory of this process that is resident, in MiB, 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def _said(figures: dict[str, float]) -> dict[str, str]:
    said = {
        "count of the rows": f"{figures['count_seconds']:.1f} s (what was counted before takes none)",
        "first batch": f"{figures['first_batch_seconds']:.2f} s after opening the dataset",
    }
    for name, figure in figures.items():
        if name.startswith("tokens_per_second_"):
            context = name.rpartition("_")[2]
            processor = figures[f"tokens_per_processor_second_{context}"]
            said[f"context {int(context):,}"] = (
                f"{count(figure)} tokens a second packed and ready, {count(processor)} a second of processor time"
            )
    memory = f"{figures['resident_mib']:.0f} MiB resident, {figures['loader_mib']:.0f} MiB of it since the loader began"
    return said | {"memory": memory}
