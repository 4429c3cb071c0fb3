import math

import pytest
import torch

from dwslm.model.lm import LanguageModel, ModelSettings
from dwslm.ops.attention import gpu
from dwslm.ops.mlp import PRECISIONS
from tests.model.small import ARMS, SMALL, VOCAB, packed, small_model

LENGTHS = [9, 1, 22, 0, 17, 1, 1, 13]


@pytest.mark.parametrize("value_embeddings", ["global", "alternating"])
@pytest.mark.parametrize("arm", ARMS)
def test_a_packed_batch_equals_its_documents_one_by_one(arm, value_embeddings):
    model = small_model(local=arm, value_embeddings=value_embeddings)
    tokens, targets, cu = packed(LENGTHS)
    together = model.nats(tokens, targets, cu, len(tokens))
    start = 0
    for length in LENGTHS:
        end = start + length
        if length:
            alone = model.nats(
                tokens[start:end], targets[start:end], torch.tensor([0, length], dtype=torch.int32), length
            )
            assert torch.allclose(together[start:end], alone, atol=2e-5), (arm, start)
        start = end


@pytest.mark.parametrize("arm", ARMS)
def test_packed_gradients_equal_the_sum_over_documents(arm):
    model = small_model(local=arm)
    tokens, targets, cu = packed(LENGTHS)
    model(tokens, targets, cu, len(tokens)).backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    start = 0
    for length in filter(None, LENGTHS):
        part = slice(start, start + length)
        model(tokens[part], targets[part], torch.tensor([0, length], dtype=torch.int32), length).backward()
        start += length
    for name, p in model.named_parameters():
        assert (p.grad - together[name]).norm() <= 2e-5 * max(1.0, together[name].norm()), name


