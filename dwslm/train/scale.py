"""Training on paper: what a step moves, holds and takes on any number of ranks, from counted shapes and measured pieces.

    step     = compute x (1 + lag) + exchange + update                                                       [seconds]
    compute  = micro-batches x tokens x 6 x (matrices + head) / flop rate of the measured micro-batch
    lag      = how much longer the slowest rank takes than the mean: measured on a few ranks, normal beyond
    exchange = 4 (g-1) share / scatter rate + sum over dtypes of (g-1) size share / gather rate + hops x time of one
    update   = max over ranks of (Newton-Schulz flop / its rate + elements x time of one) + repacking / copy rate

Shares are those that `dwslm.optim.shares` deals; g is the number of ranks that they are dealt to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import torch

from dwslm.model.lm import DTYPES, LanguageModel, ModelSettings
from dwslm.ops.loss_head.compiled import CHUNK_BYTES
from dwslm.optim.groups import Block, memory_bytes, route
from dwslm.optim.newton_schulz import COEFFICIENTS
from dwslm.optim.settings import OptimSettings
from dwslm.optim.shares import NEWTON_SCHULZ_RULES, aligned, deal, lay_out, mail_bytes
from dwslm.train.dry_run import activation_bytes
from dwslm.train.report import MATRIX_FLOPS
from dwslm.train.scale_measured import Measured

SMALL_SUMS = 2  # loss, and votes with the norm
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Assumed:
    """What is not measured. Two GPUs tell nothing about the way between machines."""

    node: int = 8
    """GPUs of a machine."""
    network: float = 40e9
    """Bytes a second through each GPU's own 400 Gb/s adapter, at 80 % of the line."""
    hop: float = 5e-6
    """Seconds for the first byte from one rank to the next."""


@dataclass(frozen=True)
class Share:
    """Work of one rank's update."""

    newton_schulz_flop: float
    elements: int
    state: int
    """Bytes of masters and state, and of the directions of an update."""


class Model:
    """A model's shapes; nothing is allocated."""

    def __init__(self, settings: ModelSettings, optim: OptimSettings, vocab_size: int):
        with torch.device("meta"):
            model = LanguageModel(settings, vocab_size)
        self.parameters = dict(model.named_parameters())
        self.blocks = route(self.parameters, model.roles(), optim)
        self.sizes = model.sizes()
        self.flop_per_token = MATRIX_FLOPS * (self.sizes["matrices"] + self.sizes["head"])
        self.steps = len(COEFFICIENTS[optim.newton_schulz])
        # Of the kernels that were measured, cuDNN's delta rule among them: seconds and bytes then go together.
        self._token_bytes = activation_bytes(model, shifted=False, own_delta=False)
        self._logit_bytes = DTYPES[settings.dtype].itemsize * vocab_size
        self._head_bytes = FLOAT * self.sizes["head"]

    def activations(self, tokens: int) -> int:
        """Bytes that a micro-batch needs, the loss head's among them."""
        return self._token_bytes * tokens + 2 * min(CHUNK_BYTES, tokens * self._logit_bytes) + self._head_bytes


class Dealt:
    """A model's optimizer dealt to `group` ranks.

    Attributes:
        share: elements that each rank's part of the gradient is padded to. uneven: that, over the mean.
        empty, without_matrix: ranks that own nothing, and that have nothing to orthogonalise.
        sent: bytes of compute copies that a rank's part is padded to, one number for each dtype.
        shares: work of each rank.
        buffer: bytes of the buffer of all parts, which every rank has.
        copies: bytes of the model's compute copies.
    """

    def __init__(self, model: Model, group: int):
        blocks = deal(model.blocks, group)
        sizes = [lay_out(share)[1] for share in blocks]
        self.group = group
        self.share = sizes[0] if group == 1 else aligned(max(sizes))
        self.shares = [_work(share, model.steps) for share in blocks]
        self.uneven = self.share / fmean(sizes)
        self.empty = sum(not share for share in blocks)
        self.without_matrix = sum(not share.newton_schulz_flop for share in self.shares)
        self.copies = sum(p.numel() * p.element_size() for p in model.parameters.values())
        dtypes = dict.fromkeys(p.dtype for p in model.parameters.values())
        self.sent = [
            max(sum(aligned(_elements(b)) for b in share if model.parameters[b.parameter].dtype == dtype) for share in blocks)
            * dtype.itemsize
            for dtype in dtypes
        ]  # fmt: skip
        self.buffer = max(FLOAT * group * self.share, mail_bytes(blocks, model.parameters) if group > 1 else 0)

    @property
    def scatter_bytes(self) -> int:
        """Through a rank's links for the sum of gradients."""
        return FLOAT * (self.group - 1) * self.share

    @property
    def gather_bytes(self) -> int:
        return (self.group - 1) * sum(self.sent)

    @property
    def held(self) -> int:
        """Bytes on the fullest GPU without activations: copies, their gradients, the buffer, masters and state."""
        return 2 * self.copies + self.buffer + max(share.state for share in self.shares)


