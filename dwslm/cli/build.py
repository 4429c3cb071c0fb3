"""What a run is made of, built and checked from its configuration."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dwslm.cli.engines import PARTS, engines
from dwslm.cli.plan_data import open_data, open_stream
from dwslm.cli.ranks import rank_console
from dwslm.config import RunConfig
from dwslm.data.packing import RowStream
from dwslm.data.shards import Dataset
from dwslm.model.lm import LanguageModel
from dwslm.optim.groups import memory_bytes, route
from dwslm.optim.optimizer import Optimizer
from dwslm.train.checkpoint import Checkpoint
from dwslm.train.device import set_numerics
from dwslm.train.distributed import Ranks
from dwslm.train.dry_run import estimate
from dwslm.train.micro_batch import SHARE, largest_that_fits
from dwslm.train.plan import Plan, make_plan
from dwslm.train.report import gigabytes
from dwslm.train.settings import AUTO

COUNTED_FUSED = ("attention", "delta rule")
"""Parts whose plain form keeps several times what `dwslm.train.dry_run` counts for their kernels."""


@dataclass
class Built:
    """What a run is made of, on its device."""

    plan: Plan
    model: LanguageModel
    optimizer: Optimizer
    stream: RowStream
    train: Dataset
    valid: Dataset
    engines: dict[str, str]
    """Part of the model -> its kernel."""


def build(config: RunConfig, lr: float | None, ranks: Ranks | None = None) -> Built:
    """Data, model, plan and optimizer. `lr` is the peak rate that a resumed run keeps; without `ranks` this process is alone.

    Raises:
        ValueError: for anything in the configuration or the data that does not fit together.
    """
    config.track.sinks()  # one that is missing is missed before anything is written
    ranks = ranks or Ranks()
    device = ranks.choose_device(config.train.device)
    set_numerics(config.train.deterministic, config.train.threads)
    if config.train.record and device.type != "cuda":
        raise ValueError(f"train.record=true needs an NVIDIA GPU, and this run is on {device}: set train.record=null")
    packing = config.data.packing
    plan = make_plan(config.train, config.optim, config.checkpoint, packing.context, lr, packing.ladder, ranks.world)
    auto = config.train.micro_batch_tokens == AUTO
    sizes = plan.candidates() if auto else [plan.micro_batch_tokens]
    found = engines(config.model, device, sizes[0])
    if auto:
        check_counted(config, device, found)
    train_set, valid_set = open_data(config, rank_console(ranks))
    stream = open_stream(config, plan, train_set, train_set.path)
    check_size(config, train_set.vocab_size, trains_here=device.type == "cpu" and ranks.world == 1)
    model = LanguageModel(config.model, train_set.vocab_size, config.train.seed).to(device)
    optimizer = Optimizer(
        dict(model.named_parameters()),
        model.roles(),
        config.optim,
        lr=plan.lr,
        compile=config.train.compile,
        extra=model.extra_state(),
        ranks=ranks if ranks.world > 1 else None,
    )
    if auto:
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        plan = plan.with_micro_batch(micro_batch_of_all(sizes, model, optimizer, memory, ranks))
    return Built(plan, model, optimizer, stream, train_set, valid_set, found)


def check_size(config: RunConfig, vocab_size: int, trains_here: bool) -> None:
    """Refuses a model that this machine's memory cannot hold, before it is made there.

    trains_here: it stays there, with gradients and the optimizer's state, and not its weights alone for a while.

    Raises:
        ValueError: with both sizes.
    """
    with torch.device("meta"):
        shapes = LanguageModel(config.model, vocab_size)
    parameters = dict(shapes.named_parameters())
    what, needed = "weights alone take", sum(parameter.nbytes for parameter in parameters.values())
    if trains_here:
        held = memory_bytes(route(parameters, shapes.roles(), config.optim))
        what, needed = "weights, gradients and optimizer take", needed + sum(held.values()) - held["update"]
    if needed > (there := machine_memory()):
        raise ValueError(
            f"the model's {what} {gigabytes(needed)}, and this machine has {gigabytes(there)} of memory: make model.layers, "
            "model.width or another size of it smaller"
        )


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_counted(config: RunConfig, device: torch.device, found: Mapping[str, str]) -> None:
    """Refuses `auto` for a build on a GPU that is not the one whose memory is counted: compiled, with fused kernels.

    found: part of the model -> its engine, as `engines` gives them.

    Raises:
        ValueError: naming the setting.
    """
    if device.type != "cuda":
        return
    begin, number = (
        "train.micro_batch_tokens=auto counts the memory of a",
        "or give a number for train.micro_batch_tokens",
    )
    if not config.train.compile:
        raise ValueError(f"{begin} compiled build, and train.compile is false: set train.compile=true, {number}")
    for part in COUNTED_FUSED:
        if found[part] == "torch":
            setting = PARTS[part]
            raise ValueError(
                f"{begin} fused build, and model.{setting}={getattr(config.model, setting)} comes to plain torch here, which "
                f"keeps several times as much: take another engine, {number}"
            )


def micro_batch_of_all(
    sizes: Sequence[int], model: LanguageModel, optimizer: Optimizer, memory: int | None, ranks: Ranks
) -> int:
    """What `auto` comes to: the smallest of the ranks' own choices, since each of them divides alike.

    sizes: candidates, largest first. memory: bytes of this rank's device, None for a CPU.

    Raises:
        ValueError: on every rank, where any of them has room for none; it tells of the one that lacks most.
    """

    def needed(tokens: int) -> int:
        return sum(estimate(model, optimizer, tokens).values())

    least = sizes[-1]
    own = np.zeros((3, ranks.world), np.int64)
    own[:, ranks.rank] = largest_that_fits(sizes, needed, memory) or 0, memory or 0, needed(least)
    chosen, memories, needs = ranks.total(own)
    if not chosen.all():
        worst = int(np.where(chosen == 0, needs - SHARE * memories, -np.inf).argmax())
        where = f" on rank {worst}" if ranks.world > 1 else ""
        raise ValueError(
            f"train.micro_batch_tokens=auto finds none that fits: {least:,} tokens, the least that batch and contexts allow, "
            f"need about {gigabytes(int(needs[worst]))}{where}, more than {SHARE:.0%} of a GPU's "
            f"{gigabytes(int(memories[worst]))}; take a smaller model or shorter rows, or give a number to try it all the same"
        )
    return int(chosen.min())


def check_same_data(state: dict[str, Any], built: Built, found: Checkpoint) -> None:
    """Raises ValueError where the rows so far would not be the ones that this run has seen."""
    stream = built.stream
    if stream.dataset.tokenizer_hash != state["tokenizer"]:
        raise ValueError(
            f"{stream.dataset.path} was tokenized with another tokenizer than {found.path} was trained with: "
            "point data.path at the run's own dataset"
        )
    row, planned = state["row"], state["planned_tokens"]
    before = stream if built.plan.tokens == planned else stream.with_plan(planned)
    if before.key_until(row) != state["stream"]:
        raise ValueError(
            f"{stream.dataset.path} or its order is not what {found.path} was trained on (text, seed, mixture or packing): "
            "point data.path at the run's own dataset, or start a new run with init_from="
        )
    if before is not stream and before.key_served(row) != stream.key_served(row):  # which counts rows
        raise ValueError(
            f"train.tokens={built.plan.tokens} would move the start of a phase or rung that began before {found.path}: "
            f"leave the plan at {planned}, or start a new run with init_from="
        )
