"""The part of a preflight that computes: one step at full size, and what it says of the whole run."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from dwslm.cli.launch import Built
from dwslm.config import RunConfig
from dwslm.data.loader import Loader, TorchBatch
from dwslm.machine.health import Gpu, Sample, Sampler
from dwslm.machine.preflight import FAILED, OK, SKIPPED, WARNING, Check, check_clocks, check_xid
from dwslm.train.report import count
from dwslm.train.step import TrainStep

CPU_TOKENS = 256  # of a first step that only tells how long a whole one would take
CPU_LIMIT_S = 60.0
"""A CPU does one step at full size where it takes no longer."""
LOAD_S, LOAD_STEPS = 15.0, 3
"""A GPU does as many steps, for as long at least: a card is fast until it is warm."""
LONGEST_H = 24 * 31.0
"""A longer run is refused where nobody asked for this device by name."""
HEALTH_BYTES_H = 3600 * 700
BACKWARD = 3  # a training step costs as much as so many forward passes


def on_gpu(config: RunConfig, built: Built, gpu: Gpu | None, clock_cap: int | None) -> Iterator[Check]:
    """Steps at full size, on each rung of a ladder: memory, clock under load, time and energy."""
    device, plan = built.optimizer.device, built.plan
    samples: list[Sample] = []
    torch.cuda.reset_peak_memory_stats(device)  # the checks before have held copies
    seconds, joules, said = [], [], []
    try:
        with Sampler(gpu.sample) if gpu is not None else nullcontext() as sampler:
            for rung in range(len(plan.rungs)):
                step = whole_step(config, built, rung)
                step()  # compiles
                before, begun, done = gpu.energy_j() if gpu is not None else None, time.monotonic(), 0
                while done < LOAD_STEPS or time.monotonic() - begun < LOAD_S:
                    step()
                    done += 1
                end = time.monotonic()
                after = gpu.energy_j() if gpu is not None else None
                seconds.append((end - begun) / done)
                joules.append(None if before is None or after is None else (after - before) / done)
                speed = count(plan.batch_tokens / seconds[-1])
                said.append(f"{done} of context {plan.rungs[rung][1]:,} in {seconds[-1]:.2f} s each ({speed} tokens/s)")
                if sampler is not None:
                    samples += sampler.between(begun, end)
    except torch.OutOfMemoryError as error:
        yield Check("one step", FAILED, f"out of memory in micro-batches of {plan.micro_batch_tokens:,} tokens; "
                    f"halve train.micro_batch_tokens. {str(error).splitlines()[0]}")  # fmt: skip
        return
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    memory = f"{peak / 1e9:.1f} of {total / 1e9:.1f} GB at the peak"
    yield Check("one step", OK, f"of {plan.batch_tokens:,} tokens: {'; '.join(said)}; {memory}")
    if gpu is not None:
        yield check_clocks(samples, clock_cap)
        yield check_xid(gpu.new_xid())
    yield expected(config, built, seconds, joules)


def on_cpu(config: RunConfig, built: Built) -> Iterator[Check]:
    """A small step, and one at full size where it takes no more than `CPU_LIMIT_S`."""
    plan = built.plan
    small = min(CPU_TOKENS, plan.rungs[0][1])
    computed, updated = first_slots(built, small)
    guess = computed / small * plan.batch_tokens + updated
    if guess > CPU_LIMIT_S:
        yield Check("one step", SKIPPED, f"of {plan.batch_tokens:,} tokens would take about {guess / 60:,.0f} minutes on this "
                    f"CPU; one of {small} tokens went through. Memory at full size is not known")  # fmt: skip
        yield expected(config, built, [guess] * len(plan.rungs), [None] * len(plan.rungs))
        return
    seconds = []
    for rung in range(len(plan.rungs)):
        step = whole_step(config, built, rung)
        step()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    speed = count(plan.batch_tokens / seconds[-1])
    yield Check("one step", OK, f"of {plan.batch_tokens:,} tokens in {seconds[-1]:.2f} s ({speed} tokens/s)")
    yield expected(config, built, seconds, [None] * len(plan.rungs))


def whole_step(config: RunConfig, built: Built, rung: int) -> Callable[[], None]:
    """A function that does one whole step on the first batch of a rung, as training would, and waits for its end."""
    plan, stream = built.plan, built.stream
    with Loader(
        stream,
        first_row=stream.first_rows[rung],
        micro_batch_tokens=plan.micro_batch_tokens,
        grad_accum=plan.grad_accum,
        depth=1,
    ) as loader:
        batch = next(loader)
    shape = batch.micro_batches[0]
    settings = config.train
    step = TrainStep(
        built.model,
        built.optimizer,
        shape.rows,
        shape.context,
        shape.slots,
        compile=settings.compile,
        record=settings.record,
    )

    def once() -> None:
        step.run(batch, plan.rate(0))[0].item()

    return once


def first_slots(built: Built, size: int) -> tuple[float, float]:
    """One step on the first slots of the first row. Seconds of forward and backward, and of the update."""
    batch = built.stream.batch(0, 1)
    cut = TorchBatch(
        tokens=torch.from_numpy(batch.tokens[:size]),
        targets=torch.from_numpy(batch.targets[:size]).long(),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens).clamp(max=size),
        context=size,
        scored=max(1, int((batch.targets[:size] >= 0).sum())),
    )
    step = TrainStep(built.model, built.optimizer, 1, size, len(batch.docs), compile=False)
    step.scored.fill_(cut.scored)
    step.rate.fill_(built.plan.rate(0))
    started = time.perf_counter()
    step.micro_batch(cut)
    computed = time.perf_counter()
    step.update()
    return computed - started, time.perf_counter() - computed


def expected(config: RunConfig, built: Built, seconds: list[float], joules: list[float | None]) -> Check:
    """Hours and energy of the run, from those of a step on each rung."""
    plan = built.plan
    begins = [*(first for first, _ in plan.rungs), plan.steps]
    steps = [end - begin for begin, end in zip(begins[:-1], begins[1:], strict=True)]
    held_out = built.valid.manifest["totals"]["tokens"]
    if config.train.eval_documents is not None:
        held_out *= min(1.0, config.train.eval_documents / len(built.valid))
    scorings = 1 + (plan.steps // plan.score_stride if plan.score_stride else 0)
    # Scored at the last rung's context, forward only.
    scoring_steps = scorings * held_out / plan.batch_tokens / BACKWARD
    training = sum(n * s for n, s in zip(steps, seconds, strict=True)) / 3600
    scoring = scoring_steps * seconds[-1] / 3600
    hours = training + scoring
    places = 2 if hours < 100 else 0
    told = f"{hours:,.{places}f} hours ({training:,.{places}f} training, about {scoring:,.{places}f} in {scorings} scorings)"
    known = [j for j in joules if j is not None]
    if len(known) == len(steps):
        energy = sum(n * j for n, j in zip(steps, known, strict=True)) + scoring_steps * known[-1]
        told += f", {energy / 3.6e6:,.1f} kWh of the GPU alone, {HEALTH_BYTES_H * hours / 1e6:,.0f} MB of health rows"
    else:
        told += ", energy not known: no GPU that counts it"
    if hours > LONGEST_H:
        told += f"; more than {LONGEST_H:,.0f} hours"
        if config.train.device != "auto":
            return Check("expected", WARNING, told)
        return Check("expected", FAILED, f"{told}. train.device={built.optimizer.device} says that this is meant")
    return Check("expected", OK, told)
