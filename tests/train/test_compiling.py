"""Operators of our own under the compiler: in time, and never by a derivative that they no longer have."""

import os
import subprocess
import sys
from pathlib import Path

from dwslm.train.compiling import OPERATORS, fingerprint

ROOT = Path(__file__).resolve().parents[2]
CHAIN = """
import torch
from dwslm.train.compiling import prepare_compiler

prepare_compiler()

def mixing(name):
    @torch.library.custom_op(name, mutates_args=())
    def mix(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        return [a + b, b + c, c + a]
    @mix.register_fake
    def _(a, b, c):
        return [torch.empty_like(a) for _ in range(3)]
    return mix

often, late = mixing("chain::often"), mixing("chain::late")

def chain(x):
    parts = [x, x, x]
    for _ in range(40):
        parts = often(*parts)
    return late(*parts)[0]

x = torch.zeros(3)
print(torch.equal(torch.compile(chain, fullgraph=True)(x), chain(x)))
"""
OPERATOR = """
import torch

@torch.library.custom_op("changing::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x

@square.register_fake
def _(x):
    return torch.empty_like(x)

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x
    @staticmethod
    def backward(ctx, dy):
        return dy * {cube} * ctx.saved_tensors[0] ** 2

def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])

square.register_autograd(lambda ctx, dy: dy * {square} * ctx.saved_tensors[0], setup_context=keep)
"""
USER = """
import pathlib, sys
import torch
from dwslm.train.compiling import prepare_compiler

folder = pathlib.Path(sys.argv[1])
prepare_compiler(folder)
sys.path.insert(0, str(folder))
import operators

x = torch.full((4,), 3.0, requires_grad=True)
torch.compile(lambda x: operators.square(x).sum() + operators.Cube.apply(x).sum(), fullgraph=True)(x).backward()
counts = torch._dynamo.utils.counters["aot_autograd"]
print(x.grad[0].item(), counts["autograd_cache_hit"], counts["autograd_cache_bypass"])
"""


def said(script: str, *arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_an_operator_met_late_is_not_written_out():
    assert said(CHAIN, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") == ["True"]


def test_no_derivative_outlives_a_change(tmp_path):
    """d(x^2 + x^3) = 2x + 3x^2 is 33 at 3. With 4 and 3 for factors it is 39, with 4 and 5 it is 57; the same again is kept."""
    cache, file = str(tmp_path / "cache"), tmp_path / "ops" / "operators.py"
    file.parent.mkdir()
    found = []
    for square, cube in ((2, 3), (2, 3), (4, 3), (4, 5)):
        file.write_text(OPERATOR.format(square=square, cube=cube))
        found.append(said(USER, str(file.parent), TORCHINDUCTOR_CACHE_DIR=cache, PYTHONDONTWRITEBYTECODE="1"))
    assert found == [["33.0", "0", "0"], ["33.0", "1", "0"], ["39.0", "0", "0"], ["57.0", "0", "0"]]


def test_the_fingerprint_is_of_names_and_contents(tmp_path):
    def of(files: dict[str, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return fingerprint(folder)

    first = of({"a.py": "1", "b/c.py": "2"})
    assert first == of({"b/c.py": "2", "a.py": "1", "notes.txt": "3"})
    others = [of({"a.py": "2", "b/c.py": "1"}), of({"a.py": "1", "b/d.py": "2"}), of({"a.py": "1"})]
    assert len({first, *others}) == 4
    assert fingerprint(OPERATORS) == fingerprint(OPERATORS) != first
