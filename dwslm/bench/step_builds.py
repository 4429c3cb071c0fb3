"""Named builds of the main model whose steps are measured beside each other, and what a measuring process is asked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN = ("model.depth_block=0", "model.value_embeddings=none")
FP8 = ("model.mlp_precision=fp8_delayed", "model.projection_precision=fp8_delayed")
HEAD = "model.head_precision=fp8_delayed"


def rows_of(context: int, segments: int) -> tuple[str, ...]:
    """Rows of another length. `segments` grow with it, so that a micro-batch keeps its slots for documents."""
    return (
        f"data.packing.context={context}",
        f"data.packing.segments_per_row={segments}",
        f"evaluate.segments_per_row={segments}",
    )


BUILDS: dict[str, tuple[str, ...]] = {
    "main": (),
    "plain": PLAIN,
    "fp8": (*PLAIN, "model.mlp_precision=fp8"),
    "fp8_delayed": (*PLAIN, "model.mlp_precision=fp8_delayed"),
    "fp8_all": (*PLAIN, *FP8),
    "fp8_head": (*PLAIN, *FP8, HEAD),
    "main_fp8": (*FP8, HEAD),
    "window": (*PLAIN, "model.local=window"),
    "no_depth": ("model.depth_block=0",),
    "no_values": ("model.value_embeddings=none",),
    "layers_8": ("model.layers=8",),
    # Twice the layers keep twice the activations: at 65,536 tokens 119 GB are counted, close to all of an H200's.
    "layers_40": ("model.layers=40", "train.micro_batch_tokens=32768"),
    "context_1k": rows_of(1_024, 8),
    "context_16k": rows_of(16_384, 128),
    "context_32k": rows_of(32_768, 256),
}
"""Name to overrides on top of the configuration. "plain" has value embeddings and attention residuals off."""
GROUPS: dict[str, tuple[str, ...]] = {
    "table": (
        "main",
        "plain",
        "fp8",
        "fp8_delayed",
        "fp8_all",
        "fp8_head",
        "main_fp8",
        "window",
        "no_depth",
        "no_values",
    ),
    "growth": ("main", "layers_8", "layers_40", "context_1k", "context_16k", "context_32k"),
}
"""Names that stand for several builds. "main" is the point of 20 layers and context 4,096 of the growth."""
PEER = "peer"
"""flash-linear-attention's own model; not a build of ours."""

MEANING = {
    "main": "everything on",
    "plain": "value embeddings and attention residuals off",
    "fp8": "plain, FP8 MLP with one scale per row",
    "fp8_delayed": "plain, FP8 MLP with delayed scales per tensor",
    "fp8_all": "plain, FP8 MLP and projections with delayed scales per tensor",
    "fp8_head": "fp8_all, and the loss head in FP8",
    "main_fp8": "everything on; MLP, projections and loss head in FP8 with delayed scales per tensor",
    "window": "plain, window arm in place of KDA",
    "no_depth": "attention residuals off",
    "no_values": "value embeddings off",
    "layers_8": "main with 8 layers",
    "layers_40": "main with 40 layers, in micro-batches of 32,768 tokens: twice the layers leave room for half of them",
    "context_1k": "main at context 1,024",
    "context_16k": "main at context 16,384",
    "context_32k": "main at context 32,768",
    PEER: "flash-linear-attention's own model, trained the plain way",
}


@dataclass(frozen=True)
class Measurement:
    """What one measuring process does. Plain data that crosses to it as JSON."""

    name: str
    """As it stands in the report."""
    overrides: list[str]
    """Of the configuration, all of them."""
    result: str
    """File that the result is written to, anew after each part."""
    peer: bool = False
    steps: int = 4
    """Of each timed stretch."""
    warm_s: float = 10.0
    """Sustained work before anything is timed."""
    classes: bool = True
    """Profile a step after the timed ones."""
    first_only: bool = False
    """Do the first step and no more: how long a start takes when the compilers' caches are full."""
    caches: list[str] = field(default_factory=list)
    """Folders that compilers keep their work in."""
    started: float = 0.0
    """When the process was started, seconds since 1970."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def named(names: Sequence[str], recorded: str | None) -> list[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of each build; `recorded` is "both", "on", "off", or None to leave the setting alone.

    Groups stand for their builds, each of which comes once however many names bring it.

    Raises:
        ValueError: for a name that is neither a build nor a group, or given twice.
    """
    ways: dict[str | None, list[tuple[str, tuple[str, ...]]]] = {
        None: [("", ())],
        "on": [("", ("train.record=true",))],
        "off": [("", ("train.record=false",))],
        "both": [(" recorded", ("train.record=true",)), (" launched", ("train.record=false",))],
    }
    for i, name in enumerate(names):
        if name not in BUILDS and name not in GROUPS:
            raise ValueError(f"unknown build {name!r}: choose out of {', '.join((*BUILDS, *GROUPS))}")
        if name in names[:i]:
            raise ValueError(f"build {name!r} is given twice")
    every = dict.fromkeys(build for name in names for build in GROUPS.get(name, (name,)))
    return [(f"{name}{way}", (*BUILDS[name], *more)) for name in every for way, more in ways[recorded]]