@pytest.mark.parametrize("arm", ARMS)
def test_changing_one_document_changes_no_other_output_and_no_other_gradient(arm):
    model = small_model(local=arm)
    tokens, targets, cu = packed(LENGTHS)
    changed = tokens.clone()
    changed[10:32] = (changed[10:32] + 1) % VOCAB  # the third document

    def others(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats of the other documents, and the gradient that they give to the embedding rows as they meet them."""
        keep = torch.ones(len(ids), dtype=torch.bool)
        keep[10:32] = False
        inputs = {}
        hook = model.embedding.register_forward_hook(lambda m, i, o: inputs.setdefault("x", o))
        masked = torch.where(keep, targets, -100)
        total = model(ids, masked, cu, len(ids))
        hook.remove()
        (gradient,) = torch.autograd.grad(total, inputs["x"])
        return model.nats(ids, targets, cu, len(ids))[keep], gradient

    nats, gradient = others(tokens)
    nats_changed, gradient_changed = others(changed)
    assert torch.equal(nats, nats_changed)
    assert torch.equal(gradient[:10], gradient_changed[:10]) and torch.equal(gradient[32:], gradient_changed[32:])
    assert gradient[10:32].abs().max() == 0


@pytest.mark.parametrize("arm", ARMS)
def test_later_tokens_change_nothing_before_them(arm):
    model = small_model(local=arm)
    tokens, targets, cu = packed([40])
    before = model.nats(tokens, targets, cu, 40)
    tokens[25:] = (tokens[25:] + 1) % VOCAB
    assert torch.equal(before[:25], model.nats(tokens, targets, cu, 40)[:25])


@pytest.mark.parametrize("arm", ARMS)
def test_rows_do_not_depend_on_the_rows_beside_them(arm):
    model = small_model(local=arm)
    tokens, targets, _ = packed([64])
    two = model.nats(tokens, targets, torch.tensor([0, 20, 32, 50, 64, 64], dtype=torch.int32), 32)
    one = model.nats(tokens[32:], targets[32:], torch.tensor([0, 18, 32], dtype=torch.int32), 32)
    assert torch.allclose(two[32:], one, atol=2e-5)


def test_main_model_sizes():
    """Counts worked out by hand from the shapes: 5 x (q 1024 + k 256 + v 256 + o 1024) x 1024, and so on."""
    model = LanguageModel(ModelSettings(), 32768)
    attention = 5 * 1024 * (1024 + 256 + 256 + 1024)
    kda = 15 * (4 * 1024 * 1024 + 4 * 128 * 1024)
    mlp = 20 * 2 * 1024 * 4096
    sizes = model.sizes()
    assert sizes["matrices"] == attention + kda + mlp == 251_658_240
    assert sizes["input table"] == sizes["head"] == 32768 * 1024
    assert sizes["value tables"] == 5 * 32768 * 256
    layer = model.layers[0].mixer
    assert sum(p.numel() for p in layer.parameters()) == 4_741_256  # a KDA layer of the published shape
    assert [i for i, kind in enumerate(model.settings.kinds()) if kind == "global"] == [3, 7, 11, 15, 19]
    assert sum(sizes.values()) == sum(p.numel() for p in model.parameters())


def test_a_gated_deltanet_layer_has_its_published_matrices():
    model = LanguageModel(ModelSettings(layers=4, local="gdn", value_embeddings="none"), 512)
    mixer = model.layers[0].mixer
    assert mixer.input.weight.numel() + mixer.output.weight.numel() == 5_259_264


def test_loss_starts_near_the_uniform_one():
    model = LanguageModel(SMALL, VOCAB)
    tokens, targets, cu = packed([200])
    assert model(tokens, targets, cu, 200).item() / 200 == pytest.approx(math.log(VOCAB), abs=0.3)


def test_bfloat16_agrees_with_float32():
    tokens, targets, cu = packed(LENGTHS)
    full = small_model(dtype="float32")(tokens, targets, cu, len(tokens)).item()
    half = small_model(dtype="bfloat16")(tokens, targets, cu, len(tokens)).item()
    assert half == pytest.approx(full, rel=0.01)


@pytest.mark.parametrize("arm", ARMS)
def test_the_compiler_takes_the_whole_model_in_one_graph(arm):
    model = small_model(local=arm)
    tokens, targets, cu = packed([16, 16])
    compiled = torch.compile(model.hidden, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(tokens, cu, 32), model.hidden(tokens, cu, 32), atol=1e-5)


def test_seed_alone_decides_the_start():
    a, b, c = (LanguageModel(SMALL, VOCAB, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["embedding.weight"], c["embedding.weight"])


def test_fp8_trains_the_same_model_within_its_bounds():
    tokens, targets, cu = packed([32, 32])
    losses = {p: small_model(mlp_precision=p)(tokens, targets, cu, 64).item() for p in PRECISIONS}
    losses["projections"] = small_model(projection_precision="fp8_delayed")(tokens, targets, cu, 64).item()
    assert len(set(losses.values())) == 4
    for precision in ("fp8", "fp8_delayed", "projections"):
        assert losses[precision] == pytest.approx(losses["model"], rel=0.01)


def test_each_part_can_be_turned_off():
    full = small_model().sizes()
    assert small_model(value_embeddings="none").sizes()["value tables"] == 0 < full["value tables"]
    assert small_model(depth_block=0).sizes()["rest"] < full["rest"]
    for factor, settings in ((1.0, {"base_depth": 0}), (0.5, {"layers": 16, "depth_block": 8}), (1.0, {"layers": 4})):
        layer = small_model(**settings).layers[0]
        assert layer.mixer.output.factor == layer.mlp.factor == factor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": "kdaa"}, "model.local='kdaa' is not one of kda, gdn, window"),
        ({"layers": 6}, "model.layers=6 is not a multiple of the pattern's length 4"),
        ({"pattern": ["lokal"]}, "may hold only 'local' and 'global'"),
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide model.heads=8"),
        ({"depth_block": 7}, "model.depth_block=7 does not divide the 40 sublayers"),
        ({"mlp_precision": "int4"}, "model.mlp_precision='int4'"),
        ({"projection_precision": "fp8"}, "model.projection_precision='fp8'"),
        ({"head_precision": "fp8"}, "model.head_precision='fp8'"),
        (
            {"head_precision": "fp8_delayed", "head_engine": "torch"},
            "model.head_engine=torch is for model.head_precision=model",
        ),
        ({"dtype": "float16"}, "model.dtype='float16'"),
        ({"head_dim": 7}, "must be even"),
        ({"delta_engine": "warp"}, "unknown delta-rule engine 'warp'"),
        ({"width": 0}, "model.width=0 must be 1 or more"),
        ({"softcap": 0.0}, "model.softcap=0.0 must be above 0"),
        ({"softcap": 40.5}, "at most 40"),  # float32 has no exp(-2 x 44) of full precision
        ({"norm_eps": float("nan")}, "model.norm_eps=nan must be above 0"),
        ({"kv_heads": 0}, "model.kv_heads=0 must be 1 or more"),
        ({"heads": -4}, "model.heads=-4 must be 1 or more"),
        ({"depth_block": -1}, r"model.depth_block=-1 must be 0 \(off\) or more"),
        ({"base_depth": -1}, "model.base_depth=-1"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelSettings(**change)


@pytest.mark.slow
@pytest.mark.parametrize("depth_block", [0, 4])
def test_what_the_compiler_makes_of_a_model_with_flex_attention_computes_the_same(depth_block, monkeypatch):
    """flex is a higher-order operator, after which some compilers lost track of objects whose attributes change."""
    monkeypatch.setattr(gpu, "misfit", lambda *_: None)  # it is refused on a CPU for its slowness, not for its numbers
    tokens, _, cu = packed([32, 32])
    shape = {"local": "window", "depth_block": depth_block, "head_dim": 16}
    want = small_model(**shape).hidden(tokens, cu, 64)
    model = small_model(**shape, attention_engine="flex")
    with torch.no_grad():
        got = torch.compile(model.hidden, backend="aot_eager", fullgraph=True)(tokens, cu, 64)
    assert torch.allclose(got, want, atol=1e-5)
