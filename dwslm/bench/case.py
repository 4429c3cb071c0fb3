"""What is measured: a case is an operation with its inputs, reference, bounds and costs; an engine is one way to compute it."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dwslm.bench.work import Work
from dwslm.ops.segments import Segments
from dwslm.train.compiling import prepare_compiler

FP8 = "float8_e4m3fn"
"""`Engine.dtype` of engines whose products are in it."""

Outputs = tuple[Tensor, ...]
Run = Callable[[Sequence[Tensor], Segments], Outputs]
"""An engine's function: inputs in the case's order, boundaries; outputs in the case's order."""

FLOAT32_BOUND = 1e-4
"""On relative errors of engines that compute in float32."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model whose kernels are measured."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    delta_heads: tuple[int, ...]
    delta_gate_rank: int
    mlp_hidden: int
    softcap: float
    vocab_size: int
    layers: int
    global_layers: int


@dataclass(frozen=True)
class Cost:
    """What a case must do at least, counted from shapes and boundaries: the formulas stand beside each case.

    A multiply and an add are two operations. Bytes: every input read once, every output written once, in each of the two passes.
    """

    forward_flop: float
    flop: float
    forward_bytes: float
    bytes: float


@dataclass(frozen=True)
class Engine:
    """One way to compute a case.

    Attributes:
        make: imports what it needs and gives the function. Raises ValueError, in the library's own words, where the case cannot
            be had on this machine.
        package: module that must be importable, or None; `install` is the command that installs it.
        dtype: of the products where it is not the case's ("float8_e4m3fn"); it picks the ceiling.
        bounds: on relative errors by tensor, in place of the case's own.
        ask: same bits only under torch.use_deterministic_algorithms, which the checks then switch on.
        repeatable: False where the library has no way to give the same bits twice; said in the row, and no failure.
        same_bits: False where a neighbour may show in the last bits, by the order of sums inside a chunk.
        extra: things timed apart, by name: run(segments) before the first call.
        new_slots: name under which the first call with a number of slots not seen before is reported, less a usual call.
        patience: seconds that a first call may take on a GPU with cold caches, tuning included.
        takes: inputs by name that it reads in another dtype than they are drawn in, as training gives them to it. They are
            converted before anything is timed.
    """

    name: str
    make: Callable[[], Run]
    package: str | None = None
    install: str | None = None
    dtype: str | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    ask: bool = False
    repeatable: bool = True
    same_bits: bool = True
    extra: Mapping[str, Callable[[Segments], object]] = field(default_factory=dict)
    new_slots: str | None = None
    patience: float = 40.0
    takes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Which command installs it, or None where it is there."""
        try:
            there = self.package is None or importlib.util.find_spec(self.package) is not None
        except ImportError:  # a part of a package that is not there itself, or breaks
            there = False
        return None if there else f"not installed: {self.install}"


