"""A run before the run: first batch, one step, and what the whole will need in memory."""

import time

import torch
from rich.console import Console

from dwslm.data.batch import Batch
from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.data.packing import RowStream
from dwslm.model.attention import Attention
from dwslm.model.delta import DeltaAttention
from dwslm.model.lm import DTYPES, LanguageModel
from dwslm.model.mlp import MLP
from dwslm.model.projection import Projection
from dwslm.ops import delta_rule, short_conv
from dwslm.ops.loss_head.compiled import CHUNK_BYTES
from dwslm.optim.groups import memory_bytes
from dwslm.optim.optimizer import Optimizer
from dwslm.train.plan import Plan
from dwslm.train.report import facts, gigabytes, memory_table
from dwslm.train.settings import TrainSettings
from dwslm.train.step import TrainStep

DELTA_CHUNK = 64  # tokens; as in the delta rule's own kernels, which only a machine with Triton can import
GAPS = 0.13
"""Of the activations: what is free in a recording's memory and of no use, with attention residuals, beyond what
`micro_batch.SHARE` leaves. On an H200 a recording held 135.5 GB for a peak of 112.8 and 145.1 for 121.7, 21 to 23 % of the
activations; without attention residuals 9 %, which that share covers."""
CPU_TOKENS = 512  # of the first row: a CPU would need hours for a step of the main model


def dry_run(
    model: LanguageModel, optimizer: Optimizer, stream: RowStream, plan: Plan, train: TrainSettings, console: Console
) -> None:
    """Prints the first batch's statistics and a memory estimate, and runs one step whose weights nobody keeps.

    A GPU runs the first micro-batch as training would, with a ladder that of each rung, and its peak memory is measured. A
    CPU takes the first `CPU_TOKENS` slots of the first row only, and says so.
    """
    batches = [
        stream.batch(first_row, plan.micro_batch_tokens // leg.context)
        for first_row, leg in zip(stream.first_rows, stream.legs, strict=True)
    ]
    for batch in batches:
        lengths = [b - a for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)]
        text = sorted(n for n, doc in zip(lengths, batch.docs.tolist(), strict=True) if doc >= 0)
        console.print(
            facts(
                "First micro-batch" if len(batches) == 1 else f"First micro-batch of context {batch.context:,}",
                {
                    "tokens": f"{len(batch.tokens):,} in {len(batch.tokens) // batch.context} rows of {batch.context:,}",
                    "segments": f"{batch.segments} (slots for {len(batch.docs)})",
                    "segment lengths": f"{text[0]:,} to {text[-1]:,}, median {text[len(text) // 2]:,}",
                    "scored": f"{batch.scored:,} targets ({batch.scored / len(batch.tokens):.2%})",
                    "padding": f"{batch.padding:,} slots ({batch.padding / len(batch.tokens):.2%})",
                },
            )
        )
    console.print(memory_table(estimate(model, optimizer, plan.micro_batch_tokens)))
    on_gpu = optimizer.device.type == "cuda"
    for batch in batches if on_gpu else batches[:1]:
        one_step(model, optimizer, batch, plan, train, console)


def one_step(
    model: LanguageModel, optimizer: Optimizer, batch: Batch, plan: Plan, train: TrainSettings, console: Console
) -> None:
    """Runs one step on a micro-batch, on a CPU on its first slots."""
    on_gpu = optimizer.device.type == "cuda"
    size, context = (len(batch.tokens), batch.context) if on_gpu else (min(batch.context, CPU_TOKENS),) * 2
    micro_batch = TorchBatch(
        tokens=torch.from_numpy(batch.tokens[:size]),
        targets=torch.from_numpy(batch.targets[:size]).long(),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens).clamp(max=size),
        context=context,
        scored=int((batch.targets[:size] >= 0).sum()),
    )
    rows = size // context
    step = TrainStep(model, optimizer, rows, context, len(batch.docs), compile=train.compile and on_gpu)
    started = time.perf_counter()
    loss, norm = step.run(
        GlobalBatch(
            [micro_batch], micro_batch.scored * plan.world, batch.segments, batch.padding, first_row=0, next_row=rows
        ),
        plan.rate(0),
    )
    nats = loss.item()
    figures = {
        "loss": f"{nats:.4f} nats a token",
        "gradient norm": f"{norm.item():.4f}",
        "seconds": f"{time.perf_counter() - started:.1f}"
        + (", compilation included" if train.compile and on_gpu else ""),
    }
    if on_gpu:
        figures["peak memory, measured"] = gigabytes(torch.cuda.max_memory_allocated(optimizer.device))
    what = "the first micro-batch" if on_gpu else f"the first {size} slots of the first row"
    if plan.rungs[1:]:
        what += f" of context {batch.context:,}"
    console.print(facts(f"One step, on {what}", figures))