@dataclass(frozen=True)
class Step:
    """Seconds of one step; see the module's head."""

    tokens: int
    compute: float
    lag: float
    scatter: float
    gather: float
    update: float

    @property
    def exchange(self) -> float:
        """All of it is in the open: it begins when the last micro-batch is done."""
        return self.scatter + self.gather

    @property
    def seconds(self) -> float:
        return self.compute + self.lag + self.exchange + self.update

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Paper:
    """Predicts steps from what one measured model has shown."""

    def __init__(self, measured: Measured, model: Model, micro_batch_tokens: int, assumed: Assumed):
        """model, micro_batch_tokens: those that `measured` is of.

        Raises ValueError for a model without Newton-Schulz, whose rate nothing would tell then.
        """
        whole = _work(model.blocks, model.steps)
        if not whole.newton_schulz_flop:
            raise ValueError(
                "settings of the measured model: without Newton-Schulz its rate cannot be told; measure a model with "
                "optim.matrices=muonh or muon"
            )
        self.measured, self.assumed = measured, assumed
        self.flop_rate = model.flop_per_token * micro_batch_tokens / measured.micro_batch_seconds
        self.newton_schulz_rate = whole.newton_schulz_flop / measured.newton_schulz_seconds
        self.element_seconds = measured.elementwise_seconds / whole.elements
        self.known = max((run for run in measured.runs if run.rank_seconds), key=lambda r: r.ranks, default=None)

    def step(self, model: Model, dealt: Dealt, ranks: int, micro_batch_tokens: int, micro_batches: int) -> Step:
        """One step of `ranks`, whose optimizer is dealt to the ranks of each group, or to all.

        Raises ValueError for groups that are neither all ranks nor within one machine, or do not divide the ranks.
        """
        group, a = dealt.group, self.assumed
        if ranks % group or (group < ranks and group > a.node):
            raise ValueError(
                f"shares among {group} of {ranks} ranks, {a.node} on a machine: must divide both, or be all"
            )
        if group == ranks and ranks > a.node:  # a ring leaves a machine through all of its adapters at once
            most = a.node * a.network
        else:
            most = math.inf
        hops = (group - 1) * a.hop
        scatter = dealt.scatter_bytes / min(self.measured.scatter_rate, most) + (hops if group > 1 else 0.0)
        if ranks > 1:
            scatter += SMALL_SUMS * 2 * math.ceil(math.log2(ranks)) * a.hop
        machines = ranks // group
        if machines > 1:  # each share is added up over the groups, through its owner's own adapter
            scatter += 2 * (machines - 1) * (FLOAT * dealt.share / machines / a.network + a.hop)
        gather = dealt.gather_bytes / min(self.measured.gather_rate, most) + hops * len(dealt.sent)
        compute = micro_batches * micro_batch_tokens * model.flop_per_token / self.flop_rate
        return Step(
            tokens=ranks * micro_batches * micro_batch_tokens,
            compute=compute,
            lag=compute * self.lag(ranks),
            scatter=scatter,
            gather=gather,
            update=self.update(dealt),
        )

    def update(self, dealt: Dealt) -> float:
        """Seconds of the slowest rank's update, and of clearing the buffer and unpacking the copies."""
        seconds = (
            s.newton_schulz_flop / self.newton_schulz_rate + s.elements * self.element_seconds for s in dealt.shares
        )
        moved = dealt.buffer + 2 * dealt.copies if dealt.group > 1 else 0
        return max(seconds) + moved / self.measured.copy_rate

    def lag(self, ranks: int) -> float:
        """Share by which the slowest of `ranks` is later than their mean; 0 where no run has shown any."""
        if ranks == 1 or self.known is None or self.known.ranks == 1:
            return 0.0
        seen = max(self.known.rank_seconds) / fmean(self.known.rank_seconds) - 1
        return seen * expected_largest(ranks) / expected_largest(self.known.ranks)


def expected_largest(n: int) -> float:
    """Of n draws from the standard normal distribution (Blom 1958)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def largest_micro_batch(model: Model, dealt: Dealt, sizes: Sequence[int], memory: float) -> int | None:
    """The first of `sizes`, which fall, that fits into so many bytes; None where not even the last does."""
    return next((n for n in sizes if dealt.held + model.activations(n) <= memory), None)


def newton_schulz_flop(shape: Sequence[int], steps: int) -> float:
    """With every product in full: two with the larger side and one of Gram matrices a step."""
    m, n = sorted(shape)
    return steps * (4.0 * m * m * n + 2.0 * m**3)


def _work(blocks: Sequence[Block], steps: int) -> Share:
    held = memory_bytes(blocks)
    return Share(
        sum(newton_schulz_flop(block.shape, steps) for block in blocks if block.rule in NEWTON_SCHULZ_RULES),
        sum(_elements(block) for block in blocks),
        sum(held.values()) - held["gradient"],
    )


def _elements(block: Block) -> int:
    return math.prod(block.shape)
