"""Loss-head engines that training does not use: Cut Cross-Entropy, and all logits at once under torch.compile."""

import importlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dwslm.bench.case import Run
from dwslm.ops.loss_head import IGNORE
from dwslm.ops.segments import Segments


def cut_cross_entropy(softcap: float, filter_eps: str | None) -> Run:
    """Cut Cross-Entropy (arXiv 2411.09009).

    Args:
        filter_eps: "high", the package's default, leaves out blocks of the gradient below bfloat16's resolution; None does not.

    Raises:
        ValueError: where it cannot be imported.
    """
    try:
        call = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise ValueError(f"cut_cross_entropy cannot be used ({error})") from error

    def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        hidden, weight, targets = inputs
        loss = call(
            hidden, weight, targets, ignore_index=IGNORE, softcap=softcap, reduction="sum", filter_eps=filter_eps
        )
        return (loss,)

    return run


def whole(softcap: float) -> Run:
    """All logits at once, as one would write it down; meant for a compiler."""

    def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        hidden, weight, targets = inputs
        logits = softcap * torch.tanh((hidden @ weight.T).float() / softcap)
        return (F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum"),)

    return run
