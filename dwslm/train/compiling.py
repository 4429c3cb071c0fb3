"""What PyTorch's compiler needs to be told before it meets a model of many operators of our own."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as autograd_config
import torch.compiler.config as compiler_config

import dwslm.ops

OPERATORS = Path(dwslm.ops.__path__[0])
TEXT_WHEN_READ = (2, 13)  # the release from which on an operator's arguments are written out when somebody reads them


def prepare_compiler(operators: Path = OPERATORS) -> None:
    """From now on in this process; before anything is compiled.

    - Compiled code is kept on disk under a hash of the model's graph, in which an operator of our own is but a name: what a
      compiler has made of its derivative would outlive a change of it, and train on without a word. The hash takes in the
      operators' own files.
    - Models with autograd functions are kept too. Their two passes are part of the hash.
    - Operators are named briefly, see `_name_briefly`.

    operators: the folder that our operators are defined in.
    """
    compiler_config.cache_key_tag = fingerprint(operators)
    autograd_config.autograd_cache_allow_custom_autograd_functions = True
    _name_briefly()


@functools.cache
def fingerprint(folder: Path) -> str:
    """Hash of all Python files of a folder and those below it."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _name_briefly() -> None:
    """For an operator that it meets for the first time, PyTorch before 2.13 writes down what the operator is given, each thing
    with all that it was made from, for a message that nobody reads. Where operators take several results of one another, as those
    of the attention residuals do, that text doubles with each: compiling four layers took longer than anyone waits.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= TEXT_WHEN_READ:
        return
    from torch._inductor.exc import OperatorIssue

    def brief(target: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
        return f"  target: {target}, of {len(args) + len(kwargs)} arguments"

    OperatorIssue.operator_str = staticmethod(brief)  # type: ignore[method-assign]