def estimate(model: LanguageModel, optimizer: Optimizer, tokens: int) -> dict[str, int]:
    """Bytes a compiled run on a GPU will hold, counted from shapes; activations as `activation_bytes` counts them."""
    s = model.settings
    element = DTYPES[s.dtype].itemsize
    kinds, device = set(s.kinds()), optimizer.device
    linear = bool({"kda", "gdn"} & kinds)
    shifted = linear and short_conv.resolve(s.conv_engine, device, s.delta_head_dim) == "torch"
    rule = linear and delta_rule.resolve(
        s.delta_engine,
        device=device,
        dtype=DTYPES[s.dtype],
        head_dim=s.delta_head_dim,
        bounded=s.delta_gate == "bounded",
        scalar_gate="gdn" in kinds,
    )
    copies = sum(p.numel() * p.element_size() for p in model.parameters())
    # This rank's share; gradients alone are those of the whole model.
    held = memory_bytes(optimizer.owned) | {"gradient": optimizer.gradient.nbytes}
    logits = min(CHUNK_BYTES, tokens * element * model.vocab_size)
    # The gradient in place of the logits; in float8 beside them, and of all tokens, transposed.
    head = 2 * logits if s.head_precision == "model" else logits * 3 // 2 + tokens * model.vocab_size
    activations = tokens * activation_bytes(model, shifted=shifted, own_delta=rule == "fused")
    gaps = (
        {"gaps between attention residuals": int(GAPS * activations)} if s.depth_block and device.type == "cuda" else {}
    )
    return {
        "model (compute copies, tables)": copies,
        "gradients of a micro-batch": copies,
        **{f"optimizer: {kind}": size for kind, size in held.items()},
        f"activations of {tokens:,} tokens, compiled": activations,
        **gaps,
        **_float8_weights(model),
        "loss head (a chunk of logits and its gradient)": head + 4 * model.head.weight.numel(),
    }


def _float8_weights(model: LanguageModel) -> dict[str, int]:
    """What products in FP8 with delayed scales keep of their weights for the backward pass, a byte each: transposed."""
    kept = 0
    for part in model.modules():
        if isinstance(part, MLP | Projection) and part.precision == "fp8_delayed":
            kept += sum(p.numel() for p in part.parameters())
    return {"float8 weights, transposed": kept} if kept else {}


def activation_bytes(model: LanguageModel, *, shifted: bool, own_delta: bool) -> int:
    """Bytes a token of a micro-batch that the backward pass of a fused build has to keep.

    The stream before each sublayer, every norm's output, projections, convolution and gate outputs, attention outputs, and one
    side of the squared ReLU. What the fused kernels take apart is there twice:
    a kernel's outputs are no views of its input. A CPU keeps several times that, since its delta rule spells out its chunks in
    float32. shifted: whether convolutions are in plain PyTorch. own_delta: whether the delta rule is the engine `fused`, which
    keeps the state before each chunk, each chunk's inverse and scores, keys and queries with their decays, and updates in the
    place of the values, and takes log decays in bfloat16.
    """
    s = model.settings
    element = DTYPES[s.dtype].itemsize
    per_token = 0
    for layer in model.layers:
        mixer = layer.mixer
        assert isinstance(mixer, Attention | DeltaAttention)
        inner = mixer.output.weight.shape[1]
        rows = mixer.input.weight.shape[0]
        kept = rows + inner  # projections, attention output
        if isinstance(mixer, Attention):
            kept += rows  # q and k turned, and the rest
            values = mixer.kv_heads * mixer.head_dim
        else:
            kept += rows + inner  # convolution, and the rest; gated output
            kept += 2 * inner if mixer.kind == "kda" else 0  # decay and output gate, out of their low rank
            values = inner
            if shifted:
                kept += 9 * inner  # shifted copies of q, k, v, which the compiler keeps (measured: docs/lab-notes.md)
            if own_delta:
                kept += mixer.heads * (mixer.head_dim**2 // DELTA_CHUNK + 2 * DELTA_CHUNK) + 3 * inner
            per_token += (2 if own_delta and mixer.kind == "kda" else 4) * inner  # log decay
        if mixer.value_embedding is not None:
            kept += values  # with the embedding
            per_token += 4 * values  # the embedding itself, float32
        kept += 4 * s.width + s.mlp_hidden  # two norms, the stream twice, the hidden layer or its squared ReLU
        # Transposed float8 stands for a norm's output, which attention residuals still want.
        normed = 0 if s.depth_block else s.width
        if s.mlp_precision == "fp8_delayed":
            per_token += 2 * s.mlp_hidden + s.width  # the square both ways, and the input
            kept -= s.mlp_hidden + normed
        if s.projection_precision == "fp8_delayed":
            per_token += s.width + inner  # inputs of both projections
            # Softmax attention wants its output itself.
            kept -= normed if isinstance(mixer, Attention) else normed + inner
        per_token += element * kept
    return per_token
