"""What one measuring process of `dwslm bench step` measures: a build of ours, or the peer."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dwslm.bench import step_peer
from dwslm.bench.step import Drive, OwnStepper, Parts, free, measure, mfu, profile_step
from dwslm.bench.step_builds import Measurement
from dwslm.bench.step_classes import ProductShapes
from dwslm.bench.step_floor import floors
from dwslm.bench.timing import Timer, measure_ceilings
from dwslm.bench.worker import describe_device
from dwslm.cli.build import Built, build
from dwslm.cli.find import open_split
from dwslm.cli.plan_data import open_stream
from dwslm.cli.preflight import composed
from dwslm.config import RunConfig, to_plain
from dwslm.data.loader import GlobalBatch, Loader
from dwslm.machine.compiler_cache import size
from dwslm.machine.health import Gpu
from dwslm.train.device import choose_device, set_numerics
from dwslm.train.plan import Plan, make_plan
from dwslm.train.settings import AUTO

Keep = Callable[..., None]
Say = Callable[[str], None]

NO_GPU = "a CPU: no power, clock, energy, memory, MFU or classes of GPU work"


def measure_build(asked: Measurement, keep: Keep, say: Say) -> None:
    """A build of ours.

    Raises:
        ValueError: as building a run does.
    """
    config = composed(asked.overrides, None)
    device = choose_device(config.train.device)
    imported = time.time()
    before = files(asked.caches)
    built = build(config, lr=None)
    parts = Parts(built.plan, config.train, config.guard, built.model, built.optimizer, built.stream)
    ready = time.time()
    start: dict[str, Any] = {"imports_s": imported - asked.started, "build_s": ready - imported}
    sizes = built.model.sizes()
    matrices = sizes["matrices"] + sizes["head"]
    keep(
        start=start,
        config=to_plain(config),
        engines=built.engines,  # what "auto" stood for, which another version may tell otherwise
        sizes=sizes,
        matrix_parameters=matrices,
        work=describe(config, built.plan),
        data={"path": str(built.train.path), "fingerprint": built.train.fingerprint},
    )
    say(f"built in {ready - asked.started:.1f} s, {imported - asked.started:.1f} of them imports")
    gpu = watch(device, keep)
    with parts.loader() as loader:
        stepper = OwnStepper(parts)
        drive = Drive(stepper, watched(loader), device)
        if asked.first_only:
            seconds = drive.timed(1)
            say(f"first step {seconds:.1f} s")
            keep(status="ok", first_step_s=seconds, start=started(start, asked, before, seconds))
            return
        found = measured(drive, asked, config, gpu, say)
        start = started(start, asked, before, found["first_step_s"])
        if device.type == "cpu" and not config.train.compile:
            start["caches"] = "unused"
        speed = found["tokens_per_second"]["median"]
        keep(
            status="ok", **found, recorded=stepper.recorded, start=start, mfu=mfu(matrices, speed, device), profile=None
        )
        if asked.classes and device.type == "cuda":
            keep_classes(built, config, drive, stepper, device, keep, say)


def keep_classes(
    built: Built, config: RunConfig, drive: Drive, stepper: OwnStepper, device: torch.device, keep: Keep, say: Say
) -> None:
    """Where the time of a step goes; or why that is not known, since what was timed stands without."""
    batch = next(drive.batches)
    least = floors(
        built.model,
        built.optimizer,
        [one.cu_seqlens.numpy() for one in batch.micro_batches],
        built.plan.micro_batch_tokens,
        batch.micro_batches[0].context,
    )
    shapes = ProductShapes(config.model.width, config.model.mlp_hidden, built.model.vocab_size)
    try:
        ceilings = measure_ceilings(Timer(device), built.plan.micro_batch_tokens)
        profiled = profile_step(drive, stepper.launch, shapes, built.plan.grad_accum, least, ceilings)
    except torch.OutOfMemoryError:
        reason = "no room beside this build for what measures its classes: take smaller micro-batches"
        keep(no_classes=reason)
        say(reason)
        return
    keep(ceilings=ceilings, profile=profiled)
    say(f"profiled: {profiled['wall_ms']:.1f} ms a step, idle {profiled['idle_ms']:.1f}")


def measure_peer(asked: Measurement, keep: Keep, say: Say) -> None:
    """flash-linear-attention's model of the same shape on the same data.

    Raises:
        ValueError: for a shape that it does not have.
    """
    config = composed(asked.overrides, None)
    device = choose_device(config.train.device)
    if reason := step_peer.missing():
        keep(status="missing", reason=reason)
        return
    if device.type != "cuda":
        keep(status="refused", reason="the peer's kernels are written for a GPU")
        return
    imported = time.time()
    before = files(asked.caches)
    set_numerics(config.train.deterministic, config.train.threads)
    packing = config.data.packing
    plan = make_plan(config.train, config.optim, config.checkpoint, packing.context, None, packing.ladder)
    if config.train.micro_batch_tokens == AUTO:
        plan = plan.with_micro_batch(plan.candidates()[0])  # what does not fit is cut below
    train_set = open_split(config.data, "train")
    stream = open_stream(config, plan, train_set, train_set.path)
    compiled = config.train.compile
    why = None if compiled else "train.compile=false"

    def make(split: int) -> step_peer.PeerStepper:
        return step_peer.PeerStepper(
            config.model, train_set.vocab_size, packing.context, device, split=split, compile=compiled
        )

    gpu = watch(device, keep)
    with Loader(
        stream,
        first_row=0,
        micro_batch_tokens=plan.micro_batch_tokens,
        grad_accum=plan.grad_accum,
        depth=config.train.prefetch,
        pin=True,
    ) as loader:
        batches = watched(loader)
        first = next(batches)
        ready = time.time()
        try:
            stepper = step_peer.first_that_fits(make, first, device, say)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, or of a kernel under it
            compiled, why = False, " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in why:
                raise RuntimeError(
                    f"the compiled peer breaks the device, so that nothing more runs in its process ({why}); give "
                    "train.compile=false to measure it without the compiler"
                ) from error
            say(f"the compiled peer fails, so it runs without: {why}")
            free(device)
            stepper = step_peer.first_that_fits(make, first, device, say)
        torch.cuda.synchronize(device)
        took = time.time() - ready
        start = started({"imports_s": imported - asked.started, "build_s": ready - imported}, asked, before, took)
        found = measured(Drive(stepper, batches, device), asked, config, gpu, say) | {"first_step_s": took}
        keep(
            status="ok",
            **found,
            start=start,
            config=to_plain(config),
            matrix_parameters=stepper.matrix_parameters,
            work=describe(config, plan) | {"micro_batch_tokens": plan.micro_batch_tokens // stepper.split},
            data={"path": str(train_set.path), "fingerprint": train_set.fingerprint},
            mfu=mfu(stepper.matrix_parameters, found["tokens_per_second"]["median"], device),
            peer={
                "model": step_peer.configuration(config.model, train_set.vocab_size, packing.context),
                "parameters": stepper.parameters,
                "attention": stepper.attention,
                "compiled": compiled,
                "not_compiled_because": why,
            },
            profile=None,
        )


def measured(drive: Drive, asked: Measurement, config: RunConfig, gpu: Gpu | None, say: Say) -> dict[str, Any]:
    return measure(
        drive, steps=asked.steps, warm_s=asked.warm_s, batch_tokens=config.train.batch_tokens, gpu=gpu, say=say
    )


def watched(loader: Loader) -> Iterator[GlobalBatch]:
    return iter(loader)


def describe(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Sizes of a step."""
    return {
        "batch_tokens": config.train.batch_tokens,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "grad_accum": plan.grad_accum,
        "context": config.data.packing.context,
        "layers": config.model.layers,
    }


