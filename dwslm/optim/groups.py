"""Who gets which rule: every logical block of every parameter, exactly once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .settings import OptimSettings

Roles = Mapping[str, Sequence[tuple[str, int, str]]]
"""Parameter name -> (block name, rows, role) of consecutive rows; a whole one is a single block named ""."""

ROLES = ("matrix", "head", "embedding", "value_table", "vector")

# What each rule keeps between steps. `radius` is one number per matrix, the rest has the block's shape.
STATE: dict[str, tuple[str, ...]] = {
    "muonh": ("momentum", "radius"),
    "adamh": ("exp_avg", "exp_avg_sq", "radius"),
    "muon": ("momentum",),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
}
# Rules that see a matrix as a whole; the others go element by element.
MATRIX_RULES = ("muonh", "adamh", "muon")


@dataclass(frozen=True)
class Block:
    """Rows `start` to `start + shape[0]` of a parameter (all of a 0-D one), updated as one thing."""

    name: str
    parameter: str
    start: int
    shape: tuple[int, ...]
    role: str
    rule: str
    lr_factor: float
    weight_decay: float
    in_place: bool
    """The parameter is float32 and whole, under an elementwise rule: it is its own master."""

    def of(self, tensor: Tensor) -> Tensor:
        """View of this block in a tensor of the parameter's shape."""
        return tensor[self.start : self.start + self.shape[0]] if self.shape else tensor


def route(parameters: Mapping[str, Tensor], roles: Roles, settings: OptimSettings) -> list[Block]:
    """Blocks of all parameters, in the order of `parameters`.

    parameters: by name, float32 or bfloat16. Only shapes and dtypes are read: the device may be `meta`.
    Raises ValueError where a parameter has no role or a role no parameter, where blocks do not cover a
    parameter, for an unknown role, for a matrix that is not one, and for one tensor under two names.
    """
    _check_names(parameters, roles)
    blocks: list[Block] = []
    for parameter, tensor in parameters.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"parameter {parameter} is {tensor.dtype}: the optimizer takes float32 and bfloat16")
        rows = tensor.shape[0] if tensor.ndim else 1
        _check_cover(parameter, rows, roles[parameter])
        start = 0
        for block, n, role in roles[parameter]:
            name = f"{parameter}/{block}" if block else parameter
            rule, lr_factor, weight_decay = _rule(name, role, settings)
            shape = (n, *tensor.shape[1:]) if tensor.ndim else ()
            if role in ("matrix", "head") and len(shape) != 2:
                raise ValueError(f"{name} has role {role} but shape {list(shape)}, which is no matrix")
            in_place = n == rows and tensor.dtype == torch.float32 and rule not in MATRIX_RULES
            blocks.append(Block(name, parameter, start, shape, role, rule, lr_factor, weight_decay, in_place))
            start += n
    return blocks


def _check_names(parameters: Mapping[str, Tensor], roles: Roles) -> None:
    for name in parameters:
        if name not in roles:
            raise ValueError(f"parameter {name} has no role: the optimizer would never update it")
    for name in roles:
        if name not in parameters:
            raise ValueError(f"a role is given for {name}, which is not a parameter")
    seen: dict[int, str] = {}
    for name, tensor in parameters.items():
        if id(tensor) in seen:
            raise ValueError(f"{name} and {seen[id(tensor)]} are one tensor: it would be updated twice")
        seen[id(tensor)] = name


def _check_cover(parameter: str, rows: int, parts: Sequence[tuple[str, int, str]]) -> None:
    names = [block for block, _, _ in parts]
    covered = sum(n for _, n, _ in parts)
    if covered != rows or any(n <= 0 for _, n, _ in parts) or len(set(names)) != len(names):
        listed = ", ".join(f"{block or parameter}: {n}" for block, n, _ in parts) or "none"
        raise ValueError(f"blocks of {parameter} must cover its {rows} rows once, got {listed}")


def _rule(name: str, role: str, settings: OptimSettings) -> tuple[str, float, float]:
    """Rule, factor on the peak rate, weight decay."""
    adam = 1 / settings.adam_ratio
    if role == "matrix":
        return settings.matrices, 1.0, settings.weight_decay
    if role == "head":
        on_sphere = settings.head == "adamh"
        return settings.head, settings.head_factor * (1.0 if on_sphere else adam), settings.weight_decay
    if role == "embedding":
        return "adam", settings.embedding_factor * adam, 0.0
    if role == "value_table":
        return "adam", settings.value_table_factor * adam, 0.0
    if role == "vector":
        return "adam", settings.vector_factor * adam, 0.0
    raise ValueError(f"{name} has the unknown role {role!r}: known are {', '.join(ROLES)}")


def routing_table(blocks: Sequence[Block], lr: float) -> list[dict[str, object]]:
    """One JSON-able row per block: name, shape, role, rule, lr_factor, lr (peak rate), weight_decay."""
    return [
        {
            "name": block.name,
            "shape": list(block.shape),
            "role": block.role,
            "rule": block.rule,
            "lr_factor": block.lr_factor,
            "lr": lr * block.lr_factor,
            "weight_decay": block.weight_decay,
        }
        for block in blocks
    ]


def memory_bytes(blocks: Sequence[Block]) -> dict[str, int]:
    """Bytes held beside the parameters, all float32: `master`, `gradient`, each kind of state, and `update`.

    The last is there during a step only, on a GPU: directions, before weights have moved along them. A CPU has new weights and
    state there for a while, beside the old ones.
    """
    total: dict[str, int] = {"master": 0, "gradient": 0, "update": 0}
    for block in blocks:
        size = 4 * torch.Size(block.shape).numel()
        total["gradient"] += size
        total["master"] += 0 if block.in_place else size
        total["update"] += size
        for kind in STATE[block.rule]:
            total[kind] = total.get(kind, 0) + (4 if kind == "radius" else size)
    return total
