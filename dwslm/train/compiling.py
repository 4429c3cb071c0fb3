"""One thing that PyTorch's compiler needs to be told before it meets a model of many operators of our own."""

import functools
from typing import Any

import torch

FIXED = (2, 13)  # there the text is made when somebody reads it


@functools.cache
def name_operators_briefly() -> None:
    """From now on in this process, before anything is compiled.

    For an operator that it meets for the first time, PyTorch before 2.13 writes down what the operator is given, each thing with
    all that it was made from, for a message that nobody reads. Where operators take several results of one another, as those of
    the attention residuals do, that text doubles with each: compiling four layers took longer than anyone waits.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= FIXED:
        return
    from torch._inductor.exc import OperatorIssue

    def brief(target: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
        return f"  target: {target}, of {len(args) + len(kwargs)} arguments"

    OperatorIssue.operator_str = staticmethod(brief)  # type: ignore[method-assign]
