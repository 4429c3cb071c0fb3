"""Which class a kernel is: products by their shapes, the rest by the operators around them. Kernels' names mislead on purpose."""

import pytest

from dwslm.bench.step_classes import CLASSES, UPDATE, ProductShapes, classify
from dwslm.bench.step_trace import Kernel, Op

SHAPES = ProductShapes(width=1024, hidden=4096, vocab=32768)
T = 65536
BACKWARD = Op("autograd::engine::evaluate_function: CompiledFunctionBackward")


def product(*operands, name="aten::mm", around=()):
    return Kernel("sm90_xmma_flash_reduce_kernel", "kernel", 0, 1, (Op(name, operands), *around))


@pytest.mark.parametrize(
    ("operands", "backward", "expected"),
    [
        (((T, 1024), (1024, 4096)), False, "mlp up"),
        (((T, 4096), (4096, 1024)), False, "mlp down"),
        (((T, 4096), (4096, 1024)), True, "mlp up"),  # the input's gradient has the shape of down's forward pass
        (((T, 1024), (1024, 4096)), True, "mlp down"),
        (((4096, T), (T, 1024)), True, "mlp up"),
        (((1024, T), (T, 4096)), True, "mlp down"),
        (((T, 1024), (1024, 3336)), False, "projections"),
        (((1024, T), (T, 1024)), True, "projections"),
        (((T, 128), (128, 1024)), False, "projections"),
        (((16384, 1024), (1024, 32768)), False, "head"),
        (((32768, 16384), (16384, 1024)), True, "head"),
    ],
)
def test_products_by_shape_and_direction(operands, backward, expected):
    assert classify(product(*operands, around=(BACKWARD,) if backward else ()), SHAPES) == expected


def test_products_of_other_operators():
    assert classify(product((1024,), (T, 1024), (1024, 4096), name="aten::addmm"), SHAPES) == "mlp up"
    scales = ((T, 1), (1, 4096))
    assert classify(product((T, 1024), (1024, 4096), *scales, name="aten::_scaled_mm"), SHAPES) == "mlp up"
    # Ours takes the second operand by rows.
    whole = ((T, 1024), (T, 1), (4096, 1024), (4096, 1))
    assert classify(product(*whole, name="dwslm::fp8_product"), SHAPES) == "mlp up"
    whole = ((T, 3344), (1, 1), (1024, 3344), (1, 1))
    assert classify(product(*whole, name="dwslm::fp8_product", around=(BACKWARD,)), SHAPES) == "projections"
    assert classify(product(name="aten::mm"), SHAPES) == "other products"  # no shapes were recorded


def test_the_head_in_fp8():
    nats = (Op("_Nats"),)
    whole = ((16384, 1024), (1, 1), (32768, 1024), (1, 1))
    assert classify(product(*whole, name="dwslm::fp8_product", around=nats), SHAPES) == "head"
    assert classify(Kernel("_nats_gradient_kernel", "kernel", 0, 1, nats), SHAPES) == "head elementwise"
    rounding = Kernel("_fp8_both_kernel", "kernel", 0, 1, (Op("dwslm::fp8_both"), *nats))
    assert classify(rounding, SHAPES) == "quantisation"


def test_products_of_the_update_are_newton_schulz_whatever_their_shape():
    update = (Op("CompiledFunction"), Op(UPDATE))
    assert (
        classify(product((20, 1024, 4096), (20, 4096, 1024), name="aten::bmm", around=update), SHAPES)
        == "newton-schulz"
    )
    assert classify(product((T, 1024), (1024, 4096), around=update), SHAPES) == "newton-schulz"
    assert classify(Kernel("triton_poi_fused_add", "kernel", 0, 1, update), SHAPES) == "optimizer"
    assert classify(Kernel("Memset", "memset", 0, 1, update), SHAPES) == "optimizer"


def test_products_of_the_loss_are_the_head_at_any_chunk():
    assert classify(product((100, 7), (7, 9), around=(Op("_TotalNats"),)), SHAPES) == "head"


