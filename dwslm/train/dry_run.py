"""A run before the run: first batch, one step, and what the whole will need in memory."""

import time

import torch
from rich.console import Console
from torch import Tensor

from dwslm.data.packing import RowStream
from dwslm.model.lm import LanguageModel
from dwslm.optim.groups import memory_bytes
from dwslm.optim.optimizer import Optimizer
from dwslm.train.plan import Plan
from dwslm.train.report import facts, memory_table
from dwslm.train.settings import TrainSettings

CPU_TOKENS = 512  # of the first row: a CPU would need hours for a step of the main model


def dry_run(
    model: LanguageModel,
    optimizer: Optimizer,
    stream: RowStream,
    plan: Plan,
    train: TrainSettings,
    console: Console,
) -> None:
    """Prints the first batch's statistics and a memory estimate, and runs one step whose weights nobody keeps.

    On a CPU the step takes the first `CPU_TOKENS` slots of the first row only, and says so. Activations are counted as
    autograd keeps them in that step and scaled to a micro-batch: an upper estimate for a compiled model.
    """
    batch = stream.batch(0, plan.micro_batch_rows)
    lengths = [b - a for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)]
    text = sorted(n for n, doc in zip(lengths, batch.docs.tolist(), strict=True) if doc >= 0)
    console.print(
        facts(
            "First micro-batch",
            {
                "tokens": f"{len(batch.tokens):,} in {plan.micro_batch_rows} rows of {plan.context:,}",
                "segments": f"{batch.segments} (slots for {len(batch.docs)})",
                "segment lengths": f"{text[0]:,} to {text[-1]:,}, median {text[len(text) // 2]:,}",
                "scored": f"{batch.scored:,} targets ({batch.scored / len(batch.tokens):.2%})",
                "padding": f"{batch.padding:,} slots ({batch.padding / len(batch.tokens):.2%})",
            },
        )
    )
    device = optimizer.device
    context = min(plan.context, CPU_TOKENS) if device.type == "cpu" else plan.context
    size = context if device.type == "cpu" else len(batch.tokens)
    tokens = torch.from_numpy(batch.tokens[:size]).to(device, torch.int64)
    targets = torch.from_numpy(batch.targets[:size]).to(device, torch.int64)
    cu_seqlens = torch.from_numpy(batch.cu_seqlens).to(device).clamp(max=size)

    started = time.perf_counter()
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, targets, cu_seqlens, context) / (targets >= 0).sum()
    loss.backward()
    optimizer.accumulate()
    norm = optimizer.step(plan.rate(0))
    console.print(
        facts(
            "One step" + (f", on the first {size} slots of the first row" if size < len(batch.tokens) else ""),
            {
                "loss": f"{loss.item():.4f} nats a token, {loss.item() / 0.6931471805599453:.4f} bits",
                "gradient norm": f"{norm.item():.4f}",
                "seconds": f"{time.perf_counter() - started:.1f}",
            },
        )
    )
    copies = sum(p.numel() * p.element_size() for p in model.parameters())
    held = memory_bytes(optimizer.blocks)
    console.print(
        memory_table(
            {
                "model (compute copies, tables)": copies,
                "gradients of a micro-batch": copies,
                **{f"optimizer: {kind}": held_bytes for kind, held_bytes in held.items()},
                f"activations of {train.micro_batch_tokens:,} tokens": round(
                    sum(kept.values()) / size * train.micro_batch_tokens
                ),
            }
        )
    )
