"""Floors: products from the parameters, bytes counted by hand, milliseconds from the rates."""

import numpy as np
import pytest
import torch

from dwslm.bench import step_floor
from dwslm.bench.step_classes import CLASSES
from dwslm.bench.step_floor import Floor, depth_passes, floors
from dwslm.model.lm import LanguageModel, ModelSettings
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings

CEILINGS = {"copy_gb_s": {"median": 4000.0}, "bf16_tflops": {"median": 700.0}, "fp8_tflops": {"median": 1400.0}}


def test_milliseconds_are_those_of_the_scarcer_rate():
    assert Floor(flop=7e12).ms(CEILINGS) == pytest.approx(10.0)  # 7e12 / 700e12 s
    assert Floor(flop=7e12, fp8_flop=7e12).ms(CEILINGS) == pytest.approx(15.0)
    assert Floor(bytes=4e9).ms(CEILINGS) == pytest.approx(1.0)
    assert Floor(flop=7e12, bytes=80e9).ms(CEILINGS) == pytest.approx(20.0)
    assert Floor(flop=7e12).ms(CEILINGS | {"bf16_tflops": None}) is None
    assert Floor(bytes=4e9).ms(CEILINGS | {"bf16_tflops": None}) == pytest.approx(1.0)


def test_reads_of_the_attention_residuals():
    # 2 layers, blocks of 2: readers 0 to 4 see 1, 2, 2, 3, 3 sources (embedding, finished blocks, what is in progress).
    assert depth_passes(2, 2) == 3 * (1 + 2 + 2 + 3 + 3) + 2 * 5
    assert depth_passes(20, 8) == 3 * 161 + 2 * 41


@pytest.fixture(scope="module")
def built():
    s = ModelSettings(layers=4, width=32, heads=2, kv_heads=1, head_dim=16, delta_heads=2, delta_head_dim=16,
                      delta_gate_rank=8, mlp_hidden=64, window=8, depth_block=4, dtype="float32")  # fmt: skip
    model = LanguageModel(s, vocab_size=128)
    return model, Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01)


def test_products_are_six_operations_a_parameter_and_token(built):
    model, optimizer = built
    batches = [np.array([0, 40, 64, 64], np.int32)] * 2
    found = floors(model, optimizer, batches, tokens=64, context=64)
    assert set(found) <= set(CLASSES)
    sizes = model.sizes()
    products = sum(found[name].flop for name in ("mlp up", "mlp down", "projections", "head"))
    assert products == pytest.approx(6 * 128 * (sizes["matrices"] + sizes["head"]))
    assert found["mlp up"].flop == pytest.approx(6 * 128 * 32 * 64 * 4)
    # Two segments of 40 and 24 tokens see 820 + 300 pairs; 14 operations a pair and channel, one global layer, two batches.
    assert found["softmax attention"].flop == pytest.approx(2 * 14 * 32 * (820 + 300))
    assert found["head elementwise"].bytes == 2 * 2 * 128 * 128
    assert found["attention residuals"].bytes == 2 * 128 * 32 * depth_passes(4, 4)
    # Additions and norms are in those reads. Gates of three KDA layers, norm and rotation of one global layer's 2 + 1 heads, and
    # the squared ReLU of four MLPs outside of their products.
    gates, rotations, relu = 128 * 3 * 32 * (14 + 2 * 8), 128 * 2 * 5 * 3 * 16, 128 * 2 * 5 * 4 * 64
    assert found["norms and elementwise"].bytes == gates + rotations + relu
    # Input table of 32 and one value table of 16 columns.
    assert found["tables"].bytes == 128 * (32 + 16) * 16
    parameters = sum(p.numel() for p in model.parameters())
    assert found["copies"].bytes == 2 * 12 * parameters  # all float32 here
    assert found["newton-schulz"].flop > 0 and found["optimizer"].bytes > 12 * parameters


def test_parts_that_are_off_have_no_floor(built):
    s = ModelSettings(layers=4, width=32, heads=2, kv_heads=1, head_dim=16, mlp_hidden=64, window=8, depth_block=0,
                      local="window", value_embeddings="none", dtype="float32", mlp_precision="fp8")  # fmt: skip
    model = LanguageModel(s, vocab_size=128)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01)
    found = floors(model, optimizer, [np.array([0, 64], np.int32)], tokens=64, context=64)
    assert not {"delta rule", "convolution", "attention residuals"} & set(found)
    # Weight gradients stay in bf16: a third of the operations.
    assert found["mlp up"].fp8_flop == 2 * found["mlp up"].flop == 4 * 64 * 32 * 64 * 4
    assert found["quantisation"].bytes == 64 * 4 * (6 * 32 + 12 * 64)
    assert found["projections"].fp8_flop == 0
    # One global layer sees 64 * 65 / 2 pairs; three with a window of 8 see 36 + 56 * 8.
    assert found["softmax attention"].flop == pytest.approx(14 * 32 * (2080 + 3 * (36 + 56 * 8)))


