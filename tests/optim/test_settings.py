"""Settings: wrong values and values that nothing would read are refused."""

import ast
import dataclasses
import inspect
from typing import Any

import pytest

from dwslm.optim import settings as module
from dwslm.optim.settings import OptimSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"matrices": "muonhh"}, "optim.matrices=muonhh is not one of muonh, muon, adamw"),
        ({"head": "muonh"}, "optim.head=muonh is not one of adamh, adam"),
        ({"schedule": "constant"}, "optim.schedule=constant"),
        ({"newton_schulz": "cubic"}, "optim.newton_schulz=cubic"),
        ({"newton_schulz_dtype": "float16"}, "optim.newton_schulz_dtype=float16"),
        ({"lr": 0.0}, "optim.lr=0.0 must be above 0"),
        ({"lr": float("nan")}, "optim.lr=nan"),
        ({"clip": -1.0}, "optim.clip=-1.0"),
        ({"momentum": 1.0}, r"optim.momentum=1.0 must be in \[0, 1\)"),
        ({"beta2": 1.5}, "optim.beta2=1.5"),
        ({"eps": 0.0}, r"optim.eps=0.0 must be in \(0, inf\)"),
        ({"value_table_factor": -0.5}, "optim.value_table_factor=-0.5"),
        ({"warmup": 1.0}, "optim.warmup=1.0"),
        ({"warmup": 0.5, "decay_start": 0.4}, "optim.decay_start=0.4"),
        ({"final_lr": 2.0}, "optim.final_lr=2.0"),
        ({"weight_decay": 0.1}, "optim.weight_decay=0.1 has no effect with optim.matrices=muonh"),
        ({"matrices": "muon"}, "optim.head=adamh .* optim.matrices=muon .* set optim.head=adam"),
        ({"matrices": "adamw", "head": "adam", "momentum": 0.9}, "optim.momentum=0.9 has no effect"),
        (
            {"matrices": "adamw", "head": "adam", "newton_schulz": "quintic"},
            "optim.newton_schulz=quintic has",
        ),
        ({"schedule": "cosine", "decay_start": 0.8}, "optim.decay_start=0.8 has no effect"),
    ],
)
def test_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimSettings(**wrong)


def test_alternatives_are_accepted() -> None:
    OptimSettings(matrices="muon", head="adam", weight_decay=0.1, newton_schulz="quintic", clip=None)
    OptimSettings(matrices="adamw", head="adam", weight_decay=0.1, adam_ratio=1, schedule="linear")
    OptimSettings(head="adam")


def test_every_setting_is_documented() -> None:
    (cls,) = (node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef))
    documented = {
        field.target.id
        for field, text in zip(cls.body, cls.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    assert documented == {field.name for field in dataclasses.fields(OptimSettings)}