def watch(device: torch.device, keep: Keep) -> Gpu | None:
    """The GPU as the driver sees it, and what it is; None, with the reason, where nothing can be asked."""
    machine = describe_device(device)
    if device.type != "cuda":
        keep(machine=machine, not_measured=NO_GPU)
        return None
    try:
        gpu = Gpu(machine["uuid"])
    except ValueError as error:
        keep(machine=machine, not_measured=str(error))
        return None
    facts = gpu.facts()
    if facts["clock_cap_mhz"] is None:  # or it would hide what the user has said
        del facts["clock_cap_mhz"]
    keep(machine=machine | facts, not_measured=None)
    return gpu


def files(folders: Sequence[str]) -> int:
    """Files in the compilers' caches."""
    return sum(size(Path(folder))[0] for folder in folders)


def started(start: dict[str, Any], asked: Measurement, before: int, first_step_s: float) -> dict[str, Any]:
    """How the first step came about: `to_first_step_s` from the start of the process to its end, and the compilers' caches:
    "cold" (nothing in them before), "warm" (nothing was added), or "partly" full."""
    after = files(asked.caches)
    caches = "cold" if before == 0 else "warm" if after == before else "partly"
    whole = start["imports_s"] + start["build_s"] + first_step_s
    return start | {"to_first_step_s": whole, "caches": caches, "files_before": before, "files_after": after}
