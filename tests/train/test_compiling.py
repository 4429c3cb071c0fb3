"""Operators that take several results of one another, compiled: in time that grows with their number, not doubling with each."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from dwslm.train.compiling import name_operators_briefly

name_operators_briefly()

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


def test_an_operator_met_late_is_not_written_out():
    fresh = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, cwd=ROOT, env=fresh
    )
    assert done.stdout.split() == ["True"], done.stderr[-2000:]
