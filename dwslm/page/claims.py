"""What an earlier day-0 page found on its own, smaller GPU, as data.

Figures are that page's. `claim_rules` holds the rules: one gets the rows of this benchmark and `given`, and says what was found
here, whether it is the same, and why. Absolute times are never compared between two GPUs: orders, ratios and shares are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

THEIR_DEVICE = "a smaller GPU, its clock capped at 2,400 MHz"
NEAR = 0.25
"""A ratio or share counts as the same within this share of theirs."""


@dataclass(frozen=True)
class Claim:
    """One finding. `test` says in words when it counts as the same here; `rule` and `given` are that test."""

    name: str
    says: str
    theirs: str
    test: str
    rule: str
    given: Mapping[str, Any] = field(default_factory=dict)


GLOBAL, WINDOW = ("attention", "global"), ("attention", "window")
KDA, GDN = ("delta_rule", "kda"), ("delta_rule", "gdn")
FLA_KDA, FLA_GDN = ("fla",), ("fla_gdn", "fla", "cudnn")
CCE = ("cce", "cce_exact")
"""Engines to answer with, the first that was timed: theirs were flash-linear-attention's. Where its own GDN cannot be had, GDN
runs through the kernel of Kimi Delta with one decay a head."""

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "documents",
        "The median document is short, while close to half of the tokens are in long ones.",
        "median 457 tokens, 45 % of tokens in documents of 4,096 or more",
        f"both within {NEAR * 100:.0f} % of theirs",
        "documents",
        {"median": 457, "share": 0.45},
    ),
    Claim(
        "segments",
        "A microbatch of 16,384 tokens holds a few dozen segments.",
        "18 to 46 over the four contexts",
        "the ranges overlap",
        "segments",
        {"low": 18, "high": 46, "tokens": 16384},
    ),
    Claim(
        "gate",
        "Every kernel passes its comparison with float32.",
        "all pass, relative errors 0.2 to 0.5 %",
        "no engine fails its gate",
        "gate",
        {},
    ),
    Claim(
        "cudnn-forward",
        "cuDNN has the fastest forward pass on a global layer at context 4,096.",
        "141 against 109 TFLOP/s (FlashAttention-2)",
        "cuDNN's forward is faster beyond both spreads",
        "faster",
        {"work": GLOBAL, "first": "cudnn", "second": ("flash",), "measure": "forward", "context": 4096},
    ),
    Claim(
        "window-step",
        "Over forward and backward FlashAttention-2 beats cuDNN on sliding-window layers.",
        "19 to 31 % less time",
        "less time beyond both spreads at every context",
        "faster",
        {"work": WINDOW, "first": "flash", "second": ("cudnn",)},
    ),
    Claim(
        "global-step",
        "Over forward and backward FlashAttention-2 beats cuDNN on global layers.",
        "9 to 17 % less time",
        "less time beyond both spreads at every context",
        "faster",
        {"work": GLOBAL, "first": "flash", "second": ("cudnn",)},
    ),
    Claim(
        "flex-last",
        "FlexAttention is the slowest of the three.",
        "last at every context, window and global",
        "slowest of FlashAttention-2, cuDNN and FlexAttention at every context",
        "slowest",
        {"works": (WINDOW, GLOBAL), "engine": "flex", "others": ("flash", "cudnn")},
    ),
    Claim(
        "flex-mask",
        "FlexAttention's mask costs much more than a layer, once per microbatch.",
        "6.5 to 10 ms, 3 to 11 times a layer",
        "mask building takes longer than a layer's forward and backward",
        "extra",
        {"op": "attention", "engine": "flex", "kind": "mask"},
    ),
    Claim(
        "cudnn-graph",
        "cuDNN builds a graph for every number of documents that it has not seen, at many times a layer's cost.",
        "36 to 56 ms, 21 to 68 times a layer",
        "graph building takes longer than a layer's forward and backward",
        "extra",
        {"op": "attention", "engine": "cudnn", "kind": "graph"},
    ),
    Claim(
        "flash-ready",
        "FlashAttention-2 as PyTorch ships it takes windows and grouped heads; nothing needs compiling.",
        "used as installed",
        "PyTorch's copy passes its gate on both kinds of layer",
        "passes",
        {"works": (WINDOW, GLOBAL), "engine": "flash"},
    ),
    Claim(
        "kda-flat",
        "The cost of Kimi Delta hardly moves with the context.",
        "3.15 to 3.32 ms, 5 % from least to most",
        "at most 10 % from least to most",
        "flat",
        {"work": KDA, "engines": FLA_KDA, "most": 0.10},
    ),
    Claim(
        "gdn-flat",
        "The cost of Gated DeltaNet hardly moves with the context.",
        "1.65 to 1.75 ms, 6 % from least to most",
        "at most 10 % from least to most",
        "flat",
        {"work": GDN, "engines": FLA_GDN, "most": 0.10},
    ),
    Claim(
        "kda-window",
        "A Kimi Delta layer takes several times a window layer.",
        "3.5 times at context 4,096",
        f"the ratio is within {NEAR * 100:.0f} % of theirs",
        "against",
        {"work": KDA, "engines": FLA_KDA, "theirs": 3.5},
    ),
    Claim(
        "gdn-window",
        "A Gated DeltaNet layer takes not quite twice a window layer.",
        "1.8 times at context 4,096",
        f"the ratio is within {NEAR * 100:.0f} % of theirs",
        "against",
        {"work": GDN, "engines": FLA_GDN, "theirs": 1.8},
    ),
    Claim(
        "heads",
        "Twice the heads cost the linear kernels twice the time.",
        "2 times, 16 heads against 8",
        f"every ratio is within {NEAR * 100:.0f} % of 2",
        "heads",
        {"op": "delta_rule", "few": 8, "many": 16, "theirs": 2.0},
    ),
    Claim(
        "arms",
        "A microbatch is cheapest with windows, then Gated DeltaNet, then Kimi Delta.",
        "21.5, 33.1 and 57.0 ms of kernels",
        "the same order, each step beyond the spreads",
        "arms",
        {"order": ("sliding window", "Gated DeltaNet", "Kimi Delta")},
    ),
    Claim(
        "gdn-share",
        "Gated DeltaNet in place of windows adds under a tenth to a step.",
        "about 8 % of 25e12 operations at the bf16 rate",
        f"the share is within {NEAR * 100:.0f} % of theirs",
        "added",
        {"arm": "Gated DeltaNet", "theirs": 0.08, "operations": 25e12},
    ),
    Claim(
        "kda-share",
        "Kimi Delta in place of windows adds a quarter to a step.",
        "about 25 % of 25e12 operations at the bf16 rate",
        f"the share is within {NEAR * 100:.0f} % of theirs",
        "added",
        {"arm": "Kimi Delta", "theirs": 0.25, "operations": 25e12},
    ),
    Claim(
        "fp8-bar",
        "FP8 feed-forward layers clear the bar of 10 % faster.",
        "1.51 times (4.95 against 3.28 ms)",
        "more than 1.10 times, beyond both spreads",
        "fp8_speed",
        {"bar": 1.10},
    ),
    Claim(
        "fp8-error",
        "FP8 outputs and gradients are off by some 6 %.",
        "5.7 to 6.5 %, against bf16",
        f"the mean error is within {NEAR * 100:.0f} % of 6 %",
        "fp8_error",
        {"theirs": 0.06},
    ),
    Claim(
        "fp8-bare",
        "A bare FP8 product is almost twice as fast as one in bf16.",
        "1.86 to 1.97 times (334 to 355 against 180 TFLOP/s)",
        f"the ratio is within {NEAR * 100:.0f} % of 1.9",
        "fp8_bare",
        {"theirs": 1.9},
    ),
    Claim(
        "fp8-share",
        "A whole FP8 layer stays further below its bare product than a bf16 layer.",
        "73 % of it in FP8, 93 % in bf16",
        "the FP8 layer reaches the smaller share",
        "fp8_share",
        {},
    ),
    Claim(
        "head-time",
        "The compiled head is faster than Cut Cross-Entropy.",
        "19.4 against 27.6 ms",
        "faster beyond both spreads",
        "faster",
        {"work": ("head", ""), "first": "compiled", "second": CCE},
    ),
    Claim(
        "head-memory",
        "Cut Cross-Entropy saves memory that a model of this size does not need.",
        "96 instead of 1,150 MB",
        "it needs less, and the saving is under 5 % of the device",
        "head_memory",
        {"first": "compiled", "second": CCE, "most": 0.05},
    ),
    Claim(
        "head-rate",
        "The compiled head runs close to the rate of its products.",
        "94 % of the bf16 rate",
        f"the share is within {NEAR * 100:.0f} % of theirs",
        "head_rate",
        {"engine": "compiled", "theirs": 0.94},
    ),
    Claim(
        "padding",
        "Empty documents as padding change nothing.",
        "bit for bit in every kernel",
        "no engine's bits change",
        "padding",
        {},
    ),
    Claim(
        "replay",
        "FlashAttention-2, FlexAttention and both linear kernels replay with other boundaries, bit for bit.",
        "all four over three batches",
        "each records, with identical bits",
        "replays",
        {"engines": (("attention", ("flash",)), ("attention", ("flex",)), (*GDN, FLA_GDN), (*KDA, FLA_KDA))},
    ),
    Claim(
        "replay-time",
        "Replay takes less time than launching.",
        "9 to 20 % less",
        "less for each, beyond both spreads",
        "replay_time",
        {"ops": ("attention", "delta_rule")},
    ),
    Claim(
        "cudnn-records",
        "cuDNN's attention fails to record.",
        "fails",
        "it fails here too",
        "fails_to_record",
        {"op": "attention", "engine": "cudnn"},
    ),
    Claim(
        "linear-split",
        "The linear kernels cannot be recorded whole: the graph is split.",
        "split in two places",
        "an engine of theirs fails to record",
        "splits",
        {"op": "delta_rule", "engines": ("fla", "fla_gdn")},
    ),
    Claim(
        "resets",
        "Timing the linear kernels reset the machine until the clock was capped.",
        "2 resets, then none at 2,400 MHz",
        "a run is cut off while its clock is not capped",
        "resets",
        {},
    ),
    Claim(
        "cap-cost",
        "The clock cap costs kernel time.",
        "about 13 %",
        "needs two runs at different caps: `dwslm bench compare`",
        "never",
        {"why": "all times here are at one clock setting"},
    ),
    Claim(
        "cache",
        "Resets leave empty files in the compiler's cache.",
        "hundreds, until they were deleted",
        "empty files were found at the start",
        "cache",
        {},
    ),
    Claim(
        "torch-cudnn",
        "PyTorch's own way to cuDNN attention refuses this kind of work.",
        "refuses the GPU",
        "an engine named torch_cudnn is refused",
        "refused",
        {"op": "attention", "engine": "torch_cudnn"},
    ),
    Claim(
        "loss",
        "FP8 has no loss gap in a proxy run.",
        "1.3116 against 1.3130 bits per byte, 11.7 % more tokens a second",
        "needs a training run, not a benchmark",
        "never",
        {"why": "a benchmark trains nothing"},
    ),
)
