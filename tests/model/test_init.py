import math

import torch

from dwslm.model.lm import LanguageModel, ModelSettings


def settings(**changes):
    shape = {
        "layers": 4,
        "width": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "delta_heads": 4,
        "delta_head_dim": 64,
    }
    return ModelSettings(**(shape | {"mlp_hidden": 512, "depth_block": 4, "dtype": "float32"} | changes))


def test_spread_of_every_kind_of_tensor():
    model = LanguageModel(settings(), 2048)
    kda, attention = model.layers[0].mixer, model.layers[3].mixer
    spread = {
        "mlp up": (model.layers[0].mlp.up.weight, 0.5 / 16),
        "mlp down": (model.layers[0].mlp.down.weight, 0.5 / math.sqrt(512)),
        "kda q": (kda.input.weight[:256], 0.5 / 16),
        "kda decay up": (kda.decay_up.weight, 0.5 / math.sqrt(128)),
        "head": (model.head.weight, 0.5 / 16),
        "embedding": (model.embedding.weight, 1.0),
        "value table": (attention.value_embedding.table.weight, 0.5 / 16),
        "conv": (kda.conv, 0.5 / math.sqrt(3)),
    }
    for name, (tensor, want) in spread.items():
        assert abs(tensor.std().item() / want - 1) < 0.05, name
    assert attention.input.weight[-2:].abs().max() == 0  # the value gates
    assert model.final_query.query.abs().max() == 0 and model.final_norm.gain.min() == 1
    assert kda.A_log.abs().max() == 0 and kda.gate_bias.abs().max() == 0


def test_bounded_gate_starts_slow():
    """dt_bias is the inverse softplus of 0.001 to 0.1, so the log decay is about -5 sigmoid(-6.9) to -5 sigmoid(-2.25)."""
    kda = LanguageModel(settings(), 2048).layers[0].mixer
    softplus = torch.nn.functional.softplus(kda.dt_bias)
    assert softplus.min() >= 1e-3 * 0.999 and softplus.max() <= 0.1 * 1.001
    g = kda.gates(torch.zeros(1, 256), torch.zeros(1, kda.heads))[0]
    assert g.min() > -0.48 and g.max() < -0.004


def test_softplus_gate_draws_its_rate():
    kda = LanguageModel(settings(delta_gate="softplus"), 2048).layers[0].mixer
    assert kda.A_log.min() >= 0 and kda.A_log.max() <= math.log(16)
    f = torch.randn(5, 256)
    want = -kda.A_log.exp()[:, None] * torch.nn.functional.softplus(f + kda.dt_bias).view(5, 4, 64)
    assert torch.allclose(kda.gates(f, torch.zeros(len(f), kda.heads))[0], want)
