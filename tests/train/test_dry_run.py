"""The counted memory, against a sum by hand and peaks that an H200 has shown."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dwslm.model.lm import LanguageModel, ModelSettings
from dwslm.ops import choice
from dwslm.ops.delta_rule import cudnn as delta_cudnn
from dwslm.ops.delta_rule import fla as delta_fla
from dwslm.optim.groups import route
from dwslm.optim.optimizer import Optimizer
from dwslm.optim.settings import OptimSettings
from dwslm.train.dry_run import activation_bytes, estimate

VOCAB, TOKENS = 32_768, 131_072
PLAIN: dict[str, Any] = {"depth_block": 0, "value_embeddings": "none"}


def on_paper(**changes: Any) -> tuple[LanguageModel, Optimizer]:
    """The main model with changes, and what `estimate` asks of its optimizer; nothing is allocated."""
    with torch.device("meta"):
        model = LanguageModel(ModelSettings(**changes), VOCAB)
    parameters = dict(model.named_parameters())
    gradient = torch.empty(sum(p.numel() for p in parameters.values()), device="meta")
    owned = route(parameters, model.roles(), OptimSettings())
    return model, cast(Optimizer, SimpleNamespace(device=torch.device("cpu"), owned=owned, gradient=gradient))


def test_bytes_a_token_of_the_main_model_by_hand():
    """bfloat16 has two bytes; 3,336 rows are q, k, v, two ranks of 128 and beta, 1,538 are q, k, v and two value gates."""
    around = 2 * (4 * 1024) + 2 * 4096  # two norms' outputs and the stream twice; the MLP's squared ReLU
    linear = (
        2 * (3336 + 3336 + 2 * 1024 + 1024 + 1024) + 4 * 1024
    )  # in, out of the convolution, two gates, o twice; decay
    softmax = 2 * (1538 + 1538 + 1024 + 256) + 4 * 256  # in, out of QK-norm, o, values; their embedding
    model, _ = on_paper()
    cudnn = activation_bytes(model, shifted=False, own_delta=False)
    assert cudnn == 15 * (linear + around) + 5 * (softmax + around)
    assert activation_bytes(model, shifted=True, own_delta=False) == cudnn + 15 * 2 * 9 * 1024


@pytest.mark.parametrize(
    ("changes", "layers", "heads"), [({}, 15, 8), ({"local": "gdn"}, 15, 8), ({"delta_heads": 4}, 15, 4)]
)
def test_bytes_a_token_of_our_own_delta_rule_by_hand(changes, layers, heads):
    """Chunks of 64 tokens, bfloat16. A head's state is 128 x 128 and shared by a chunk's tokens; of inverse and scores each
    token has a row of 64. Updates are as large as values, which are no longer wanted."""
    states, squares, updates = heads * 128 * 128 * 2 / 64, heads * 2 * 64 * 2, heads * 128 * 2
    assert states + squares + updates == 1024 * heads
    model, _ = on_paper(**changes)
    own, cudnn = (activation_bytes(model, shifted=False, own_delta=own) for own in (True, False))
    moved, decays = 3 * heads * 128 * 2, 0 if changes.get("local") == "gdn" else heads * 128 * 2
    assert own - cudnn == layers * (states + squares + updates - heads * 128 * 2 + moved - decays)


@pytest.mark.parametrize(
    ("capability", "triton", "changes", "counted"),
    [
        ((9, 0), "3.6.0", {}, True),
        ((9, 0), "3.6.0", {"local": "gdn"}, True),
        ((9, 0), "3.6.0", {"delta_engine": "fused"}, True),
        ((9, 0), "3.6.0", {"delta_engine": "torch"}, False),
        ((9, 0), "3.6.0", {"delta_head_dim": 64, "delta_heads": 16}, False),
        ((9, 0), "3.6.0", {"delta_gate": "softplus"}, False),
        ((9, 0), "3.6.0", {"dtype": "float32"}, False),
        ((9, 0), "3.7.1", {}, False),
        ((8, 0), "3.6.0", {}, False),
    ],
)
def test_our_own_delta_rule_is_counted_where_it_runs(monkeypatch, capability, triton, changes, counted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(choice, "TRITON", triton)
    for library in (delta_cudnn, delta_fla):
        monkeypatch.setattr(library, "unavailable", lambda: "is not here")
    model, optimizer = on_paper(**changes, conv_engine="torch")
    optimizer.device = torch.device("cuda")
    found = estimate(model, optimizer, TOKENS)[f"activations of {TOKENS:,} tokens, compiled"]
    assert found == activation_bytes(model, shifted=True, own_delta=counted) * TOKENS


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, 112.8e9),
        (PLAIN, 107.0e9),
        (PLAIN | {"mlp_precision": "fp8"}, 109.5e9),
        (PLAIN | {"local": "window"}, 71.2e9),
    ],
)
def test_the_count_is_within_six_percent_of_peaks_with_the_delta_rule_of_cudnn(changes, measured):
    """It keeps its inputs alone (commit 2aaa6fb). What plain convolutions keep is taken off: the GPU had fused ones."""
    model, optimizer = on_paper(**changes)
    plain, fused = (activation_bytes(model, shifted=shifted, own_delta=False) for shifted in (True, False))
    shifted = 0 if changes.get("local") == "window" else (plain - fused) * TOKENS
    counted = {name: size for name, size in estimate(model, optimizer, TOKENS).items() if not name.startswith("gaps")}
    assert sum(counted.values()) - shifted == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("changes", "tokens", "measured"),
    [
        ({}, 65_536, 67.7e9),
        (PLAIN, 131_072, 129.9e9),
        (PLAIN | {"mlp_precision": "fp8"}, 131_072, 129.0e9),
        (PLAIN | {"mlp_precision": "fp8_delayed"}, 131_072, 123.9e9),
        (PLAIN | {"mlp_precision": "fp8_delayed", "projection_precision": "fp8_delayed"}, 131_072, 120.8e9),
        (
            PLAIN
            | {"mlp_precision": "fp8_delayed", "projection_precision": "fp8_delayed", "head_precision": "fp8_delayed"},
            131_072,
            126.1e9,
        ),
        (PLAIN | {"local": "window"}, 131_072, 72.7e9),
        ({"layers": 40}, 32_768, 71.4e9),
    ],
)
def test_the_count_is_within_seven_percent_of_peaks_with_our_own_delta_rule(changes, tokens, measured):
    """Peaks of docs/results/step-h200.md. The activations are those of a GPU's kernels; all else is counted as it is."""
    model, optimizer = on_paper(**changes)
    counted = estimate(model, optimizer, tokens)
    of_a_cpu = f"activations of {tokens:,} tokens, compiled"
    others = sum(size for name, size in counted.items() if name != of_a_cpu)
    assert others + activation_bytes(model, shifted=False, own_delta=True) * tokens == pytest.approx(measured, rel=0.07)


