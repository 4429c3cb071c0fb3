"""Output head and loss: cross-entropy of soft-capped logits over the vocabulary."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dwslm.bench import engines_head as others
from dwslm.bench.case import FP8, Case, Cost, Engine, Run, Shape, compiled
from dwslm.bench.keep_first import KeepFirst
from dwslm.bench.work import Work
from dwslm.ops.fp8 import new_peaks
from dwslm.ops.loss_head import IGNORE, PEAKS, resolve, total_nats, total_nats_delayed
from dwslm.ops.loss_head.reference import token_nats_reference
from dwslm.ops.segments import Segments

Targets = Callable[[int], Tensor]
"""Tokens to the targets of a real batch of that size, int64, on the CPU."""
MOST_AGREEMENT = 0.8
FP8_BOUNDS = {"loss": 0.01, "dhidden": 0.10, "dweight": 0.10}


def cases(shape: Shape, dtype: torch.dtype, device: torch.device, targets: Targets) -> list[Case]:
    width, vocab, softcap = shape.width, shape.vocab_size, shape.softcap

    def draw(tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
        # Each hidden state points towards its target's row by some share of its length, from none to most of it: a loss of a few
        # nats and gradients as peaked as a trained model's. Engines that leave out small probabilities would else leave out all.
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, device=generator.device, generator=generator)

        target = targets(tokens).to(generator.device)
        weight = normal(vocab, width) * 0.5 * width**-0.5
        agree = MOST_AGREEMENT * torch.rand(tokens, 1, device=generator.device, generator=generator)
        towards = torch.nn.functional.normalize(weight[target.clamp(min=0)], dim=-1) * width**0.5
        hidden = agree * towards + (1 - agree.square()).sqrt() * normal(tokens, width)
        return [hidden.to(dtype), weight.to(dtype), target]

    def reference(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        hidden, weight, targets = inputs
        return (token_nats_reference(hidden, weight, targets, softcap, IGNORE).sum(),)

    def own(name: str) -> Run:
        if name == "compiled" and device.type != "cuda":
            raise ValueError("compiled engines are measured on a GPU only")
        resolve(name, device)

        def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            hidden, weight, targets = inputs
            return (total_nats(hidden, weight, targets, softcap, engine=name),)

        return run

    def delayed() -> Run:
        peaks = new_peaks(len(PEAKS), device)

        def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
            hidden, weight, targets = inputs
            hidden, known = KeepFirst.apply(hidden, peaks)
            return (total_nats_delayed(hidden, weight, targets, softcap, known),)

        return run

    make = functools.partial
    cce = ("cut_cross_entropy", "pip install cut-cross-entropy")
    case = Case(
        op="head",
        name=f"softcap {softcap:g}",
        heads=None,
        inputs=("hidden", "weight", "targets"),
        tokenwise=(True, False, True),
        learnt=(True, True, False),
        outputs=("loss",),
        dtype=dtype,
        draw=draw,
        reference=reference,
        reference_name="all logits at once, float32",
        packed=False,
        cost=lambda work: cost(work, width, vocab, dtype),
        engines=(
            Engine("fused", make(own, "fused")),
            Engine("compiled", make(own, "compiled"), patience=60),
            Engine("whole_compiled", lambda: compiled(others.whole(softcap), device), patience=60),
            Engine("torch", make(own, "torch")),
            Engine("fp8_delayed", delayed, dtype=FP8, bounds=FP8_BOUNDS),
            Engine("cce", make(others.cut_cross_entropy, softcap, "high"), *cce, repeatable=False, patience=60),
            Engine("cce_exact", make(others.cut_cross_entropy, softcap, None), *cce, repeatable=False, patience=60),
        ),
    )
    return [case]


def cost(work: Work, width: int, vocab: int, dtype: torch.dtype) -> Cost:
    """One product of 2 T width vocab forward (logits), two backward. The loss makes both gradients, so bytes are the same for
    either pass: hidden states and matrix in, and backward their gradients out."""
    product = 2.0 * work.tokens * width * vocab
    size = float((work.tokens * width + vocab * width) * dtype.itemsize)
    return Cost(product, 3 * product, size, 2 * size)
