"""The whole optimizer step over all parameters of a model: MuonH, AdamH and Adam, as in training."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dwslm.bench.case import Cost
from dwslm.bench.figures import fill_figures
from dwslm.bench.gate import relative_error
from dwslm.bench.newton_schulz import BOUND, cost
from dwslm.bench.record import LEAST_BATCHES, record_cuda
from dwslm.bench.timing import Timer, peak_bytes
from dwslm.model.lm import LanguageModel, ModelSettings
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings

RATE = 0.01

Weights = dict[str, Tensor]


@dataclass
class StepCase:
    """The optimizer's step over all parameters of a model, MuonH and AdamH and Adam as in training.

    `engines`: "compiled" runs the update through torch.compile.
    """

    settings: ModelSettings
    vocab_size: int
    device: torch.device
    engines: tuple[str, ...] = ("compiled", "eager")
    _model: LanguageModel | None = None

    def build(self, engine: str, float32: bool = False) -> Optimizer:
        """A model of its own with its optimizer; `float32` takes float32 products in Newton-Schulz.

        Raises:
            ValueError: for the compiled step on a CPU.
        """
        if engine == "compiled" and self.device.type != "cuda":
            raise ValueError("compiled engines are measured on a GPU only")
        if self._model is None:  # drawing its weights takes longer than all steps together
            self._model = LanguageModel(self.settings, self.vocab_size).to(self.device)
        model = copy.deepcopy(self._model)
        optim = OptimSettings(newton_schulz_dtype="float32") if float32 else OptimSettings()
        return Optimizer(dict(model.named_parameters()), model.roles(), optim, lr=RATE, compile=engine == "compiled")

    def cost(self, optimizer: Optimizer) -> Cost:
        """Newton-Schulz of every stack under MuonH, and a few operations an entry of the rest, which are left out. Bytes:
        gradient, weights and state in, weights and state out, gradient cleared, compute copies out."""
        flop, size = 0.0, 8.0 * optimizer.gradient.numel()
        for group in optimizer.groups:
            if group.rule in ("muonh", "muon") and group.stack is not None:
                count, rows, columns = group.stack.shape
                flop += cost((count, rows, columns)).flop
            size += 2.0 * sum(x.numel() * x.element_size() for x in group.changing())
        size += sum(p.numel() * p.element_size() for p in optimizer.params.values() if p.dtype != torch.float32)
        return Cost(flop, flop, size, size)


def small(settings: ModelSettings) -> ModelSettings:
    """The settings that a CPU steps in a fraction of a second."""
    return replace(settings, layers=4, width=64, heads=2, kv_heads=1, head_dim=32, delta_heads=2, delta_head_dim=32,
                   delta_gate_rank=16, mlp_hidden=128, window=32, depth_block=4, dtype="float32")  # fmt: skip


def weight_change(optimizer: Optimizer, gradient: Tensor) -> dict[str, Tensor]:
    """What one step on `gradient` adds to each rule's weights, one after the other."""
    before = optimizer.weights()
    optimizer.gradient.copy_(gradient)
    optimizer.step(RATE)
    after = optimizer.weights()
    changes: dict[str, list[Tensor]] = {}
    for block in optimizer.blocks:
        change = block.of(after[block.parameter]) - block.of(before[block.parameter])
        changes.setdefault(block.rule, []).append(change.flatten())
    return {rule: torch.cat(parts) for rule, parts in changes.items()}


def change_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of the weights' change, by rule."""
    return {f"change by {rule}": relative_error(got[rule], want[rule]) for rule in want}


def draw_gradient(optimizer: Optimizer, generator: torch.Generator) -> Tensor:
    """Normal numbers of the size of a real gradient under the clip."""
    size = optimizer.gradient.numel()
    return torch.randn(size, device=optimizer.device, generator=generator) * size**-0.5


