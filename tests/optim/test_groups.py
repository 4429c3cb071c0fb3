"""Routing: every element of every parameter has exactly one rule, and what cannot be routed is refused."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dwslm.optim.groups import ROLES, STATE, memory_bytes, route, routing_table
from dwslm.optim.settings import OptimSettings


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, list[tuple[str, int, str]]]]:
    parameters, roles = {}, {}
    for i in range(draw(st.integers(1, 6))):
        blocks = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(ROLES)), min_size=1, max_size=4))
        name = f"layers.{i}.weight"
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        parameters[name] = torch.ones(
            sum(rows for rows, _ in blocks), draw(st.integers(1, 4)), dtype=dtype, device="meta"
        )
        single = len(blocks) == 1
        roles[name] = [("" if single else f"b{j}", rows, role) for j, (rows, role) in enumerate(blocks)]
    return parameters, roles


RULES = [
    OptimSettings(),
    OptimSettings(head="adam"),
    OptimSettings(matrices="muon", head="adam"),
    OptimSettings(matrices="adamw", head="adam", weight_decay=0.1),
]


@given(models(), st.sampled_from(RULES))
def test_each_element_once(
    model: tuple[dict[str, Tensor], dict[str, list[tuple[str, int, str]]]], settings: OptimSettings
) -> None:
    parameters, roles = model
    blocks = route(parameters, roles, settings)
    assert max(Counter(block.name for block in blocks).values()) == 1
    for name, parameter in parameters.items():
        rows = [
            row
            for block in blocks
            if block.parameter == name
            for row in range(block.start, block.start + block.shape[0])
        ]
        assert rows == list(range(parameter.shape[0]))
    assert all(block.rule in STATE for block in blocks)
    assert memory_bytes(blocks)["gradient"] == 4 * sum(p.numel() for p in parameters.values())


def test_table_by_hand() -> None:
    parameters = tensors(qkv=(8, 4), gain=(4,), head=(16, 4), embedding=(16, 4), values=(16, 2), scalar=())
    roles = {
        "qkv": [("q", 4, "matrix"), ("k", 2, "matrix"), ("beta", 2, "vector")],
        "gain": [("", 4, "vector")],
        "head": [("", 16, "head")],
        "embedding": [("", 16, "embedding")],
        "values": [("", 16, "value_table")],
        "scalar": [("", 1, "vector")],
    }
    blocks = route(parameters, roles, OptimSettings())
    rows = routing_table(blocks, lr=0.013)
    assert [(r["name"], r["shape"], r["role"], r["rule"]) for r in rows] == [
        ("qkv/q", [4, 4], "matrix", "muonh"),
        ("qkv/k", [2, 4], "matrix", "muonh"),
        ("qkv/beta", [2, 4], "vector", "adam"),
        ("gain", [4], "vector", "adam"),
        ("head", [16, 4], "head", "adamh"),
        ("embedding", [16, 4], "embedding", "adam"),
        ("values", [16, 2], "value_table", "adam"),
        ("scalar", [], "vector", "adam"),
    ]
    # 0.013 / (13/3) = 0.003; value tables half of it
    rates = [0.013, 0.013, 0.003, 0.003, 0.013, 0.003, 0.0015, 0.003]
    assert [r["lr"] for r in rows] == pytest.approx(rates)
    # 8x4 + 16x4 masters and beta's own; gain, embedding, values and scalar are their own masters
    assert memory_bytes(blocks) == {
        "master": 4 * (32 + 64),
        "gradient": 4 * (32 + 4 + 64 + 64 + 32 + 1),
        "update": 4 * (24 + 64 + (8 + 4 + 64 + 32 + 1)),
        "momentum": 4 * 24,
        "radius": 4 * 3,
        "exp_avg": 4 * (8 + 4 + 64 + 64 + 32 + 1),
        "exp_avg_sq": 4 * (8 + 4 + 64 + 64 + 32 + 1),
    }


def test_alternatives_and_factors() -> None:
    parameters = tensors(w=(3, 2), head=(4, 2), embedding=(4, 2))
    roles = {
        "w": [("", 3, "matrix")],
        "head": [("", 4, "head")],
        "embedding": [("", 4, "embedding")],
    }
    settings = OptimSettings(
        matrices="muon", head="adam", weight_decay=0.1, adam_ratio=2, head_factor=3, embedding_factor=5
    )
    rows = routing_table(route(parameters, roles, settings), lr=1.0)
    assert [(r["rule"], r["lr"], r["weight_decay"]) for r in rows] == [
        ("muon", 1.0, 0.1),
        ("adam", 1.5, 0.1),
        ("adam", 2.5, 0.0),
    ]
    rows = routing_table(route(parameters, roles, OptimSettings(head_factor=0.5)), lr=1.0)
    assert (rows[1]["rule"], rows[1]["lr"]) == ("adamh", 0.5)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({}, "parameter w has no role"),
        ({"w": [("", 4, "matrix")], "x": [("", 1, "vector")]}, "a role is given for x, which is not a param"),
        ({"w": [("", 4, "matrics")]}, "w has the unknown role 'matrics'"),
        ({"w": [("q", 2, "matrix")]}, "blocks of w must cover its 4 rows once, got q: 2"),
        (
            {"w": [("q", 2, "matrix"), ("k", 3, "matrix")]},
            "blocks of w must cover its 4 rows once, got q: 2, k",
        ),
        ({"w": [("q", 2, "matrix"), ("q", 2, "matrix")]}, "blocks of w must cover"),
        ({"w": [("q", 4, "matrix"), ("k", 0, "matrix")]}, "blocks of w must cover"),
        ({"w": []}, "got none"),
    ],
)
def test_wrong_roles(roles: dict[str, list[tuple[str, int, str]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(tensors(w=(4, 2)), roles, OptimSettings())


@pytest.mark.parametrize("shape", [(4,), (4, 1, 3)])
@pytest.mark.parametrize("settings", RULES)
def test_a_matrix_is_two_dimensional(shape: tuple[int, ...], settings: OptimSettings) -> None:
    with pytest.raises(ValueError, match=r"w has role matrix but shape \[4"):
        route(tensors(w=shape), {"w": [("", 4, "matrix")]}, settings)


def test_one_tensor_under_two_names() -> None:
    table = torch.ones(4, 2)
    roles = {"embedding": [("", 4, "embedding")], "head": [("", 4, "head")]}
    with pytest.raises(ValueError, match="head and embedding are one tensor"):
        route({"embedding": table, "head": table}, roles, OptimSettings())


def test_other_dtypes() -> None:
    with pytest.raises(ValueError, match="parameter w is torch.float16"):
        route({"w": torch.ones(4, 2).half()}, {"w": [("", 4, "matrix")]}, OptimSettings())