def test_projections_in_fp8_by_hand():
    """Width and inner width 32. KDA: 3 x 32 rows and two ranks of 8 in, 2 rows of beta beside them, 32 out; two matrices of
    8 x 32 take the gates out of their low rank. Softmax: 32 + 2 x 16 rows in, 32 out."""
    s = ModelSettings(layers=4, width=32, heads=2, kv_heads=1, head_dim=16, delta_heads=2, delta_head_dim=16,
                      delta_gate_rank=8, mlp_hidden=64, depth_block=0, value_embeddings="none", dtype="float32",
                      projection_precision="fp8_delayed")  # fmt: skip
    model = LanguageModel(s, vocab_size=128)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01)
    found = floors(model, optimizer, [np.array([0, 64], np.int32)], tokens=64, context=64)
    assert found["projections"].fp8_flop == 6 * 64 * 32 * (3 * (112 + 32) + 64 + 32)
    assert found["projections"].flop == 6 * 64 * 3 * 2 * 8 * 32
    assert found["quantisation"].bytes == 64 * 4 * (3 * (32 + 114 + 32 + 32) + 32 + 64 + 32 + 32)
    assert found["mlp up"].fp8_flop == 0


def test_a_head_in_fp8_by_hand():
    """All of its products; hidden states in with 2 bytes and out twice with 1; of the logits as many bytes as before."""
    settings = dict(layers=4, width=32, heads=2, kv_heads=1, head_dim=16, window=8, mlp_hidden=64, depth_block=0,
                    local="window", value_embeddings="none", dtype="float32")  # fmt: skip
    found = []
    for precision in ("model", "fp8_delayed"):
        model = LanguageModel(ModelSettings(**settings, head_precision=precision), vocab_size=128)
        optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01)
        found.append(floors(model, optimizer, [np.array([0, 64], np.int32)], tokens=64, context=64))
    before, after = found
    assert after["head"].flop == 0 and after["head"].fp8_flop == before["head"].flop == 6 * 64 * 32 * 128
    assert after["quantisation"].bytes == 64 * 4 * 32 and "quantisation" not in before
    assert all(after[name] == before[name] for name in before.keys() - {"head"})


def test_what_fused_kernels_keep_off_the_memory(monkeypatch):
    """Three KDA layers of inner width 32, 64 tokens: log decays of 2 bytes in place of 4, in and out of the gate and their
    gradient likewise; in and out of the delta rule three times."""
    s = ModelSettings(layers=4, width=32, heads=2, kv_heads=1, head_dim=16, delta_heads=2, delta_head_dim=16,
                      delta_gate_rank=8, mlp_hidden=64, depth_block=0, value_embeddings="none", dtype="float32",
                      projection_precision="fp8_delayed")  # fmt: skip
    model = LanguageModel(s, vocab_size=128)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01)
    given = model, optimizer, [np.array([0, 64], np.int32)]
    before = floors(*given, tokens=64, context=64)
    monkeypatch.setattr(step_floor, "decay_dtype", lambda *a, **k: torch.bfloat16)
    monkeypatch.setattr(step_floor.delta_gate, "resolve", lambda *a: "fused")
    monkeypatch.setattr(step_floor.convolution, "rounds", lambda *a: True)
    after = floors(*given, tokens=64, context=64)
    decays = 2 * 64 * 3 * 32
    assert after["norms and elementwise"].bytes == before["norms and elementwise"].bytes - 2 * decays
    assert after["delta rule"].bytes == before["delta rule"].bytes - 3 * decays
    # What the gated norm gives is rounded where it is computed, and so is the gradient of the 3 x 32 + 2 x 8 + 2 columns before
    # the convolution, which writes two bytes a value as before.
    assert after["quantisation"].bytes == before["quantisation"].bytes - 4 * 64 * 3 * (32 + 114)
    changed = {"norms and elementwise", "delta rule", "quantisation"}
    assert all(after[name] == before[name] for name in before.keys() - changed)


@pytest.mark.parametrize(("mlp", "projections", "readers"), [("fp8_delayed", "fp8_delayed", 8), ("fp8_delayed", "model", 4),
                                                             ("fp8", "fp8_delayed", 4)])  # fmt: skip
def test_norms_that_round_what_they_give(monkeypatch, mlp, projections, readers):
    """Before each product with delayed scales a read of 2 bytes and two writes of 1 move into the norm, whose own count stays:
    it wrote 2 bytes, and writes twice 1."""
    s = ModelSettings(layers=4, width=32, heads=2, kv_heads=1, head_dim=16, window=8, mlp_hidden=64, depth_block=0,
                      local="window", value_embeddings="none", dtype="float32", mlp_precision=mlp,
                      projection_precision=projections)  # fmt: skip
    model = LanguageModel(s, vocab_size=128)
    optimizer = Optimizer(dict(model.named_parameters()), model.roles(), OptimSettings(), lr=0.01)
    given = model, optimizer, [np.array([0, 64], np.int32)]
    before = floors(*given, tokens=64, context=64)
    monkeypatch.setattr(step_floor.add_norm, "rounds", lambda *a: True)
    after = floors(*given, tokens=64, context=64)
    assert after["quantisation"].bytes == before["quantisation"].bytes - readers * 4 * 64 * 32
    assert all(after[name] == before[name] for name in before.keys() - {"quantisation"})