@pytest.mark.parametrize(
    ("name", "kind", "ops", "expected"),
    [
        ("cutlass_flash_gemm", "kernel", ["aten::_flash_attention_backward"], "softmax attention"),
        ("sdpa_kernel", "kernel", ["dwslm::attention_cudnn_backward"], "softmax attention"),
        ("_gate_kernel", "kernel", ["dwslm::delta_gate"], "norms and elementwise"),
        ("_norm_kernel", "kernel", ["dwslm::gated_norm_backward"], "norms and elementwise"),
        ("_backward_kernel", "kernel", ["dwslm::add_norm_backward"], "norms and elementwise"),
        ("_rounded_kernel", "kernel", ["dwslm::add_norm_rounded"], "norms and elementwise"),
        ("_rope_kernel", "kernel", ["dwslm::qk_norm_rope"], "norms and elementwise"),
        ("_both_kernel", "kernel", ["dwslm::fp8_both"], "quantisation"),
        ("_fp8_transpose_kernel", "kernel", ["dwslm::short_conv_backward_rounded"], "convolution"),
        ("kernel_0", "kernel", ["dwslm::kda_cudnn_backward", BACKWARD.name], "delta rule"),
        ("gradient_kernel", "kernel", ["dwslm::kda_fused_backward", BACKWARD.name], "delta rule"),
        ("Memset (Device)", "memset", ["dwslm::kda_cudnn"], "delta rule"),  # what an operator clears is its own
        ("fill", "kernel", ["aten::fill_", "aten::zeros", "dwslm::kda_cudnn"], "delta rule"),
        ("_forward_kernel", "kernel", ["dwslm::short_conv"], "convolution"),
        ("_read_kernel", "kernel", ["dwslm::depth_read"], "attention residuals"),
        # Named after what it computes and after who reads it.
        (
            "triton_per_fused_rms_norm_fp8_both_4",
            "kernel",
            ["triton_per_fused_rms_norm_fp8_both_4", "CompiledFunction"],
            "norms and elementwise",
        ),
        ("triton_red_fused_tanh", "kernel", ["Torch-Compiled Region: 1/0", "_TotalNats"], "head elementwise"),
        ("elementwise_kernel", "kernel", ["aten::mul", "_TotalNatsBackward"], "head elementwise"),
        ("triton_red_fused_add_mean_rsqrt", "kernel", ["CompiledFunction"], "norms and elementwise"),
        (
            "triton_tem_fused_flex_attention_backward_4",
            "kernel",
            ["triton_tem_fused_flex_attention_backward_4"],
            "softmax attention",
        ),
        ("triton_poi_fused_index_put_0", "kernel", ["triton_poi_fused_index_put_0", "CompiledFunction"], "tables"),
        ("triton_red_fused_embedding_mean", "kernel", ["CompiledFunction"], "tables"),
        ("index_put", "kernel", ["aten::index_put_", BACKWARD.name], "tables"),
        ("multi_tensor_apply", "kernel", ["aten::_foreach_add_"], "copies"),
        ("_gradient_add_kernel", "kernel", [], "copies"),
        ("_gradient_addresses_kernel", "kernel", [], "copies"),
        ("Memcpy HtoD", "copy", ["cudaMemcpyAsync", "aten::copy_"], "copies"),
        ("Memset (Device)", "memset", [], "copies"),
        ("quantize_rows", "kernel", ["dwslm::fp8_quantize"], "quantisation"),
        ("vectorized_elementwise", "kernel", ["aten::mul"], "norms and elementwise"),
        ("strange", "kernel", [], "other"),
        ("chunk_kda_bwd_kernel", "kernel", [], "delta rule"),
        ("triton_tem_fused_mm_3", "kernel", [], "other products"),
    ],
)
def test_the_rest_by_its_operators(name, kind, ops, expected):
    assert expected in CLASSES
    assert classify(Kernel(name, kind, 0, 1, tuple(Op(op) for op in ops)), SHAPES) == expected