def step_rows(
    case: StepCase,
    row: dict[str, Any],
    timer: Timer,
    generator: torch.Generator,
    ceilings: dict[str, Any],
    record: bool,
) -> Iterator[dict[str, Any]]:
    """The row of one engine: held to a step with float32 products, timed over real-sized gradients, recorded on a GPU."""
    row["dtype"] = "bfloat16" if case.device.type == "cuda" else "float32"
    try:
        built = case.build(row["engine"])
    except ValueError as error:
        yield row | {"status": "refused", "reason": str(error)}
        return
    gradient = draw_gradient(built, generator)
    weights, state = built.weights(), built.state()
    first: dict[str, Tensor] = {}
    row["first_call_s"] = timer.seconds(lambda: first.update(weight_change(built, gradient)))
    built.load(weights, state)  # a second optimizer would be compiled a second time
    again = weight_change(built, gradient)
    twice = all(torch.equal(first[rule], again[rule]) for rule in first)
    errors = change_errors(first, weight_change(case.build("eager", float32=True), gradient))
    bad = [
        f"{what} misses float32: {error:.3g}, bound {BOUND:g}" for what, error in errors.items() if not error <= BOUND
    ]
    if not twice:
        bad.append("the same step gave other bits the second time")
    row["gate"] = {
        "bound": BOUND,
        "passed": not bad,
        "tokens": None,
        "reference": "the same step with float32 Newton-Schulz products",
        "trials": ["random"],
        "errors": {what: {"value": error, "bound": BOUND, "trial": "random"} for what, error in errors.items()},
        "checks": {"twice": twice},
        "deterministic": False,
        "notes": [],
    }
    if bad:
        yield row | {"status": "failed", "reason": "; ".join(bad)}
        return

    def refill() -> None:  # a step clears its gradient, and zeros would be faster than real numbers
        built.gradient.copy_(gradient)

    def step() -> object:
        return built.step(RATE)

    both = timer.measure([step], before=refill)
    refill()
    row["peak_bytes"] = peak_bytes(step, case.device)
    fill_figures(row, case.cost(built), None, both, ceilings)
    row |= {"status": "ok"}
    yield row
    if record and case.device.type == "cuda":
        gradients = [draw_gradient(built, generator) for _ in range(LEAST_BATCHES)]
        yield row | {"record": record_step(built, weights, state, gradients, timer)}


def record_step(
    built: Optimizer, weights: Weights, state: dict[str, Tensor], gradients: Sequence[Tensor], timer: Timer
) -> dict[str, Any]:
    """Steps on other gradients, recorded and not, from the same weights and state: the weights after each are compared."""
    rate = torch.tensor(RATE, device=built.device)  # a number would be fixed at recording
    found: dict[str, Any] = {
        "status": "fails",
        "reason": None,
        "batches": len(gradients),
        "slots": None,
        "deterministic": False,
        "identical": None,
        "padding_identical": None,
        "recorded_ms": None,
        "launched_ms": None,
    }

    def step() -> dict[str, Tensor | None]:
        return {"norm": built.step(rate)}

    def walk(call: Callable[[], object]) -> list[Weights]:
        built.load(weights, state)
        seen = []
        for gradient in gradients:
            built.gradient.copy_(gradient)
            call()
            seen.append(built.weights())
        return seen

    try:
        want = walk(step)
        replay = record_cuda(step)
        got = walk(replay)
        changed = {name for a, b in zip(got, want, strict=True) for name in b if not torch.equal(a[name], b[name])}
        found["identical"], found["status"] = not changed, "differs" if changed else "ok"
        if changed:
            found["reason"] = f"{len(changed)} of {len(weights)} parameters are not the unrecorded run's bits"

        def refill() -> None:
            built.gradient.copy_(gradients[0])

        found["recorded_ms"] = timer.measure([replay], before=refill).as_json()
        found["launched_ms"] = timer.measure([step], before=refill, launching=True).as_json()
    except Exception as error:
        found |= {"status": "fails", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]}
    return found
