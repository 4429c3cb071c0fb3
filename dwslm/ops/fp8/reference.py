"""The float32 truth of the linear map."""

from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """factor * x @ weight^T for x [T, k] and weight [m, k]: [T, m], float32 throughout."""
    return factor * x.float() @ weight.float().T
