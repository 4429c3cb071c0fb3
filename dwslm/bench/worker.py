"""The measuring process: owns the device, answers one request at a time.

A kernel that breaks takes its whole CUDA context with it, and one that tunes itself cannot be interrupted. So rows are measured
in a process of their own (`python -m dwslm.bench.worker`) that can be ended and started again, over lines of JSON on its standard
input and output. What libraries print goes to standard error.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dwslm.bench.measure import Bench
from dwslm.bench.request import Request

SHAPES = 256
"""Compiled shapes that one piece of code may have; PyTorch's own limit counts all engines that share a wrapper together."""


class Worker:
    """Answers messages: "open" (with a request), "ceilings", "row" (with a job). Every answer is a dict."""

    def __init__(self) -> None:
        self.bench: Bench | None = None

    def answer(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The answers to one message, the last one marked "done"."""
        if message["do"] == "open":
            self.bench = Bench(Request.from_json(message["request"]))
            yield {"machine": describe_device(self.bench.device), "catalogue": self.bench.catalogue(), "done": True}
            return
        assert self.bench is not None
        if message["do"] == "ceilings":
            yield {"ceilings": self.bench.ceilings(), "done": True}
            return
        for row in self.bench.rows(message["job"]):
            yield {"row": row, "done": False}
        yield {"done": True, "broken": broken(self.bench.device)}


def broken(device: torch.device) -> str | None:
    """Why nothing more can be measured in this process, or None: a CUDA error stays for good."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
        # From the default generator, which a recording that broke off may have left unusable.
        assert bool(torch.randn(1024, device=device).isfinite().all())
    except Exception as error:
        return " ".join(str(error).split())[:300]
    return None


def describe_device(device: torch.device) -> dict[str, Any]:
    """What torch knows of the device."""
    if device.type != "cuda":
        return {"device": "CPU", "uuid": None, "threads": torch.get_num_threads()}
    p = torch.cuda.get_device_properties(device)
    return {
        "device": p.name,
        "uuid": str(p.uuid),
        "memory_bytes": p.total_memory,
        "l2_bytes": p.L2_cache_size,
        "multiprocessors": p.multi_processor_count,
        "capability": f"{p.major}.{p.minor}",
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Serves standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    torch._dynamo.config.recompile_limit = SHAPES
    torch._dynamo.config.accumulated_recompile_limit = SHAPES
    worker = Worker()
    for line in sys.stdin:
        try:
            for answer in worker.answer(json.loads(line)):
                print(json.dumps(answer), file=answers, flush=True)
        except (ValueError, OSError) as error:  # the user's mistake: the parent says it in one line
            print(json.dumps({"done": True, "wrong": str(error)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
