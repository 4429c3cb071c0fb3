"""Settings of the optimizer, its learning rate and its schedule."""

import math
from dataclasses import dataclass, fields

from .newton_schulz import COEFFICIENTS

MATRIX_RULES = ("muonh", "muon", "adamw")
HEAD_RULES = ("adamh", "adam")
SCHEDULES = ("wsd", "linear", "cosine")
MOST_LR = 1e4
DTYPES = ("auto", "bfloat16", "float32")


@dataclass
class OptimSettings:
    """Who is updated how, and how fast. What the chosen rule would ignore is refused."""

    matrices: str = "muonh"
    """Rule of the hidden matrices: `muonh` (Muon on the sphere of the initial norm), `muon` or `adamw`."""

    head: str = "adamh"
    """Rule of the language-model head: `adamh` (Adam's direction on the sphere, at MuonH's rate; needs
    `matrices=muonh`) or `adam`."""

    lr: float | None = None
    """Peak learning rate of the matrices. Empty: derived from tokens and batch, for `muonh` only. Under
    `muonh` it is relative to each matrix's norm; under `muon` it is the spectral norm of a square matrix's
    step; under `adamw` it is Adam's. A good value of one is a bad value of another."""

    adam_ratio: float = 13 / 3
    """`lr` divided by this is Adam's rate for embedding, value tables, vectors and a head under `adam`. With
    `matrices=adamw`, 1 gives the usual single rate."""

    head_factor: float = 1.0
    """Factor on the head's rate."""

    embedding_factor: float = 1.0
    """Factor on the input embedding's Adam rate."""

    value_table_factor: float = 0.5
    """Factor on the value tables' Adam rate."""

    vector_factor: float = 1.0
    """Factor on the Adam rate of gains, biases, convolutions, decay parameters and other thin parameters."""

    momentum: float = 0.95
    """Nesterov momentum of `muonh` and `muon`."""

    newton_schulz: str = "polar_express"
    """Newton-Schulz coefficients of `muonh` and `muon`, 5 steps each: `polar_express` or `quintic`."""

    newton_schulz_dtype: str = "auto"
    """Of the Newton-Schulz products: `bfloat16`, `float32`, or `auto` (bfloat16 on CUDA, else float32)."""

    beta1: float = 0.9
    """Adam's decay of the gradient's average."""

    beta2: float = 0.95
    """Adam's decay of the squared gradient's average."""

    eps: float = 1e-10
    """Added to Adam's denominator."""

    weight_decay: float = 0.0
    """Decoupled decay, times the rate, of matrices under `muon` and `adamw` and of a head under `adam`.
    Tables and vectors never decay. Refused with `muonh`, where the sphere undoes it."""

    clip: float | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. Empty: no clipping."""

    schedule: str = "wsd"
    """`wsd` (warm-up, flat, linear decay from `decay_start`), or `linear` or `cosine` from warm-up to end."""

    warmup: float = 0.01
    """Fraction of the planned tokens over which the rate rises linearly from zero."""

    decay_start: float = 0.75
    """Fraction of the planned tokens at which `wsd` starts to decay."""

    final_lr: float = 0.0
    """Rate at the end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        _choice("matrices", self.matrices, MATRIX_RULES)
        _choice("head", self.head, HEAD_RULES)
        _choice("newton_schulz", self.newton_schulz, tuple(COEFFICIENTS))
        _choice("newton_schulz_dtype", self.newton_schulz_dtype, DTYPES)
        _choice("schedule", self.schedule, SCHEDULES)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optim.{name}={value} must be above 0 and finite (or null)")
        if self.lr is not None and self.lr > MOST_LR:
            raise ValueError(f"optim.lr={self.lr} must be at most {MOST_LR:g}: no rule learns at such a rate")
        for name in ("adam_ratio", "eps"):
            _within(name, getattr(self, name), 0, math.inf, include_low=False)
        for name in (
            "head_factor",
            "embedding_factor",
            "value_table_factor",
            "vector_factor",
            "weight_decay",
        ):
            _within(name, getattr(self, name), 0, math.inf)
        for name in ("momentum", "beta1", "beta2", "warmup"):
            _within(name, getattr(self, name), 0, 1)
        _within("decay_start", self.decay_start, self.warmup, 1)
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"optim.final_lr={self.final_lr} must be from 0 to 1: it is a fraction of the peak rate")
        self._refuse_what_would_be_ignored()

    def _refuse_what_would_be_ignored(self) -> None:
        if self.head == "adamh" and self.matrices != "muonh":
            raise ValueError(
                "optim.head=adamh steps at MuonH's relative rate, which "
                f"optim.matrices={self.matrices} does not have: set optim.head=adam"
            )
        if self.matrices == "muonh" and self.weight_decay:
            raise ValueError(
                f"optim.weight_decay={self.weight_decay} has no effect with optim.matrices=muonh, since the "
                "sphere holds each matrix's norm: set it to 0, or use muon or adamw"
            )
        if self.matrices == "adamw":
            self._refuse_changed("optim.matrices=adamw", "momentum", "newton_schulz", "newton_schulz_dtype")
        if self.schedule != "wsd":
            self._refuse_changed(f"optim.schedule={self.schedule}", "decay_start")

    def _refuse_changed(self, because: str, *names: str) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise ValueError(f"optim.{field.name}={value} has no effect with {because}: leave it out")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"optim.{name}={value} is not one of {', '.join(choices)}")


def _within(name: str, value: float, low: float, high: float, include_low: bool = True) -> None:
    if not (low < value < high or (include_low and value == low)):
        interval = f"{'[' if include_low else '('}{low}, {high})"
        raise ValueError(f"optim.{name}={value} must be in {interval}")
