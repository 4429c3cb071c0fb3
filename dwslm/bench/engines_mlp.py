"""Feed-forward engines that training does not use: NVIDIA's Transformer Engine. Imported when asked for."""

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dwslm.bench.case import Run
from dwslm.ops.segments import Segments


def transformer_engine(width: int, hidden: int) -> Run:
    """Two of its linear layers in FP8 (current scaling, one scale a tensor) around a squared ReLU.

    Raises:
        ValueError: where it cannot be imported.
    """
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        recipe = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise ValueError(f"transformer_engine cannot be used ({error})") from error
    up, down = (
        te.Linear(n, m, bias=False, params_dtype=torch.bfloat16, device="cuda")
        for n, m in ((width, hidden), (hidden, width))
    )

    def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        x, up_weight, down_weight = inputs
        # The layers own their weights; here they are inputs, whose gradients are asked for.
        up._parameters["weight"], down._parameters["weight"] = up_weight, down_weight
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return (down(up(x).relu().square()),)

    return run
