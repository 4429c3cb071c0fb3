"""Small cases for the tests: one of each kind, on a CPU in float32."""

import torch

from dwslm.bench import attention, delta_rule, mlp, projection, short_conv
from dwslm.bench.case import Case, Engine, Run, Shape
from dwslm.bench.gate import Gate, check

SHAPE = Shape(
    width=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    window=8,
    delta_heads=(2,),
    delta_gate_rank=8,
    mlp_hidden=32,
    softcap=20.0,
    vocab_size=64,
    layers=4,
    global_layers=1,
)
ARGUMENTS = (SHAPE, torch.float32, torch.device("cpu"))
TOKENS, CONTEXT = 64, 32


def attention_case() -> Case:
    return attention.cases(*ARGUMENTS)[0]


def window_case() -> Case:
    return attention.cases(*ARGUMENTS)[1]


def delta_case() -> Case:
    return delta_rule.cases(*ARGUMENTS)[0]


def conv_case() -> Case:
    return short_conv.cases(*ARGUMENTS)[0]


def mlp_case() -> Case:
    return mlp.cases(*ARGUMENTS)[0]


def projection_case() -> Case:
    return projection.cases(*ARGUMENTS)[0]


def right(case: Case) -> Run:
    """The plain engine of a case."""
    return case.engines[[engine.name in ("torch", "eager") for engine in case.engines].index(True)].make()


def gate(case: Case, run: Run, engine: Engine | None = None, seed: int = 0) -> Gate:
    engine = engine or Engine("under test", lambda: run, same_bits=case.op != "delta_rule")
    generator = torch.Generator().manual_seed(seed)
    return check(case, engine, run, tokens=TOKENS, context=CONTEXT, generator=generator)
