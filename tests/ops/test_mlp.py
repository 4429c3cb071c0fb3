import pytest
import torch

from dwslm.ops.mlp import PRECISIONS, squared_relu_mlp
from dwslm.ops.mlp.fp8 import FP8_MAX, quantize_rows
from dwslm.ops.mlp.reference import squared_relu_mlp_reference
from tests.ops.helpers import output_and_gradients, relative_error


def draw() -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(128, 64), torch.randn(256, 64) / 8, torch.randn(64, 256) / 16], torch.randn(128, 64)


def errors(precision: str, dtype: torch.dtype) -> list[float]:
    inputs, weight = draw()
    got = output_and_gradients(
        lambda *x: squared_relu_mlp(*x, precision=precision), [x.to(dtype) for x in inputs], weight.to(dtype)
    )
    want = output_and_gradients(squared_relu_mlp_reference, inputs, weight)
    return [relative_error(g, w) for g, w in zip(got, want, strict=True)]


def test_float32_meets_the_reference():
    assert max(errors("model", torch.float32)) < 1e-5


def test_bfloat16_is_within_one_percent():
    assert max(errors("model", torch.bfloat16)) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_within_its_bounds_and_is_really_fp8(dtype):
    out, *gradients = errors("fp8", dtype)
    assert 0.01 < out < 0.08
    assert min(gradients) > 0.01 and max(gradients) < 0.10


@pytest.mark.parametrize("precision", PRECISIONS)
def test_traced_in_one_graph_with_its_gradients(precision):
    """The compiler's front half; what is behind it changes no operator."""
    inputs, weight = draw()
    layer = torch.compile(
        lambda *x: squared_relu_mlp(*x, precision=precision), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    torch._dynamo.reset()
    got = output_and_gradients(layer, inputs, weight)
    want = output_and_gradients(lambda *x: squared_relu_mlp(*x, precision=precision), inputs, weight)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_gpu_within_its_bounds_called_and_compiled(precision):
    torch.manual_seed(0)
    sizes = [(4096, 512), (2048, 512), (512, 2048), (4096, 512)]
    *inputs, weight = (
        torch.randn(*size, device="cuda") / size[1] ** (0.5 * (0 < i < 3)) for i, size in enumerate(sizes)
    )
    want = output_and_gradients(squared_relu_mlp_reference, inputs, weight)
    half = [x.bfloat16() for x in inputs]

    def layer(*x):
        return squared_relu_mlp(*x, precision=precision)

    for f in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
        got = output_and_gradients(f, half, weight.bfloat16())
        out, *gradients = (relative_error(g, w) for g, w in zip(got, want, strict=True))
        assert out < (0.08 if precision == "fp8" else 0.01) and max(gradients) < (0.10 if precision == "fp8" else 0.01)


def test_rows_are_scaled_apart():
    x = torch.tensor([[1.0, -2.0], [1000.0, 10.0], [0.0, 0.0]])
    values, scale = quantize_rows(x)
    assert scale.flatten().tolist() == pytest.approx([2 / FP8_MAX, 1000 / FP8_MAX, 1e-12 / FP8_MAX])
    assert (values.float() * scale).flatten().tolist() == pytest.approx(x.flatten().tolist(), rel=0.07)


def test_bad_precision_and_bad_sizes_are_named():
    (x, up, down), _ = draw()
    with pytest.raises(ValueError, match="unknown MLP precision 'int3'"):
        squared_relu_mlp(x, up, down, "int3")
    with pytest.raises(ValueError, match="multiples of 16, not 100 tokens"):
        squared_relu_mlp(x[:100], up, down, "fp8")
