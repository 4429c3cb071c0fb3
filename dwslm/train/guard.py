"""Steps that must not be taken: a loss or gradient norm that is not finite, or far above what was usual.

The device decides, before the update, from a window of the steps that were taken. The host hears of it when it
reads its figures anyway. Rejected steps never enter the window: one NaN in it would reject all that follow, and
a spike would widen it for the next.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Least spread taken for usual, as a part of the mean: steps that are all alike must not make noise a spike.
LEAST_SPREAD = 1e-3
UNREAD = 256  # verdicts that the device holds until the host reads them; it must by then
MOST_WINDOW = 100_000  # all of it is read in each step, and written with each checkpoint
LOSS, NORM, LOSS_LIMIT, NORM_LIMIT, TAKEN = range(5)


@dataclass
class GuardSettings:
    sigma: float | None = 6.0
    """A step is left out where its loss or its gradient norm lies more than this many standard deviations above the
    mean of the window. null leaves out only what is not finite."""

    window: int = 100
    """Steps that mean and deviation are taken from: the last ones that were taken, with finite figures."""

    off_for: int = 500
    """Spikes are not judged before this many steps were taken, at the start and after each change of the data's mixture."""

    max_skips: int = 10
    """A further step left out within `guard.stretch` steps sends the run back to the last checkpoint from before them."""

    stretch: int = 1000
    """Steps over which steps left out are counted together."""

    max_rollbacks: int = 3
    """How often a run may go back before it fails."""

    def __post_init__(self) -> None:
        if self.sigma is not None and not 0 < self.sigma < math.inf:
            raise ValueError(f"guard.sigma={self.sigma}: must be above 0, or null to judge no spikes")
        if self.window < 2:
            raise ValueError(f"guard.window={self.window}: must be at least 2, or there is no deviation")
        if self.window > MOST_WINDOW:
            raise ValueError(f"guard.window={self.window}: must be at most {MOST_WINDOW}")
        if self.off_for < 2:
            raise ValueError(f"guard.off_for={self.off_for}: must be at least 2, or there is nothing to compare with")
        for name in ("max_skips", "max_rollbacks"):
            if getattr(self, name) < 0:
                raise ValueError(f"guard.{name}={getattr(self, name)}: must be 0 or more")
        if self.stretch < 1:
            raise ValueError(f"guard.stretch={self.stretch}: must be at least 1")


@dataclass(frozen=True)
class Verdict:
    """What was decided of one step."""

    loss: float
    norm: float
    loss_limit: float
    norm_limit: float
    taken: bool

    @property
    def reason(self) -> str:
        """Why the step was left out, in words."""
        for what, value, limit in (("loss", self.loss, self.loss_limit), ("gradient norm", self.norm, self.norm_limit)):
            if not math.isfinite(value):
                return f"{what} {value}"
            if value > limit:
                return f"{what} {value:.4g} above {limit:.4g}"
        return "taken"


class Guard:
    """The window, and what becomes of it; tensors in fixed places on the device, no branch on data, no host read.

    A step calls `limits`, then `allowed` with its loss, then `record`: all of it can be recorded as a CUDA graph.
    `read`, `state` and `load` are the host's and wait for the device.
    """

    def __init__(self, settings: GuardSettings, device: torch.device):
        self.settings = settings
        self.loss_limit = torch.full((), math.inf, device=device)
        self.norm_limit = torch.full((), math.inf, device=device)
        # Loss and norm of the steps taken, in a ring; `count` of them since the beginning or the last restart.
        self._window = torch.zeros(2, settings.window, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(settings.window, device=device)
        # Loss, norm, their limits and the verdict of the steps that the host has not heard of, in a ring.
        self._unread = torch.zeros(5, UNREAD, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._unread_places = torch.arange(UNREAD, device=device)
        self._told = 0  # the host's count, so that it need not read the device's

    @torch.no_grad()
    def limits(self) -> None:
        """Sets the limits of the step to come: float32, 0-D, infinite while spikes are not judged."""
        if self.settings.sigma is None:
            return
        held = (self._places < self._count).double()
        window = self._window.double()
        n = held.sum().clamp_min(1)
        mean = (window * held).sum(1) / n
        variance = ((window - mean[:, None]).square() * held).sum(1) / n
        spread = torch.maximum(variance.sqrt(), LEAST_SPREAD * mean.abs())
        limit = (mean + self.settings.sigma * spread).float().masked_fill(self._count < self.settings.off_for, math.inf)
        self.loss_limit.copy_(limit[0])
        self.norm_limit.copy_(limit[1])

    def allowed(self, loss: Tensor) -> Tensor:
        """Whether a step of this loss (0-D) may be taken as far as the loss goes: 0-D bool."""
        return loss.isfinite() & (loss <= self.loss_limit)

    @torch.no_grad()
    def record(self, loss: Tensor, norm: Tensor, taken: Tensor) -> None:
        """Notes a step: its loss and norm (float32, 0-D), and whether it was taken (bool, 0-D)."""
        here = (self._places == self._count % self.settings.window) & taken
        self._window.copy_(torch.where(here, torch.stack([loss, norm])[:, None], self._window))
        self._count.add_(taken)
        row = torch.stack([loss, norm, self.loss_limit, self.norm_limit, taken.float()])
        place = self._unread_places == self._steps % UNREAD
        self._unread.copy_(torch.where(place, row[:, None], self._unread))
        self._steps.add_(1)

    def restart(self) -> None:
        """Forgets the window: what comes now may be unlike it. Queued for the device, not waited for."""
        self._count.zero_()

    def read(self, steps: int) -> list[Verdict]:
        """Verdicts of the last `steps` steps, oldest first, all that there were since the last read."""
        assert steps <= UNREAD, "the host let more steps pass than the guard can hold"
        columns = self._unread.T.tolist()
        first, self._told = self._told, self._told + steps
        return [
            Verdict(row[LOSS], row[NORM], row[LOSS_LIMIT], row[NORM_LIMIT], bool(row[TAKEN]))
            for row in (columns[n % UNREAD] for n in range(first, self._told))
        ]

    def state(self) -> dict[str, Any]:
        """The window as plain numbers, for a checkpoint."""
        loss, norm = self._window.tolist()
        return {"count": int(self._count), "loss": loss, "norm": norm}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with a window that `state` gave."""
        self._window.copy_(torch.tensor([state["loss"], state["norm"]]))
        self._count.fill_(state["count"])
