"""What the optimizer refuses to take, in one line each."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def check_tensors(what: str, given: Mapping[str, Tensor], own: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """Raises ValueError where `given` has other names, shapes or dtypes than `own`; `what` is what the user calls it."""
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing:
        raise ValueError(f"{what} lack {missing[0]}" + (f" and {len(missing) - 1} more" * (len(missing) > 1)))
    if unknown:
        raise ValueError(
            f"{what} hold {unknown[0]}" + f" and {len(unknown) - 1} more" * (len(unknown) > 1) + ", unknown here"
        )
    for name, (shape, dtype) in own.items():
        if given[name].shape != shape or given[name].dtype != dtype:
            raise ValueError(
                f"{what} {name} is {given[name].dtype} {list(given[name].shape)}, expected {dtype} {list(shape)}"
            )


def check_radius(name: str, radius: float) -> None:
    """Raises ValueError for a matrix of norm zero."""
    if not 0 < radius < math.inf:
        raise ValueError(
            f"matrix {name} has norm {radius}: on a sphere it could never move. "
            "Give it another initialisation, or a role outside the sphere"
        )
