"""Which part of the step a kernel belongs to, from the operators that launched it and their shapes.

Names of kernels say too little: FlashAttention carries the name of a matrix library, and a product of the head is the same kernel
as one of the MLP. A product is told by the shapes of its operands, everything else by the operator around it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dwslm.bench.step_trace import Kernel, Op

UPDATE = "dwslm::update"
"""Name of the stretch in which the optimizer's step is launched."""

PRODUCTS = ("mlp up", "mlp down", "projections", "head", "newton-schulz", "other products")
CLASSES = (*PRODUCTS, "delta rule", "softmax attention", "head elementwise", "norms and elementwise", "convolution",
           "attention residuals", "quantisation", "tables", "copies", "optimizer", "other")  # fmt: skip
"""In the order of the report. "tables": embedding lookups and their gradients; "copies": copies, memsets, accumulation."""

SYMMETRIC_OPS = ("gram", "gram_polynomial")
WITH_RELU = {
    "squared_relu_up": "mlp up",
    "squared_relu_down_gradient": "mlp down",
    "fp8_squared_relu_up": "mlp up",
    "fp8_squared_relu_down_gradient": "mlp down",
}
MATRIX_OPS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "fp8_product", *SYMMETRIC_OPS)
BIASED = ("addmm", "baddbmm")  # their first operand is what is added

# First match wins, innermost operator first; names in small letters without what stands before the colons. What these launch
# through operators of their own (a fill, a copy) is theirs. The compiler's kernels are told below: their names have the operators
# in them that read what they write.
PARTS: tuple[tuple[str, str], ...] = (
    (r"nats|crossentropy|cross_entropy|loss_head|softcap", "head elementwise"),
    (r"kda|gdn|delta_rule|delta_attention|deltarule", "delta rule"),
    (r"flash|attention|varlen_attn|flex_tiles|sdpa", "softmax attention"),
    (r"short_conv|causal_?conv|conv1d|convolution", "convolution"),
    (r"depth_|attnres", "attention residuals"),
    (r"quant|fp8_", "quantisation"),
)
GENERIC: tuple[tuple[str, str], ...] = (
    (r"embedding|index_put|index_select|scatter", "tables"),
    (r"^(copy_|fill_|zero_|zeros|clone|contiguous|_foreach_add_|_foreach_copy_|_to_copy|accumulategrad)$", "copies"),
    (r"norm|swiglu|rotary|rope|gate|relu", "norms and elementwise"),
)
# Where an operator says nothing: kernels of Triton and of libraries that launch them themselves.
KERNELS: tuple[tuple[str, str], ...] = (
    (r"^_gradient_(add|addresses)_kernel$", "copies"),
    (r"^triton_.*(embedding|index_put|index_select|scatter)", "tables"),
    (r"^triton_.*flex_attention", "softmax attention"),
    (r"^triton_(tem|mm|bmm)_", "other products"),
    (r"^triton_", "norms and elementwise"),
    (r"cross_entropy", "head elementwise"),
    (r"kda|delta_rule|gated_delta|chunk_|recompute_w_u", "delta rule"),
    (r"flash_fwd|flash_bwd", "softmax attention"),
    (r"causal_conv|conv1d", "convolution"),
    (r"attnres|depth_", "attention residuals"),
    (r"norm|swiglu|rotary|elementwise|reduce_kernel", "norms and elementwise"),
)
HEAD = re.compile(PARTS[0][0])
COMPILED = "triton_"


@dataclass(frozen=True)
class ProductShapes:
    """What the products of a model look like: widths that tell one weight from another."""

    width: int
    hidden: int
    vocab: int


def classify(kernel: Kernel, shapes: ProductShapes) -> str:
    """The class of one kernel out of `CLASSES`."""
    names = [_bare(op.name) for op in kernel.ops]
    updating = any(op.name == UPDATE for op in kernel.ops)
    for op, name in zip(kernel.ops, names, strict=True):
        if name in WITH_RELU:
            return WITH_RELU[name]
        if name in MATRIX_OPS:
            if updating:
                return "newton-schulz"
            if any(HEAD.search(around) for around in names):
                return "head"
            return _product(op, name, any("backward" in around for around in names), shapes)
    if updating:
        return "optimizer"
    named = [name for name in names if not name.startswith(COMPILED)]
    for table in (PARTS, GENERIC):
        for name in named:
            for pattern, found in table:
                if re.search(pattern, name):
                    return found
    if kernel.kind != "kernel":
        return "copies"
    for pattern, found in KERNELS:
        if re.search(pattern, kernel.name.lower()):
            return found
    return "norms and elementwise" if any(op.name.startswith("aten::") for op in kernel.ops) else "other"


def classify_all(kernels: Sequence[Kernel], shapes: ProductShapes) -> list[str]:
    return [classify(kernel, shapes) for kernel in kernels]


def _bare(name: str) -> str:
    """`aten::mm` as `mm`, `autograd::engine::evaluate_function: MmBackward0` as `mmbackward0`."""
    return name.rpartition(":")[2].strip().lower()


def _product(op: Op, name: str, backward: bool, shapes: ProductShapes) -> str:
    """The weight that a product belongs to.

    Forward it is x [T, in] by W^T, k = in; backward dy [T, out] by W, k = out, or dy^T x, out x in with k = T. So with the
    direction known, the inner size or the output's rows tell up from down.
    """
    operands = op.shapes[1:3] if name in BIASED else op.shapes[:2]
    if name == "fp8_product" and len(op.shapes) > 2:  # b comes by rows, after the scales of a
        operands = (op.shapes[0], op.shapes[2][::-1])
    if len(operands) < 2 or len(operands[0]) < 2 or len(operands[1]) < 2:
        return "other products"
    (rows, inner), columns = operands[0][-2:], operands[1][-1]
    sizes = {rows, inner, columns}
    if shapes.vocab in sizes and shapes.width in sizes:
        return "head"
    if {shapes.hidden, shapes.width} <= sizes and shapes.hidden != shapes.width:
        if not backward:
            return "mlp up" if inner == shapes.width else "mlp down"
        if inner in (shapes.hidden, shapes.width):  # the input's gradient
            return "mlp up" if inner == shapes.hidden else "mlp down"
        return "mlp up" if rows == shapes.hidden else "mlp down"
    return "projections"
