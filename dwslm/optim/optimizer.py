"""The optimizer: float32 masters, accumulators and state of every block, and one step for all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .adam import adam, adam_direction
from .groups import MATRIX_RULES, STATE, Block, Roles, route, routing_table
from .hyperball import adamh, frobenius, muonh
from .muon import muon
from .newton_schulz import newton_schulz
from .settings import OptimSettings

ALIGNMENT = 32  # elements: blocks of a flat buffer start at 128-byte multiples, so that kernels load vectors
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass
class Group:
    """Blocks updated together: a stack of same-shaped matrices, or any shapes under an elementwise rule.

    Its gradient is one flat float32 buffer where block i starts at offsets[i]; a stack has no gaps.
    """

    blocks: list[Block]
    start: int
    """Of its slice in the optimizer's gradient."""
    size: int
    offsets: list[int]
    masters: list[Tensor]
    """One a block, in its shape: a view of `stack`, the parameter itself (`in_place`), or a separate copy."""
    stack: Tensor | None
    """float32 [N, m, n], for a rule that sees whole matrices."""
    state: dict[str, Tensor]
    """Kind -> float32 [N, m, n] (radius: [N]) for a stack, [size] laid out as the gradient otherwise."""

    @property
    def rule(self) -> str:
        return self.blocks[0].rule

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat [size] buffer, one a block, in its shape."""
        shapes = [torch.Size(block.shape) for block in self.blocks]
        return [flat[o : o + s.numel()].view(s) for o, s in zip(self.offsets, shapes, strict=True)]

    def changing(self) -> list[Tensor]:
        """What a step rewrites: weights, then state, but for the radius."""
        weights = self.masters if self.stack is None else [self.stack]
        return [*weights, *(tensor for kind, tensor in self.state.items() if kind != "radius")]

    def block_state(self) -> dict[str, Tensor]:
        """Views of the state, keyed "<block name>.<kind>"; a radius is 0-D."""
        views: dict[str, Tensor] = {}
        for kind, buffer in self.state.items():
            pieces = self.pieces(buffer) if self.stack is None else list(buffer)
            views |= {f"{block.name}.{kind}": piece for block, piece in zip(self.blocks, pieces, strict=True)}
        return views


class Optimizer:
    """MuonH, AdamH and Adam (or Muon, AdamW) over all parameters of a model.

    Between steps the model's parameters are float32, or bfloat16 copies that `step` writes from float32
    masters (rounded to nearest). They must keep their storage: do not move or cast the model after
    construction. The caller averages the gradients: divide the loss by the scored tokens of the whole batch.

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
    ) -> None:
        """lr: the peak rate, for `routing`; compile: run the update through torch.compile, as one graph.

        Raises ValueError for wrong roles (see `route`), parameters on several devices, and, under MuonH and
        AdamH, for a matrix of norm zero.
        """
        devices = sorted({str(p.device) for p in params.values()})
        if len(devices) != 1:
            raise ValueError(f"the optimizer takes parameters of one device, got {', '.join(devices) or 'none'}")
        self.settings = settings
        self.lr = lr
        self.params = dict(params)
        self.blocks = route(self.params, roles, settings)
        self.device = torch.device(devices[0])
        self.groups: list[Group] = []
        for blocks in _alike(self.blocks):
            start = _aligned(self.groups[-1].start + self.groups[-1].size) if self.groups else 0
            self.groups.append(_group(blocks, self.params, start))
        last = self.groups[-1]
        self.gradient = torch.zeros(last.start + last.size, device=self.device)
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

        accumulators = {
            block.name: piece
            for group, gradient in zip(self.groups, self._gradients(), strict=True)
            for block, piece in zip(group.blocks, group.pieces(gradient), strict=True)
        }
        # By dtype, since torch fuses a list of additions only where all of it has one.
        self._accumulators: dict[torch.dtype, list[tuple[Block, Tensor]]] = {}
        for block in self.blocks:
            same = self._accumulators.setdefault(self.params[block.parameter].dtype, [])
            same.append((block, accumulators[block.name]))
        masters = self._masters()
        copied = [block for block in self.blocks if not block.in_place]
        self._copies = [block.of(self.params[block.parameter].detach()) for block in copied]
        self._copied = [masters[block.name] for block in copied]

        self._measure_radii()
        self._run = torch.compile(self._update, fullgraph=True, dynamic=False) if compile else self._update

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
        for targets in self._accumulators.values():
            torch._foreach_add_(
                [accumulator for _, accumulator in targets],
                [block.of(gradients[block.parameter]) for block, _ in targets],
            )
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
        norm, accepted, new = self._run()
        torch._foreach_copy_([tensor for group in self.groups for tensor in group.changing()], new)
        self.step_count.add_(accepted)
        self.skipped.add_(~accepted)
        self.accepted.copy_(accepted)
        self.gradient.zero_()
        self._write_copies()
        return norm

    def _update(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradient norm, whether the step is taken, and what every group's `changing()` becomes.

        Nothing is written here: the compiler fuses pure functions better, and its CPU backend fails on some
        in-place ones (pytorch issue 196570).
        """
        clip = self.settings.clip
        gradients = self._gradients()
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        finite = self._allowed & norm.isfinite() & (norm <= self._norm_limit)
        scale = torch.ones_like(norm) if clip is None else (clip / (norm + CLIP_EPS)).clamp(max=1.0)
        step = self.step_count + 1
        new: list[Tensor] = []
        for group, gradient in zip(self.groups, gradients, strict=True):
            rate = self._rate * group.blocks[0].lr_factor
            new += self._update_group(group, gradient * scale, rate, finite, step)
        return norm, finite, new

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
        """Copies of the full float32 weights, by parameter name."""
        masters = self._masters()
        parts: dict[str, list[Tensor]] = {name: [] for name in self.params}
        for block in self.blocks:
            parts[block.parameter].append(masters[block.name])
        return {name: torch.cat(part) if len(part) > 1 else part[0].clone() for name, part in parts.items()}

    def state(self) -> dict[str, Tensor]:
        """Copies of all state, keyed by logical block: "<parameter>.<kind>" or "<parameter>/<block>.<kind>".

        Kinds: momentum, exp_avg, exp_avg_sq (float32, the block's shape), radius (float32, 0-D); and `step`,
        `skipped` (int64, 0-D) for the whole. How blocks are stacked leaves no trace, so another layout can
        load it.
        """
        return {name: tensor.clone() for name, tensor in self._state().items()}

    @torch.no_grad()
    def copy_to(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Writes what `weights()` and `state()` give into tensors of the same names, shapes and dtypes.

        The targets may be on the CPU. Copies from a GPU into pinned memory are queued and not waited for: they see the
        weights of now whatever is queued later, and hold them once the device has come this far.
        """
        masters = self._masters()
        for block in self.blocks:
            block.of(weights[block.parameter]).copy_(masters[block.name], non_blocking=True)
        for name, tensor in self._state().items():
            state[name].copy_(tensor, non_blocking=True)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Continue from what `weights` and `state` gave: the next step is the one that would have come.

        Gradients accumulated so far are dropped. Raises ValueError for a missing or unknown name, another
        shape or dtype, or a radius that is not positive, and then changes nothing.
        """
        own = self._state()
        self._check_weights(weights)
        _check("optimizer state", state, {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
        for name, tensor in state.items():
            if name.endswith(".radius") and not 0 < float(tensor) < math.inf:
                raise ValueError(f"optimizer state {name} is {float(tensor)}: a radius is above 0")
        self._load_masters(weights)
        for name, tensor in own.items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start afresh from these float32 weights: radii measured on them, all other state zero.

        Raises ValueError as `load` does, and for a matrix of norm zero on a sphere, and then changes nothing.
        """
        self._check_weights(weights)
        for block in self.blocks:
            if "radius" in STATE[block.rule]:
                _check_radius(block.name, float(frobenius(block.of(weights[block.parameter]))))
        self._load_masters(weights)
        for tensor in self._state().values():
            tensor.zero_()
        self._measure_radii()

    def routing(self) -> list[dict[str, object]]:
        """One row per logical block: name, shape, role, rule, lr_factor, lr (peak rate), weight_decay."""
        return routing_table(self.blocks, self.lr)

    @torch.no_grad()
    def radius_error(self) -> Tensor:
        """Largest | ||W|| / R - 1 | of the matrices on a sphere: float32, 0-D, on the device; 0 if none."""
        errors = [
            (frobenius(group.stack).flatten() / group.state["radius"] - 1).abs().amax()
            for group in self.groups
            if group.stack is not None and "radius" in group.state
        ]
        return torch.stack(errors).amax() if errors else torch.zeros((), device=self.device)

    def _gradients(self) -> list[Tensor]:
        """Each group's slice of the flat gradient."""
        return [self.gradient[group.start : group.start + group.size] for group in self.groups]

    def _masters(self) -> dict[str, Tensor]:
        pairs = (zip(group.blocks, group.masters, strict=True) for group in self.groups)
        return {block.name: master for pair in pairs for block, master in pair}

    def _state(self) -> dict[str, Tensor]:
        views = {"step": self.step_count, "skipped": self.skipped}
        for group in self.groups:
            views |= group.block_state()
        return views

    def _measure_radii(self) -> None:
        for group in self.groups:
            if group.stack is not None and "radius" in group.state:
                group.state["radius"].copy_(frobenius(group.stack).flatten())
                for block, radius in zip(group.blocks, group.state["radius"].tolist(), strict=True):
                    _check_radius(block.name, radius)

    def _check_weights(self, weights: Mapping[str, Tensor]) -> None:
        _check("weights", weights, {name: (p.shape, torch.float32) for name, p in self.params.items()})

    def _load_masters(self, weights: Mapping[str, Tensor]) -> None:
        masters = self._masters()
        for block in self.blocks:
            masters[block.name].copy_(block.of(weights[block.parameter]))
        self.gradient.zero_()
        self._write_copies()

    def _write_copies(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, self._copied)


def _alike(blocks: list[Block]) -> list[list[Block]]:
    """Blocks that one group can hold together."""
    alike: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        shape = block.shape if block.rule in MATRIX_RULES else None
        alike.setdefault((block.rule, shape, block.lr_factor, block.weight_decay), []).append(block)
    return list(alike.values())


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _group(blocks: list[Block], params: Mapping[str, torch.nn.Parameter], start: int) -> Group:
    device = params[blocks[0].parameter].device
    values = [block.of(params[block.parameter].detach()) for block in blocks]
    stack = None
    if blocks[0].rule in MATRIX_RULES:
        stack = torch.stack([value.float() for value in values])
        masters = list(stack)
        offsets = [i * values[0].numel() for i in range(len(blocks))]
        size = stack.numel()
    else:
        masters = [
            value if block.in_place else value.to(torch.float32, copy=True)
            for block, value in zip(blocks, values, strict=True)
        ]
        offsets, size = [], 0
        for value in values:
            offsets.append(size)
            size += _aligned(value.numel())
    shape = (size,) if stack is None else stack.shape
    state = {
        kind: torch.zeros(len(blocks) if kind == "radius" else shape, device=device) for kind in STATE[blocks[0].rule]
    }
    return Group(blocks, start, size, offsets, masters, stack, state)


def _check(what: str, given: Mapping[str, Tensor], own: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing:
        raise ValueError(f"{what} lack {missing[0]}" + (f" and {len(missing) - 1} more" * (len(missing) > 1)))
    if unknown:
        raise ValueError(
            f"{what} hold {unknown[0]}" + f" and {len(unknown) - 1} more" * (len(unknown) > 1) + ", unknown here"
        )
    for name, (shape, dtype) in own.items():
        if given[name].shape != shape or given[name].dtype != dtype:
            raise ValueError(
                f"{what} {name} is {given[name].dtype} {list(given[name].shape)}, expected {dtype} {list(shape)}"
            )


def _check_radius(name: str, radius: float) -> None:
    if not 0 < radius < math.inf:
        raise ValueError(
            f"matrix {name} has norm {radius}: on a sphere it could never move. "
            "Give it another initialisation, or a role outside the sphere"
        )
