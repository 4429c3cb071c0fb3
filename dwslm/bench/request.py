"""What is asked for: sizes, operations, seed, and the time there is. Plain data that crosses to the measuring process as JSON."""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dwslm.bench.case import Shape
from dwslm.model.lm import ModelSettings

OPS = (
    "attention", "delta_rule", "mlp", "projection", "head", "short_conv", "delta_gate", "gated_norm", "depth_mix", "norm",
    "add_norm", "rope", "newton_schulz", "optimizer",
)  # fmt: skip
BY_CONTEXT = ("attention", "delta_rule")
"""Operations whose time depends on how documents lie in rows."""
SMALL_VOCAB = 2048
BATCHES = 3
"""Batches with other boundaries that a recording is replayed over."""


@dataclass(frozen=True)
class Request:
    """One call of the benchmark."""

    data: str
    """Folder of a prepared dataset (with manifest.json)."""
    seed: int
    """Draws batches and inputs."""
    ops: list[str] = field(default_factory=lambda: list(OPS))
    """Operations to measure."""
    tokens: list[int] = field(default_factory=lambda: [16_384, 65_536])
    """Tokens of a batch; the first one is measured first, gated and recorded."""
    contexts: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    """Row lengths."""
    heads: list[int] = field(default_factory=lambda: [8, 16])
    """Heads of the linear-attention kernels."""
    engines: list[str] | None = None
    """Only these engines; None for all."""
    budget_s: float = 600.0
    """Seconds for the whole call."""
    quick: bool = False
    """Only the first number of tokens and the longest context."""
    small: bool = False
    """Sizes of a small model, for a CPU."""
    device: str = "cuda"
    repeats: int = 20
    warm_up_s: float = 0.15

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in OPS:
                raise ValueError(f"unknown operation {op!r}: choose out of {', '.join(OPS)}")
        if not self.ops or not self.tokens or not self.contexts or not self.heads:
            raise ValueError(
                "the benchmark needs at least one operation, number of tokens, context and number of heads"
            )
        for name in ("tokens", "contexts", "heads"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 or more, not {min(getattr(self, name))}")
        for tokens in self.tokens:
            for context in self.contexts:
                if tokens % context:
                    raise ValueError(
                        f"{tokens:,} tokens are not a whole number of rows of {context:,}: change --tokens or --contexts"
                    )
        if self.budget_s <= 0 or self.repeats < 1:
            raise ValueError("the budget and the repeats must be above 0")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Request":
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in names})

    def shape(self, vocab_size: int) -> Shape:
        """Sizes of the measured model: the main one, or a small one."""
        s = ModelSettings()
        kinds = s.kinds()
        main = Shape(
            width=s.width,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            window=s.window,
            delta_heads=tuple(self.heads),
            delta_gate_rank=s.delta_gate_rank,
            mlp_hidden=s.mlp_hidden,
            softcap=s.softcap,
            vocab_size=vocab_size,
            layers=s.layers,
            global_layers=kinds.count("global"),
        )
        if not self.small:
            return main
        return replace(
            main,
            width=64,
            heads=4,
            kv_heads=2,
            head_dim=32,
            window=32,
            delta_gate_rank=16,
            mlp_hidden=128,
            vocab_size=min(vocab_size, SMALL_VOCAB),
            layers=4,
            global_layers=1,
        )
