"""The optimizer: float32 masters, accumulators and state of every block, and one step for all of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .adam import adam, adam_direction
from .checks import check_radius, check_tensors
from .groups import STATE, Block, Roles, route, routing_table
from .hyperball import adamh, frobenius, muonh
from .muon import muon
from .newton_schulz import newton_schulz
from .settings import OptimSettings
from .shares import LARGE, Place, Ranks, adder, aligned, deal, lay_out, mail_bytes, make_mail, part_of
from .stack import Group, make_group

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Optimizer:
    """MuonH, AdamH and Adam (or Muon, AdamW) over all parameters of a model.

    Between steps the model's parameters are float32, or bfloat16 copies that `step` writes from float32
    masters (rounded to nearest). They must keep their storage: do not move or cast the model after
    construction. The caller averages the gradients: divide the loss by the scored tokens of the whole batch.

    Among several ranks, all of which have the whole model, each owns a share of the blocks (`deal`): it alone holds their
    masters and state and updates them. A step adds up the gradients over the ranks and hands the new compute copies round.
    `step`, `weights` and `copy_to` are then called by all ranks alike.

    `accumulate` and `step` read nothing back from the device and take no branch on data, so that they can be
    recorded as a CUDA graph.
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        roles: Roles,
        settings: OptimSettings,
        *,
        lr: float,
        compile: bool = False,
        ranks: Ranks | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """lr: the peak rate, for `routing`; compile: run the update through torch.compile, as one graph; ranks: None alone;
        extra: what training changes besides the parameters, by name: kept with the state, zero at a start, and over several
        ranks each step goes on from its mean.

        Raises ValueError for wrong roles (see `route`), parameters on several devices, and, under MuonH and
        AdamH, for a matrix of norm zero.
        """
        devices = sorted({str(p.device) for p in params.values()})
        if len(devices) != 1:
            raise ValueError(f"the optimizer takes parameters of one device, got {', '.join(devices) or 'none'}")
        self.settings = settings
        self.lr = lr
        self.params = dict(params)
        self._extra = dict(extra or {})
        self.blocks = route(self.params, roles, settings)
        self.device = torch.device(devices[0])
        self.ranks = ranks
        rank, world = (ranks.rank, ranks.world) if ranks else (0, 1)
        shares = deal(self.blocks, world)
        self.owned = shares[rank]
        """Blocks, and rows of blocks, that this rank updates."""
        layouts = [lay_out(share) for share in shares]
        share = layouts[0][1] if world == 1 else aligned(max(size for _, size in layouts))
        self.groups = [
            make_group(blocks, self.params, start, begins, size) for blocks, start, begins, size in layouts[rank][0]
        ]
        floats = -(-mail_bytes(shares, self.params) // 4) if ranks else 0
        memory = torch.zeros(max(world * share, floats), device=self.device)
        self.gradient = memory[: world * share]
        """Sum of what this rank has accumulated, [world x share]; free for other use once a step has begun."""
        self._own = self.gradient[rank * share : (rank + 1) * share]
        self._places = [
            Place(owner, block, owner * share + start + begin)
            for owner, (groups, _) in enumerate(layouts)
            for blocks, start, begins, _ in groups
            for block, begin in zip(blocks, begins, strict=True)
        ]
        self.step_count = torch.zeros((), dtype=torch.int64, device=self.device)
        """Updates made, skipped ones not counted."""
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        """Steps that changed nothing: the gradient was not finite or over its limit, or the caller refused them."""
        self.accepted = torch.ones((), dtype=torch.bool, device=self.device)
        """Whether the last step was taken; overwritten by each."""
        self._rate = torch.zeros((), device=self.device)
        self._allowed = torch.ones((), dtype=torch.bool, device=self.device)
        self._norm_limit = torch.full((), math.inf, device=self.device)
        bf16 = settings.newton_schulz_dtype == "bfloat16" or (
            settings.newton_schulz_dtype == "auto" and self.device.type == "cuda"
        )
        self._newton_schulz_dtype = torch.bfloat16 if bf16 else torch.float32

        # By dtype, as one kernel or one fused list of additions wants them; in the order of the parameters.
        order = {name: n for n, name in enumerate(self.params)}
        by_dtype: dict[torch.dtype, list[Place]] = {}
        for place in sorted(self._places, key=lambda place: (order[place.block.parameter], place.block.start)):
            by_dtype.setdefault(self.params[place.block.parameter].dtype, []).append(place)
        self._adders = [([p.block for p in places], adder(self.gradient, places)) for places in by_dtype.values()]
        masters = self._masters()
        copied = [block for block in self.owned if not block.in_place]
        self._copies = [block.of(self.params[block.parameter].detach()) for block in copied]
        self._copied = [masters[block.name] for block in copied]
        self._mail = make_mail(shares, rank, self.params, memory) if ranks else []

        self._check_radii({name: parameter.detach() for name, parameter in self.params.items()})
        self._measure_radii()
        compiler = partial(torch.compile, fullgraph=True, dynamic=False) if compile else _as_it_is
        self._alone = compiler(lambda: self._update(self._squares(), self._allowed))
        self._squares_of_all, self._update_of_all = compiler(self._squares), compiler(self._update)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add every parameter's `.grad` to its float32 accumulator and set `.grad` to None.

        Raises RuntimeError naming a parameter that has no gradient: it would never be trained.
        """
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.params.items():
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} has no gradient: the loss does not depend on it")
            gradients[name] = parameter.grad
        for blocks, add in self._adders:
            add([block.of(gradients[block.parameter]) for block in blocks])
        for parameter in self.params.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: Tensor | float, *, allowed: Tensor | None = None, norm_limit: Tensor | None = None) -> Tensor:
        """Update everything from the accumulated gradients, zero them, and write the compute copies.

        lr: the matrices' rate at this step; a 0-D tensor on the parameters' device in a recorded step, since
        a float is fixed at recording. allowed: 0-D bool, norm_limit: 0-D float32, both on that device; without
        them every step with a finite gradient is taken. Returns the global gradient norm before clipping
        (float32, 0-D, on the device). If that is not finite or above its limit, or the step is not allowed,
        weights, state and step count stay as they were, bit for bit, `accepted` is false and `skipped` goes up
        by one.
        """
        self._allowed.fill_(True) if allowed is None else self._allowed.copy_(allowed)
        self._norm_limit.fill_(math.inf) if norm_limit is None else self._norm_limit.copy_(norm_limit)
        if isinstance(lr, Tensor):
            if lr.ndim:
                raise ValueError(f"lr must be a number or a 0-D tensor, got shape {list(lr.shape)}")
            self._rate.copy_(lr)
        else:
            if not 0 <= lr < math.inf:
                raise ValueError(f"lr={lr} must be 0 or more")
            self._rate.fill_(lr)
        norm, accepted, new = self._alone() if self.ranks is None else self._together(self.ranks)
        _copy(to=[t for group in self.groups for t in group.changing() if not self._stored(t)], source=new)
        self.step_count.add_(accepted)
        self.skipped.add_(~accepted)
        self.accepted.copy_(accepted)
        self._write_copies()
        self._send_copies()
        self.gradient.zero_()
        return norm

    def _together(self, ranks: Ranks) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`_alone` among several ranks: the same of the summed gradient, for the blocks that this rank owns.

        A step is taken where every rank allows it. Collectives stay outside the compiled functions, which know no ranks.
        """
        ranks.scatter_sum(self.gradient)
        votes = torch.stack([self._squares_of_all(), (~self._allowed).float()])
        ranks.sum(votes)
        if self._extra:
            mean = torch.cat([tensor.flatten() for tensor in self._extra.values()])
            ranks.sum(mean)
            pieces = mean.div_(ranks.world).split([tensor.numel() for tensor in self._extra.values()])
            for tensor, piece in zip(self._extra.values(), pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
        return self._update_of_all(votes[0], votes[1] == 0)

    def _squares(self) -> Tensor:
        """Squared norm of the gradients that this rank owns."""
        parts = [gradient.square().sum() for gradient in self._gradients()]
        return torch.stack(parts).sum() if parts else torch.zeros((), device=self.device)

    def _update(self, squares: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradient norm, whether the step is taken, and what becomes of every group's `changing()` but for what was `_stored`.

        squares: of the whole gradient's norm.
        """
        clip = self.settings.clip
        gradients = self._gradients()
        norm = squares.sqrt()
        finite = allowed & norm.isfinite() & (norm <= self._norm_limit)
        scale = torch.ones_like(norm) if clip is None else (clip / (norm + CLIP_EPS)).clamp(max=1.0)
        step = self.step_count + 1
        new: list[Tensor] = []
        for group, gradient in zip(self.groups, gradients, strict=True):
            rate = self._rate * group.blocks[0].lr_factor
            updated = self._update_group(group, gradient * scale, rate, finite, step)
            for tensor, value in zip(group.changing(), updated, strict=True):
                if self._stored(tensor):
                    tensor.copy_(value)
                else:
                    new.append(value)
        return norm, finite, new

    def _stored(self, tensor: Tensor) -> bool:
        """Whether `_update` writes this itself, in the pass that computes it: no second copy, and none to be moved.

        Small ones would be a kernel each. On a CPU the compiler fails on some functions that write (pytorch issue 196570).
        """
        return self.device.type == "cuda" and tensor.numel() >= LARGE

    def _update_group(
        self, group: Group, gradient: Tensor, rate: Tensor, finite: Tensor, step: Tensor
    ) -> Sequence[Tensor]:
        s, state, weight = self.settings, group.state, group.stack
        betas, decay = (s.beta1, s.beta2), group.blocks[0].weight_decay
        if weight is None:
            moments = state["exp_avg"], state["exp_avg_sq"]
            direction, *moments_new = adam_direction(*moments, gradient, finite, step, betas=betas, eps=s.eps)
            weights = adam(group.masters, group.pieces(direction), rate, finite, weight_decay=decay)
            return [*weights, *moments_new]
        gradient = gradient.view(weight.shape)
        if group.rule == "adamh":
            moments = state["exp_avg"], state["exp_avg_sq"]
            radius = state["radius"]
            return adamh(weight, *moments, gradient, radius, rate, finite, step, betas=betas, eps=s.eps)
        orthogonal = partial(newton_schulz, coefficients=s.newton_schulz, dtype=self._newton_schulz_dtype)
        momentum, mu = state["momentum"], s.momentum
        if group.rule == "muonh":
            return muonh(weight, momentum, gradient, state["radius"], rate, finite, orthogonal, mu=mu)
        return muon(weight, momentum, gradient, rate, finite, orthogonal, mu=mu, weight_decay=decay)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the full float32 weights, by parameter name. Among several ranks not while gradients are accumulated."""
        masters = self._all_masters()
        found = {name: torch.empty(p.shape, dtype=torch.float32, device=p.device) for name, p in self.params.items()}
        for block, master in masters:
            block.of(found[block.parameter]).copy_(master)
        self._free_masters()
        return found

    def state(self) -> dict[str, Tensor]:
        """Copies of this rank's state, keyed by logical block: "<parameter>.<kind>" or "<parameter>/<block>.<kind>".

        Kinds: momentum, exp_avg, exp_avg_sq (float32, the block's shape), radius (float32, 0-D); and `step`,
        `skipped` (int64, 0-D) for the whole, which rank 0 has. Rows of a block that several ranks share are named
        "<block>@<first row>.<kind>". How blocks are stacked leaves no trace, so another layout can load it.
        """
        return {name: tensor.clone() for name, tensor in self._state().items()}

    @torch.no_grad()
    def copy_to(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Writes what `weights()` and `state()` give into tensors of the same names, shapes and dtypes.

        `weights` may be empty where another rank keeps them. The targets may be on the CPU. Copies from a GPU into pinned
        memory are queued and not waited for: they see the weights of now whatever is queued later, and hold them once the
        device has come this far.
        """
        for block, master in self._all_masters():
            if weights:
                block.of(weights[block.parameter]).copy_(master, non_blocking=True)
        self._free_masters()
        for name, tensor in self._state().items():
            state[name].copy_(tensor, non_blocking=True)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Continue from what `weights` and `state` gave: the next step is the one that would have come.

        Every rank is given the state of all of them, whole blocks under their own names, and keeps its share. Gradients
        accumulated so far are dropped. Raises ValueError for a missing or unknown name, another shape or dtype, or a
        radius that is not positive, and then changes nothing.
        """
        self._check_weights(weights)
        check_tensors("optimizer state", state, self._whole_state())
        for name, tensor in state.items():
            if name.endswith(".radius") and not 0 < float(tensor) < math.inf:
                raise ValueError(f"optimizer state {name} is {float(tensor)}: a radius is above 0")
        self._load_masters(weights)
        self.step_count.copy_(state["step"])
        self.skipped.copy_(state["skipped"])
        for name, tensor in self._extra.items():
            tensor.copy_(state[name])
        for group in self.groups:
            for name, tensor in group.block_state().items():
                tensor.copy_(part_of(state, name, tensor))

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start afresh from these float32 weights: radii measured on them, all other state zero.

        Raises ValueError as `load` does, and for a matrix of norm zero on a sphere, and then changes nothing.
        """
        self._check_weights(weights)
        self._check_radii(weights)
        self._load_masters(weights)
        of_groups = (tensor for group in self.groups for tensor in group.state.values())
        for tensor in (self.step_count, self.skipped, *self._extra.values(), *of_groups):
            tensor.zero_()
        self._measure_radii()

    def routing(self) -> list[dict[str, object]]:
        """One row per logical block: name, shape, role, rule, lr_factor, lr (peak rate), weight_decay."""
        return routing_table(self.blocks, self.lr)

    def _gradients(self) -> list[Tensor]:
        """Each group's slice of this rank's share of the gradient."""
        return [self._own[group.start : group.start + group.size] for group in self.groups]

    def _masters(self) -> dict[str, Tensor]:
        """Of the blocks that this rank owns."""
        pairs = (zip(group.blocks, group.masters, strict=True) for group in self.groups)
        return {block.name: master for pair in pairs for block, master in pair}

    def _all_masters(self) -> list[tuple[Block, Tensor]]:
        """Every block with its master; those of other ranks lie in the gradient's buffer until `_free_masters`."""
        own = self._masters()
        if self.ranks is None:
            return [(block, own[block.name]) for block in self.blocks]
        for place in self._places:
            if place.rank == self.ranks.rank:
                place.of(self.gradient).copy_(own[place.block.name])
        self.ranks.gather(self.gradient)
        return [(place.block, place.of(self.gradient)) for place in self._places]

    def _free_masters(self) -> None:
        if self.ranks is not None:
            self.gradient.zero_()

    def _state(self) -> dict[str, Tensor]:
        first = self.ranks is None or self.ranks.rank == 0
        views = {"step": self.step_count, "skipped": self.skipped} | self._extra if first else {}
        for group in self.groups:
            views |= group.block_state()
        return views

    def _whole_state(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Names, shapes and dtypes of the state of all ranks together."""
        whole = {name: (torch.Size(), torch.int64) for name in ("step", "skipped")}
        whole |= {name: (tensor.shape, tensor.dtype) for name, tensor in self._extra.items()}
        for block in self.blocks:
            for kind in STATE[block.rule]:
                shape = torch.Size() if kind == "radius" else torch.Size(block.shape)
                whole[f"{block.name}.{kind}"] = shape, torch.float32
        return whole

    def _measure_radii(self) -> None:
        for group in self.groups:
            if group.stack is not None and "radius" in group.state:
                group.state["radius"].copy_(frobenius(group.stack).flatten())

    def _check_radii(self, weights: Mapping[str, Tensor]) -> None:
        for block in self.blocks:
            if "radius" in STATE[block.rule]:
                check_radius(block.name, float(frobenius(block.of(weights[block.parameter]).float())))

    def _check_weights(self, weights: Mapping[str, Tensor]) -> None:
        check_tensors("weights", weights, {name: (p.shape, torch.float32) for name, p in self.params.items()})

    def _load_masters(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.params.items():
            parameter.copy_(weights[name])
        masters = self._masters()
        for block in self.owned:
            masters[block.name].copy_(block.of(weights[block.parameter]))
        self.gradient.zero_()

    def _write_copies(self) -> None:
        _copy(to=self._copies, source=self._copied)

    def _send_copies(self) -> None:
        """Hands the compute copies round, one dtype after another."""
        for mail in self._mail:
            assert self.ranks is not None
            _copy(to=mail.sent, source=mail.sent_from)
            self.ranks.gather(mail.flat)
            _copy(to=mail.received_by, source=mail.received)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
