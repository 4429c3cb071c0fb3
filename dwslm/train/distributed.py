"""The processes that train one run together: sums over them, messages of the first one, and what they wait for.

One process alone is the same object, whose methods return at once. Among several, gradients, loss and weights travel through
torch.distributed (NCCL between GPUs, gloo between CPUs), words through its key-value store, and a `Watch` ends all of
them when one is lost.
"""

import contextlib
import faulthandler
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dwslm.train.device import choose_device
from dwslm.train.rank_watch import COMPILER_SECONDS, FAILED, LEAVE_SECONDS, LEFT, RankLost, Verdict, Watch, text_of
from dwslm.train.signals import CAUGHT, Preempted

START_SECONDS = 900.0
"""How long a rank may keep the others waiting before the first step, while it compiles, and while it scores."""
MOST_SILENCE_S = 1e9  # which a clock can wait for
POLL_SECONDS = 0.01
VERDICT_SECONDS, PART_SECONDS = 2.0, 10.0
LET_GO_SECONDS = 0.5
"""gloo's threads let go of a tensor some time after its collective has returned, and abort a process that ends meanwhile."""
# Torch's own limit on a collective. The watch ends a run long before, and knows which rank it was.
COLLECTIVE_LIMIT = timedelta(hours=2)


@dataclass
class RankSettings:
    """Of a run by several processes."""

    silence_seconds: float = 40.0
    """A run on several ranks ends when one has died, has not been heard of for so long, or keeps the others waiting for so
    long within a step; before the first step, while compiling and while scoring it may take 15 minutes."""

    def __post_init__(self) -> None:
        if not 5 <= self.silence_seconds <= MOST_SILENCE_S:
            raise ValueError(f"ranks.silence_seconds={self.silence_seconds}: must be from 5 to {MOST_SILENCE_S:g}")


