"""flash-linear-attention's own KDA model of the same shape, trained the plain way: compiled, bf16 autocast, fused AdamW.

The package `flash-linear-attention` holds the model, `fla-core` only the kernels. Its feed-forward layer is gated and has three
matrices; `hidden` is its own rule for a ratio of 4, which gives as many parameters as two matrices of 4 times the width, so that
neither side multiplies more. Its softmax layers want the package `flash-attn`; where that is not installed PyTorch's copy of the
same kernel stands in.
"""

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from dwslm.bench.step import Mark, Say, free, unmarked
from dwslm.data.batch import IGNORE
from dwslm.data.loader import GlobalBatch, TorchBatch
from dwslm.model.delta import GATE_BOUND
from dwslm.model.lm import ModelSettings
from dwslm.ops.tuning import compile_together

INSTALL = "pip install flash-linear-attention"
LEARNING_RATE, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
VERSIONS = 256
"""Compiled forms that one piece of its code may have."""
ROUND = 256
"""The hidden width is rounded up to a multiple of this, as the package does."""


def missing() -> str | None:
    """Which command installs what the peer needs, or None where it is there."""
    needed = []
    for package in ("flash-linear-attention", "transformers"):
        try:
            version(package)
        except PackageNotFoundError:
            needed.append(package)
    return f"not installed: {', '.join(needed)}; {INSTALL}" if needed else None


def hidden_width(mlp_hidden: int) -> int:
    """Of a gated layer with as many parameters as an ungated one of `mlp_hidden`, rounded up."""
    return -(-2 * mlp_hidden // (3 * ROUND)) * ROUND


def configuration(s: ModelSettings, vocab_size: int, context: int) -> dict[str, Any]:
    """Arguments of the package's `KDAConfig` for the shape of `s`.

    Raises:
        ValueError: for a shape that its model does not have.
    """
    if s.local != "kda":
        raise ValueError(f"--peer compares with KDA layers, and model.local={s.local}")
    if s.heads * s.head_dim != s.width or s.delta_head_dim * s.delta_heads != s.width:
        raise ValueError(f"--peer: fla's model wants heads x head_dim = width, and model.width={s.width}")
    softmax = [layer for layer, kind in enumerate(s.kinds()) if kind == "global"]
    attention = {"layers": softmax, "num_heads": s.heads, "num_kv_heads": s.kv_heads, "rope_theta": s.rope.theta}
    return {
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_heads": s.delta_heads,
        "head_dim": s.delta_head_dim,
        "intermediate_size": hidden_width(s.mlp_hidden),
        "attn": attention if softmax else None,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "safe_gate": s.delta_gate == "bounded",
        "lower_bound": GATE_BOUND if s.delta_gate == "bounded" else None,
        "use_cache": False,
        "tie_word_embeddings": False,
    }


class PeerStepper:
    """Steps of the peer's model."""

    def __init__(
        self, settings: ModelSettings, vocab_size: int, context: int, device: torch.device, *, split: int, compile: bool
    ):
        """split: pieces that a micro-batch is cut into, at rows, where all of it does not fit."""
        if device.type == "cuda":
            compile_together()  # what it tunes takes minutes otherwise; the same variant wins
        models = importlib.import_module("fla.models")
        self.attention = stand_in()
        config = models.KDAConfig(**configuration(settings, vocab_size, context))
        torch.manual_seed(0)
        with torch.device(device):
            self.model: Any = models.KDAForCausalLM(config)
        self.model.train()
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embeddings" not in name]
        self.matrix_parameters = sum(p.numel() for p in matrices)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        decayed = {id(p) for p in matrices}
        groups = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": [p for p in self.model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=device.type == "cuda")
        # Layers share their code and differ in their numbers, for which the compiler keeps eight versions and then gives up.
        torch._dynamo.config.recompile_limit = VERSIONS
        torch._dynamo.config.accumulated_recompile_limit = VERSIONS
        # Its loss adds up the head's gradient in float32, which would take longer than all else without TF32.
        torch.set_float32_matmul_precision("high")
        self.run: Callable[..., Any] = torch.compile(self.model) if compile else self.model
        self.device, self.split = device, split
        self.mark: Mark = unmarked

    def step(self, batch: GlobalBatch, number: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        pieces = [piece for whole in batch.micro_batches for piece in cut(whole, self.split)]
        for tokens, labels, cu_seqlens in pieces:
            with self.mark("micro_batch"):
                given = (tokens.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
                # A new tensor each time: the package keeps what it derives from boundaries by their identity.
                bounds = cu_seqlens.to(self.device)
                torch._dynamo.maybe_mark_dynamic(bounds, 0)  # or the second batch compiles everything once more
                with torch.autocast(self.device.type, torch.bfloat16):
                    loss = self.run(input_ids=given[0], labels=given[1], cu_seqlens=bounds).loss
                (loss / len(pieces)).backward()
                total += loss.detach() / len(pieces)
        with self.mark("update"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return total


def cut(batch: TorchBatch, split: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens and labels int64 [1, n] and boundaries int32 [segments + 1] of each piece, empty segments left out.

    The package moves labels one to the left itself, so they are moved right here; a piece's last target is lost.

    Raises:
        ValueError: where the rows do not divide.
    """
    total = len(batch.tokens)
    size = total // split
    if total % split or size % batch.context:
        raise ValueError(f"{total // batch.context} rows of a micro-batch cannot be cut into {split} pieces")
    bounds = torch.unique_consecutive(batch.cu_seqlens)
    found = []
    for start in range(0, total, size):
        inside = bounds[(bounds >= start) & (bounds <= start + size)] - start
        tokens, targets = (whole[start : start + size].long()[None] for whole in (batch.tokens, batch.targets))
        labels = torch.cat([torch.full_like(targets[:, :1], IGNORE), targets[:, :-1]], dim=1)
        found.append((tokens, labels, inside))
    return found


def stand_in() -> str:
    """Gives the package's softmax layers PyTorch's kernel where `flash-attn` is not installed; says what they use, in words."""
    layer = importlib.import_module("fla.layers.attn")
    if layer.flash_attn_func is not None:
        return "FlashAttention-2, the package flash-attn"
    vars(layer).update(flash_attn_varlen_func=varlen, flash_attn_func=dense)
    return "FlashAttention-2 as PyTorch ships it (the package flash-attn is not installed)"


def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The package's function of this name, for what the peer asks of it."""
    from dwslm.ops.attention.flash import GROUPED, varlen_attn

    assert options["causal"] and options["window_size"] == (-1, -1)
    cu_seqlens, longest = options["cu_seqlens_q"], options["max_seqlen_q"]
    attended = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **GROUPED)
    assert isinstance(attended, Tensor)
    return attended


def dense(*arguments: Any, **options: Any) -> Tensor:
    raise NotImplementedError("the comparison runs on packed batches alone")


def first_that_fits(
    make: Callable[[int], PeerStepper], batch: GlobalBatch, device: torch.device, say: Say
) -> PeerStepper:
    """The peer with the largest micro-batch that has room, having done one step.

    Raises:
        torch.OutOfMemoryError: where not even one row at a time fits.
    """
    split, rows = 1, len(batch.micro_batches[0].tokens) // batch.micro_batches[0].context
    while True:
        stepper = make(split)
        try:
            stepper.step(batch, 0)
            return stepper
        except torch.OutOfMemoryError:
            if split >= rows:
                raise
            split *= 2
            say(f"no memory for a micro-batch of the peer: cut into {split}")
        del stepper
        free(device)
