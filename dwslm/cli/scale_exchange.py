"""`torchrun --nproc-per-node=2 --no-python dwslm scale --exchange`: how fast a model's shares travel between these ranks."""

import json
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from dwslm.cli.ranks import meet
from dwslm.cli.scale_tables import case_of
from dwslm.train.device import device_name
from dwslm.train.scale import FLOAT, Dealt

WARM, TIMED = 3, 10


def exchange(settings: Sequence[str], vocab_size: int) -> None:
    """Prints, on rank 0, one JSON object: bytes a second through each rank's links, and seconds, of both collectives alone.

    Raises:
        ValueError: for one process alone, or a device that is not there.
    """
    with meet() as ranks:
        if ranks.world == 1:
            raise ValueError(
                "--exchange needs ranks: start it with torchrun --nproc-per-node=2 --no-python dwslm scale --exchange"
            )
        device = ranks.choose_device("auto")
        dealt = Dealt(case_of("exchange", settings, vocab_size).model, ranks.world)
        gradient = torch.zeros(ranks.world * dealt.share, device=device)
        copies = [torch.zeros(ranks.world * size, dtype=torch.uint8, device=device) for size in dealt.sent]

        def gather() -> None:
            for flat in copies:
                ranks.gather(flat)

        scatter_seconds = seconds(lambda: ranks.scatter_sum(gradient), device)
        gather_seconds = seconds(gather, device)
        found = {
            "device": device_name(device),
            "ranks": ranks.world,
            "scatter_rate": dealt.scatter_bytes / scatter_seconds,
            "gather_rate": dealt.gather_bytes / gather_seconds,
            "scatter_seconds": scatter_seconds,
            "gather_seconds": gather_seconds,
            "share_bytes": FLOAT * dealt.share,
        }
        if ranks.leads:
            print(json.dumps(found))


def seconds(call: Callable[[], None], device: torch.device) -> float:
    """Median of calls one after the other, each waited for."""
    taken = []
    for _ in range(WARM + TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return median(taken[WARM:])