class Ranks:
    """This process among those that train together. Collectives and messages are called by all ranks in one order.

    Attributes:
        rank, world: its number, of how many. local: its number on this machine.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        local: int = 0,
        store: dist.Store | None = None,
        watch: Watch | None = None,
    ):
        """`join` makes those of several; without arguments one process alone."""
        assert (world > 1) == (store is not None) == (watch is not None)
        self.rank, self.world, self.local = rank, world, local
        self._store, self._watch = store, watch
        self._told = 0
        self._agreed = self._asked = False
        self._timing = True
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by kind of collective, since the last row
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def agreed(self) -> bool:
        """Whether all ranks leave for a signal."""
        return self._agreed

    @property
    def leads(self) -> bool:
        """Whether this one writes the run folder and speaks to the user."""
        return self.rank == 0

    def choose_device(self, name: str) -> torch.device:
        """`train.device` for this rank: among several each takes the GPU of its number on its machine.

        Raises ValueError for a device that is not there, or one GPU for all.
        """
        device = choose_device(name)
        if self.world == 1:
            return device
        if ":" in name:
            raise ValueError(
                f"train.device={name} is one GPU, but there are {self.world} ranks: give cuda, auto or cpu"
            )
        if device.type == "cuda":
            there = torch.cuda.device_count()
            # A launcher that shows each rank its own GPU alone has dealt them already.
            index = self.local if there > 1 else 0
            if index >= there:
                raise ValueError(f"rank {self.rank} is number {self.local + 1} on this machine, which has {there} GPUs")
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        # Connections are made by the first collective, not in the middle of one that is recorded.
        with self._meeting():
            dist.all_reduce(torch.zeros(1, device=device))
        return device

    # ---- sums, on the device of their tensor ----

    def sum(self, tensor: Tensor) -> None:
        """Adds up a tensor over the ranks, in place; all get the same bits. Who comes first waits here for the last."""
        if self.world > 1:
            with self._meeting(), self._timed("wait", tensor):
                dist.all_reduce(tensor)

    def scatter_sum(self, flat: Tensor) -> None:
        """Of [world x share]: the rank's own share becomes the sum over the ranks, the rest is undefined."""
        if self.world > 1:
            share = len(flat) // self.world
            with self._meeting(), self._timed("scatter", flat):
                _reduce_scatter(flat[self.rank * share : (self.rank + 1) * share], flat)

    def gather(self, flat: Tensor) -> None:
        """Of [world x share]: fills in the shares of the other ranks."""
        if self.world > 1:
            share = len(flat) // self.world
            with self._meeting(), self._timed("gather", flat):
                _all_gather(flat, flat[self.rank * share : (self.rank + 1) * share])

    def total(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Integers added up over the ranks, exactly."""
        if self.world == 1:
            return numbers
        tensor = torch.from_numpy(numbers.copy())
        with self._meeting():
            dist.all_reduce(tensor)
        return tensor.numpy()

    # ---- words ----

    def tell(self, say: Callable[[], str]) -> str:
        """What rank 0 says; the others do not call `say`. Where it fails, it fails for all: rank 0 alone gives the reason."""
        if self._watch is None:
            return say()
        self._watch.meetings += 1
        self._told += 1
        key = f"told/{self._told}"
        if not self.leads:
            kind, _, text = self.hear(key).partition(":")
            if kind == FAILED:
                raise RankLost(Verdict(FAILED, 0, f"rank 0 failed: {text}", []))
            return text
        try:
            text = say()
        except BaseException as error:
            self.say(key, f"{FAILED}:{text_of(error)}")
            raise
        self.say(key, f"said:{text}")
        return text

    def first(self, value: bool) -> bool:
        """Rank 0's answer, for what it alone can know surely."""
        return self.tell(lambda: "yes" if value else "") == "yes"

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Rank 0 first, then all others at once: it may leave something that spares them work."""
        if not self.leads:
            self.tell(str)
        yield
        if self.leads:
            self.tell(str)

    def agree(self, signal: str | None) -> str | None:
        """The name of a signal that any rank has received, so that all leave after the same step."""
        if self.world == 1:
            return signal
        names = [number.name for number in CAUGHT]
        asked = torch.tensor([0 if signal is None else 1 + names.index(signal)])
        with self._meeting():
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        self._agreed = bool(asked)
        return names[int(asked) - 1] if self._agreed else None

    # ---- time, and each other's health ----

    def compiling(self, may_be: bool) -> None:
        """Whether from now on this rank may keep the others waiting, and say nothing, as long as a compiler takes."""
        if self._watch is not None:
            self._watch.patience = START_SECONDS if may_be else self._watch.silence
            self._watch.quiet = max(COMPILER_SECONDS, self._watch.silence) if may_be else self._watch.silence

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """For work whose length differs from rank to rank. Its collectives are no part of a step's times."""
        if self._watch is None:
            yield
            return
        before, self._watch.patience = self._watch.patience, START_SECONDS
        timing, self._timing = self._timing, False
        try:
            yield
        finally:
            self._watch.patience, self._timing = before, timing

    def busy(self, seconds: float, steps: int) -> dict[str, Any]:
        """For a row of metrics, seconds of a step over the last `steps`, which took `seconds` each; {} for one process alone.

        rank_seconds: what each rank did besides its collectives; slowest_rank: whose that is the most. scatter_seconds,
        gather_seconds: this rank's sums of gradients, and exchanges of copies, the wait for the last updater included.
        """
        if self.world == 1:
            return {}
        if self._spans:
            self._spans[-1][2].synchronize()
            for kind, begun, done in self._spans:
                self._seconds[kind] += begun.elapsed_time(done) / 1000
        told = {f"{kind}_seconds": self._seconds[kind] / steps for kind in ("scatter", "gather")}
        all_ranks = torch.zeros(self.world, dtype=torch.float64)
        all_ranks[self.rank] = seconds - sum(self._seconds.values()) / steps
        self.gather(all_ranks)
        self._seconds.clear()
        self._spans.clear()
        return {"rank_seconds": all_ranks.tolist(), "slowest_rank": int(all_ranks.argmax()), **told}

    def guard(self, folder: Path, attempt: str, on_lost: Callable[[Verdict], None]) -> None:
        """Where this rank leaves its stacks if a rank is lost, and what is to be done then if it can't leave by itself."""
        if self._watch is not None:
            flight = folder / f"flight-rank{self.rank}-{attempt}.json"
            self._watch.write_to(folder / f"stacks-rank{self.rank}-{attempt}.txt", lambda: _dump_flight(flight))
            self._watch.on_lost = on_lost

    def failed(self, error: BaseException) -> None:
        """This rank can't go on: tells the others, who leave. Not for a signal that all have agreed on."""
        if self._watch is None or isinstance(error, RankLost):
            return
        if not isinstance(error, Preempted):
            self._watch.end(Verdict(FAILED, self.rank, f"rank {self.rank} failed: {text_of(error)}", []))
        elif not self._agreed:
            self._watch.end(Verdict(LEFT, self.rank, f"rank {self.rank}: {error}", []))

    def why(self, error: BaseException) -> BaseException:
        """What an error comes from, where the real reason is that another rank was lost."""
        if self._watch is None or self._agreed or isinstance(error, RankLost):
            return error
        # A launcher sends TERM to all when one has died; who that was is known a moment later. And what is wrong for all
        # is for rank 0 to say.
        patient = not self._asked and (isinstance(error, Preempted) or not self.leads)
        self._asked = True
        found = self._watch.wait(VERDICT_SECONDS if patient else 0.0)
        return RankLost(found) if found is not None and found.kind != LEFT and found.rank != self.rank else error

    def speaks_of(self, lost: RankLost) -> bool:
        """Whether this rank is the one that tells the user: the first, or the second where the first can't."""
        return self.rank == (1 if lost.verdict.rank == 0 and lost.verdict.kind != FAILED else 0)

    def set_silence(self, seconds: float) -> None:
        """How long a rank may be silent, or keep the others waiting within a step."""
        if self._watch is not None:
            self._watch.silence = seconds

    def close(self, *, orderly: bool) -> None:
        """Ends this rank's part. `orderly`: all ranks come to this point, at the end or for a signal."""
        if self._watch is None or self._store is None:
            return
        self._watch.close()
        # The store may live in rank 0's process: that one goes last, and does not wait for one that is lost.
        found = self._watch.found
        gone = found.rank if found is not None else 0
        others = [f"parted/{rank}" for rank in range(1, self.world) if rank != gone]
        with contextlib.suppress(RuntimeError):  # where the store is gone there is nothing to wait for
            self.say(f"parted/{self.rank}", "")
            until = time.monotonic() + (PART_SECONDS if orderly else LEAVE_SECONDS)
            while self.leads and others and not self._store.check(others) and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        if orderly:
            time.sleep(LET_GO_SECONDS)
            dist.destroy_process_group()
        else:  # a backend whose peers are gone may hang in its own end
            faulthandler.dump_traceback_later(PART_SECONDS, exit=True)

    def say(self, key: str, text: str) -> None:
        """Leaves a word for other ranks. May be called from any thread, and by any rank at any time, as `hear` may."""
        if self._store is not None:
            self._store.set(key, text)

    def hear(self, key: str) -> str:
        """What another rank has left under this key, as soon as it is there; "" for one process alone.

        Short questions, so that several threads may ask one store. Raises RankLost where a rank is lost meanwhile.
        """
        if self._store is None:
            return ""
        assert self._watch is not None
        try:
            while not self._store.check([key]):
                if self._watch.found is not None:
                    raise _parting(self._watch.found)
                time.sleep(POLL_SECONDS)
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise self._reason(error) from error

    # ---- within ----

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        watch = self._watch
        assert watch is not None
        watch.meetings += 1
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._reason(error) from error

    def _reason(self, error: RuntimeError) -> BaseException:
        """Why a collective or a message failed: most often a rank that is gone, and the verdict tells which."""
        assert self._watch is not None
        found = self._watch.wait(self._watch.silence + LEAVE_SECONDS)
        return error if found is None else _parting(found)

    @contextlib.contextmanager
    def _timed(self, kind: str, tensor: Tensor) -> Iterator[None]:
        """Notes how long a collective took, the wait for the last rank included. A recorded one can't be timed."""
        if not self._timing:
            yield
        elif tensor.device.type != "cuda":
            begun = time.perf_counter()
            yield
            self._seconds[kind] += time.perf_counter() - begun
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._spans.append((kind, start, end))


def _parting(found: Verdict) -> BaseException:
    return Preempted("SIGTERM") if found.kind == LEFT else RankLost(found)


def join(rank: int, world: int, local: int, *, gpus: bool, silence: float) -> Ranks:
    """Meets the other ranks at the place that the launcher's environment names. One process alone needs no launcher.

    local: number on this machine; gpus: whether tensors may be on one; silence: see `RankSettings`. Returns once all are there.
    """
    if world == 1:
        return Ranks()
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=START_SECONDS)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        rank=rank,
        world_size=world,
        store=dist.PrefixStore("group", store),
        timeout=COLLECTIVE_LIMIT,
    )
    # Connections of their own: one that waits for an answer must not hold up the beat.
    words, beats = (dist.PrefixStore("dwslm", store.clone()) for _ in range(2))
    watch = Watch(beats, rank, world, silence=silence, patience=START_SECONDS)
    return Ranks(rank, world, local, words, watch)


def _reduce_scatter(share: Tensor, flat: Tensor) -> None:
    # Renamed in torch 2.13; the old name warns there.
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(share, flat)


def _all_gather(flat: Tensor, share: Tensor) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(flat, share)


def _dump_flight(path: Path) -> None:
    """NCCL's flight recorder: which collectives were queued, begun and done. Nothing where there is no NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is not None and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        path.write_bytes(dump())
        os.sync()