@dataclass(frozen=True)
class Case:
    """One operation at given sizes.

    Attributes:
        op, name, heads: what it is called in the report.
        inputs: names; `tokenwise` says which have one row a token, `learnt` which get a gradient.
        outputs: names.
        dtype: of the engines' inputs; float32 holds them to `FLOAT32_BOUND`.
        draw: (tokens, kind, generator) to inputs on the generator's device.
        reference: inputs and boundaries to outputs, in float32; differentiable in the learnt inputs.
        plain: a quick float32 form to hold engines to at the timed size, where the reference would take too long; itself held to
            the reference first.
        kinds: kinds of input that the gate draws; the first is timed and held to the rules of packing.
        bound, bounds: on relative errors, the second by tensor ("o", "dq"), or by tensor and kind ("dg uniform").
        gate_tokens: tokens of the gate; None takes the timed size, where the reference is fast enough for that.
        gate_context: row length of the gate, None for one row.
        packed: that boundaries matter.
        cost: what the work must cost at least.
        sized: whether the case is measured on batches at all; if not, `draw` and `cost` look at none.
        engines: in the order in which they are reported.
    """

    op: str
    name: str
    heads: int | None
    inputs: tuple[str, ...]
    tokenwise: tuple[bool, ...]
    learnt: tuple[bool, ...]
    outputs: tuple[str, ...]
    dtype: torch.dtype
    draw: Callable[[int, str, torch.Generator], list[Tensor]]
    reference: Callable[[Sequence[Tensor], Tensor], Outputs]
    cost: Callable[[Work], Cost]
    engines: tuple[Engine, ...]
    plain: Run | None = None
    kinds: tuple[str, ...] = ("random",)
    bound: float = 0.01
    bounds: Mapping[str, float] = field(default_factory=dict)
    gate_tokens: int | None = None
    gate_context: int | None = None
    packed: bool = True
    sized: bool = True
    reference_name: str = "token by token, float32"

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def bound_of(self, tensor: str, kind: str, engine: Engine) -> float:
        """The largest relative error that passes."""
        if engine.bounds:
            return engine.bounds.get(tensor, self.bound)
        if self.dtype == torch.float32:
            return FLOAT32_BOUND
        return self.bounds.get(f"{tensor} {kind}", self.bounds.get(tensor, self.bound))


def given(case: Case, engine: Engine, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs in the dtypes that an engine reads."""
    return [x.to(engine.takes.get(name, x.dtype)) for name, x in zip(case.inputs, inputs, strict=True)]


def leaves(case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same data as inputs that autograd differentiates for, where they are learnt."""
    return [x.detach().requires_grad_(learnt) for x, learnt in zip(inputs, case.learnt, strict=True)]


def differentiate(
    case: Case, own: Sequence[Tensor], outputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """Outputs by name, and gradients of sum(outputs * upstream) as "d" + name; None for a gradient that does not exist."""
    found: dict[str, Tensor | None] = {name: y.detach() for name, y in zip(case.outputs, outputs, strict=True)}
    names = [name for name, x in zip(case.inputs, own, strict=True) if x.requires_grad]
    learnt = [x for x in own if x.requires_grad]
    reached = [(y, g) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(learnt)
    if learnt and reached:
        ys, gs = zip(*reached, strict=True)
        gradients = torch.autograd.grad(ys, learnt, gs, allow_unused=True)
    return found | {f"d{name}": g for name, g in zip(names, gradients, strict=True)}


def values_and_gradients(
    case: Case, run: Run, inputs: Sequence[Tensor], segments: Segments, upstream: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """`differentiate` for a run over fresh leaves."""
    own = leaves(case, inputs)
    return differentiate(case, own, run(own, segments), upstream)


def draw_upstream(outputs: Sequence[Tensor], dtype: torch.dtype | None, generator: torch.Generator) -> list[Tensor]:
    """What the loss says of each output: normal numbers in `dtype`, None in the output's own, as a timed call must have them to
    be without a cast; 1 for a scalar, which is a loss itself."""
    return [
        torch.ones_like(y)
        if y.ndim == 0
        else torch.randn(y.shape, device=y.device, generator=generator).to(dtype or y.dtype)
        for y in outputs
    ]


def compiled(run: Run, device: torch.device) -> Run:
    """`run` under torch.compile, as one graph for each shape.

    Raises:
        ValueError: on a CPU, where compiling takes longer than all that is measured.
    """
    if device.type != "cuda":
        raise ValueError("compiled engines are measured on a GPU only")

    def over_tensors(inputs: list[Tensor], cu_seqlens: Tensor, ids: Tensor, positions: Tensor, context: int) -> Outputs:
        return run(inputs, Segments(cu_seqlens, ids, positions, context))

    prepare_compiler()
    # Boundaries go in as tensors: new ones are then new values for the compiler, and not a new object.
    call = torch.compile(over_tensors, fullgraph=True, dynamic=False)
    return lambda inputs, seg: call(list(inputs), seg.cu_seqlens, seg.ids, seg.positions, seg.context)