def test_a_head_in_fp8_keeps_its_transposed_gradient():
    """A byte a logit of all tokens; of a chunk (1 GiB of logits) the gradient in a byte in place of two."""
    head = "loss head (a chunk of logits and its gradient)"
    (before, vocab), (after, _) = (
        (estimate(model, optimizer, 65_536)[head], model.vocab_size)
        for model, optimizer in (on_paper(**PLAIN), on_paper(**PLAIN, head_precision="fp8_delayed"))
    )
    assert after - before == 65_536 * vocab - 2**29


def test_float8_weights_are_counted_once():
    """MLPs of 20 layers of 1,024 x 4,096, and 15 x (3,336 + 1,024) + 5 x (1,536 + 1,024) rows of 1,024, a byte each."""
    for changes, kept in (
        ({"mlp_precision": "fp8"}, None),
        ({"mlp_precision": "fp8_delayed"}, 20 * 2 * 1024 * 4096),
        ({"projection_precision": "fp8_delayed"}, (15 * 4360 + 5 * 2560) * 1024),
    ):
        model, optimizer = on_paper(**PLAIN, **changes)
        assert estimate(model, optimizer, 1024).get("float8 weights, transposed") == kept


def test_what_a_recording_holds_with_attention_residuals():
    """An H200 of 150.1 GB held 135.5 GB for main with cuDNN's delta rule, and 145.1 with our own: too near for a run that
    scores. The first stays under nine tenths, and the second does not."""
    model, optimizer = on_paper(conv_engine="torch", delta_engine="torch")
    assert "gaps between attention residuals" not in estimate(model, optimizer, TOKENS)  # nothing is recorded on a CPU
    optimizer.device = torch.device("cuda")
    counted = estimate(model, optimizer, TOKENS)
    plain, fused = (activation_bytes(model, shifted=shifted, own_delta=False) for shifted in (True, False))
    assert counted["gaps between attention residuals"] == int(0.13 * plain * TOKENS)
    cudnn = sum(counted.values()) - 1.13 * (plain - fused) * TOKENS
    own = cudnn + 1.13 * (activation_bytes(model, shifted=False, own_delta=True) - fused) * TOKENS
    assert cudnn < 0.9 * 150.1e9 < own
    model, optimizer = on_paper(**PLAIN, conv_engine="torch", delta_engine="torch")
    optimizer.device = torch.device("cuda")
    assert "gaps between attention residuals" not in estimate(model, optimizer, TOKENS)


def test_float8_in_place_of_the_norms_output():
    """One byte instead of two for the MLP's input; the square twice in one byte, once in two before. The attention residuals keep
    the input as it is, for themselves."""
    model, _ = on_paper(**PLAIN)
    delayed, _ = on_paper(**PLAIN, mlp_precision="fp8_delayed")

    def kept(model: LanguageModel) -> int:
        return activation_bytes(model, shifted=False, own_delta=False)

    assert kept(delayed) - kept(model) == 20 * -1024
    assert kept(on_paper(mlp_precision="fp8_delayed")[0]) - kept(on_paper()[0]) == 20 * 1024


def test_float8_in_place_of_what_goes_into_projections():
    """A byte for each input of a projection, instead of two for the norm's output and for the gated one; softmax attention keeps
    its output for its own gradient."""

    def kept(**changes: Any) -> int:
        return activation_bytes(on_paper(**changes)[0], shifted=False, own_delta=False)

    assert kept(**PLAIN, projection_precision="fp8_delayed") - kept(**PLAIN) == 15 * (-1024 - 1024) + 5 * (-1024 + 1024)
    assert kept(projection_precision="fp8_delayed") - kept() == 15 * (1024 - 1024) + 5 * (1024 + 1024)
