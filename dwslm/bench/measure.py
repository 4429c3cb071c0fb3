"""One row: gate an engine, time it, record it. Runs in the process that owns the device."""

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dwslm.bench import (
    attention,
    delta_rule,
    depth_mix,
    elementwise,
    gates,
    head,
    mlp,
    newton_schulz,
    optimizer_step,
    projection,
    short_conv,
)
from dwslm.bench.case import Case, Engine, Run, draw_upstream, given, leaves, values_and_gradients
from dwslm.bench.figures import blank_row, fill_figures
from dwslm.bench.gate import Truth, check, check_plain, check_size, make_truth
from dwslm.bench.record import Batch, Values, check_padding, check_replay, record_cuda
from dwslm.bench.request import BATCHES, BY_CONTEXT, Request
from dwslm.bench.timing import Stat, Timer, measure_ceilings, peak_bytes, sets_needed
from dwslm.bench.work import Work, make_work
from dwslm.data.shards import open_dataset
from dwslm.ops.segments import Segments, segments

MORE_SLOTS = 16
"""Empty segments added to see that they change nothing."""
NEW_SLOTS = 5
"""Slots more than any call before has had, where an engine builds something for each number of them."""
OPS_FOLDER = Path(__file__).resolve().parent.parent / "ops"


@contextmanager
def deterministic() -> Iterator[None]:
    """Same bits every time. Fresh memory is filled with NaN here, so what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def is_refusal(error: BaseException) -> bool:
    """Whether an engine says that it cannot do this, in its own words, rather than breaking."""
    if isinstance(error, NotImplementedError) or type(error).__name__ == "cudnnGraphNotSupportedError":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and OPS_FOLDER in Path(frames[-1].filename).resolve().parents
    return isinstance(error, ValueError) and ours


def words(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:600]


class Bench:
    """All cases of a request on one device, with their batches and float32 references."""

    def __init__(self, request: Request):
        """Raises ValueError for a dataset that cannot be opened or packed so, or a device that is not there."""
        self.request = request
        self.device = torch.device(request.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no GPU")
        torch.backends.cuda.matmul.allow_tf32 = False
        self.dtype = torch.float32 if request.small else torch.bfloat16
        self.dataset = open_dataset(request.data)
        self.shape = request.shape(self.dataset.vocab_size)
        self.timer = Timer(self.device, request.repeats, request.warm_up_s)
        self.works: dict[tuple[int, int], Work] = {}
        self.truths: dict[Any, Truth] = {}
        self.plain: dict[Any, str | None] = {}
        self.at_size: tuple[Any, Truth] | None = None
        self.draws = 0
        self.step_case = self._step_case()
        arguments = (self.shape, self.dtype, self.device)
        made = [
            *attention.cases(*arguments),
            *delta_rule.cases(*arguments),
            *mlp.cases(*arguments),
            *projection.cases(*arguments),
            *head.cases(*arguments, self.targets),
            *short_conv.cases(*arguments),
            *gates.cases(*arguments),
            *depth_mix.cases(*arguments),
            *elementwise.norm_cases(*arguments),
            *elementwise.residual_cases(*arguments),
            *elementwise.rope_cases(*arguments),
            *newton_schulz.cases(self.shape, self.device),
        ]
        self.cases = {(case.op, case.name, case.heads): case for case in made if case.op in request.ops}

    def _step_case(self) -> optimizer_step.StepCase:
        settings = optimizer_step.ModelSettings()
        if self.request.small:
            settings = optimizer_step.small(settings)
        return optimizer_step.StepCase(settings, self.dataset.vocab_size, self.device)

    def catalogue(self) -> list[dict[str, Any]]:
        """Cases and engines by name, with what the planner needs to know of them."""
        listed = [
            {
                "op": case.op,
                "case": case.name,
                "heads": case.heads,
                "sized": case.sized,
                "by_context": case.op in BY_CONTEXT,
                "engines": [{"engine": e.name, "patience": e.patience, "missing": e.missing()} for e in case.engines],
            }
            for case in self.cases.values()
        ]
        if "optimizer" in self.request.ops:
            engines = [{"engine": name, "patience": 90.0, "missing": None} for name in self.step_case.engines]
            listed.append(
                {
                    "op": "optimizer",
                    "case": "muonh step",
                    "heads": None,
                    "sized": False,
                    "by_context": False,
                    "engines": engines,
                }
            )
        return listed

    def work(self, tokens: int, context: int) -> Work:
        if (tokens, context) not in self.works:
            self.works[tokens, context] = make_work(self.dataset, tokens, context, self.request.seed, BATCHES)
        return self.works[tokens, context]

    def targets(self, tokens: int) -> Tensor:
        """Targets of a real batch, int64 [tokens]; folded into the vocabulary where the measured model has a smaller one."""
        targets = torch.from_numpy(self.work(tokens, max(self.request.contexts)).targets[0])
        return torch.where(targets < 0, targets, targets % self.shape.vocab_size)

    def generator(self) -> torch.Generator:
        """A new one each time: every gate and every timing sees fresh inputs."""
        self.draws += 1
        return torch.Generator(self.device).manual_seed((self.request.seed * 1_000_003 + self.draws) % 2**63)

    def ceilings(self) -> dict[str, Any]:
        return measure_ceilings(self.timer, self.request.tokens[0], self.request.quick)

    def rows(self, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The row of a job, first as far as it is timed, then whole. Whatever goes wrong becomes its status.

        Args:
            job: op, case, heads, engine, tokens, context; `record`: whether to record it; `at_size`: whether to check it at
                this size too; `gate`: the result of this engine's gate where it has passed one; `ceilings`.
        """
        row = blank_row(job)
        try:
            if job["op"] == "optimizer":
                yield from optimizer_step.step_rows(
                    self.step_case, row, self.timer, self.generator(), job["ceilings"], job["record"]
                )
            else:
                case = self.cases[job["op"], job["case"], job["heads"]]
                yield from self._row(row, job, case, case.engine(job["engine"]))
        except Exception as error:
            refused = is_refusal(error) and row["status"] is None
            yield row | {
                "status": "refused" if refused else "error",
                "reason": words(error) if not refused else str(error),
            }
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    # ---- an operation ------------------------------------------------------------------------------------

    def _row(self, row: dict[str, Any], job: dict[str, Any], case: Case, engine: Engine) -> Iterator[dict[str, Any]]:
        row["dtype"] = engine.dtype or str(case.dtype).removeprefix("torch.")
        if reason := engine.missing():
            yield row | {"status": "missing", "reason": reason}
            return
        try:
            run = engine.make()
        except ValueError as error:
            yield row | {"status": "refused", "reason": str(error)}
            return

        def held(inputs: Sequence[Tensor], seg: Segments) -> tuple[Tensor, ...]:
            """What is held to the truth, whose inputs all engines share."""
            return run(given(case, engine, inputs), seg)

        context = job["context"] or max(self.request.contexts)
        work = self.work(job["tokens"], context) if case.sized else None
        row["gate"] = job.get("gate")
        if row["gate"] is None:
            trial = self._trial(case, work)
            # Importing, compiling and tuning happen in the first call, and the reference is computed by now.
            row["first_call_s"] = self.timer.seconds(
                lambda: values_and_gradients(case, held, trial.inputs, trial.segments, trial.upstream)
            )
            gate = check(
                case,
                engine,
                held,
                tokens=trial.segments.ids.shape[0],
                context=trial.segments.context,
                generator=self.generator(),
                truths=self.truths,
                exact=self._exact(engine),
            )
            row["gate"] = gate.as_json()
            if not gate.passed:
                yield row | {"status": "failed", "reason": "; ".join(gate.reasons)}
                return
        if case.plain is not None and work is not None and job["at_size"]:
            reasons = self._check_size(row["gate"], case, engine, held, work)
            if reasons:
                row["gate"]["passed"] = False
                yield row | {"status": "failed", "reason": "; ".join(reasons)}
                return
        self._time(row, case, engine, run, work, job["ceilings"])
        row |= {"status": "ok"}
        yield row
        if job["record"] and self.device.type == "cuda":
            row["record"] = self._record(case, engine, run, work)
            yield row

    def _exact(self, engine: Engine) -> Callable[[], AbstractContextManager[Any]]:
        return deterministic if engine.ask else nullcontext

    def _trial(self, case: Case, work: Work | None) -> Truth:
        """The gate's first trial of a case."""
        tokens = case.gate_tokens or (work.tokens if work else 1)
        context = case.gate_context or (work.context if work else 1)
        key = (case.op, case.name, case.heads, case.kinds[0], tokens, context)
        if key not in self.truths:
            self.truths[key] = make_truth(case, case.kinds[0], tokens, context, self.generator())
        return self.truths[key]

    def _check_size(self, found: dict[str, Any], case: Case, engine: Engine, run: Run, work: Work) -> list[str]:
        """Why an engine fails against the plain float32 form at the timed size."""
        key = (case.op, case.name, case.heads)
        if key not in self.plain:
            self.plain[key] = check_plain(case, self._trial(case, work))
        if reason := self.plain[key]:
            found["notes"].append(reason)
            return []
        size = (*key, work.tokens, work.context)
        if self.at_size is None or self.at_size[0] != size:
            self.at_size = None  # the last one's memory first
            seg = self._segments(work)
            try:
                truth = make_truth(case, case.kinds[0], work.tokens, work.context, self.generator(), seg)
            except torch.OutOfMemoryError:
                found["notes"].append(
                    f"no memory for the plain float32 form at {work.tokens:,} tokens: not checked at this size"
                )
                return []
            self.at_size = size, truth
        return check_size(case, engine, run, self.at_size[1], found)

    def _segments(self, work: Work | None, batch: int = 0) -> Segments:
        if work is None:
            return segments(torch.tensor([0, 1], dtype=torch.int32, device=self.device), 1, 1)
        return segments(torch.from_numpy(work.cu_seqlens[batch]).to(self.device), work.tokens, work.context)

    def _time(
        self, row: dict[str, Any], case: Case, engine: Engine, run: Run, work: Work | None, ceilings: dict[str, Any]
    ) -> None:
        generator, seg, tokens = self.generator(), self._segments(work), work.tokens if work else 1
        for name, extra in engine.extra.items():
            row["extra_ms"][name] = self.timer.measure([lambda extra=extra: extra(seg)]).as_json()  # type: ignore[misc]

        def drawn() -> list[Tensor]:
            return leaves(case, given(case, engine, case.draw(tokens, case.kinds[0], generator)))

        sets = [drawn()]
        size = sum(x.numel() * x.element_size() for x in sets[0])
        sets += [drawn() for _ in range(sets_needed(size, self.device) - 1)]
        upstream = [draw_upstream(run(own, seg), None, generator) for own in sets]
        learnt = [[x for x in own if x.requires_grad] for own in sets]

        def forward(i: int) -> object:
            return run(sets[i], seg)

        def both(i: int) -> object:
            outputs = run(sets[i], seg)
            return torch.autograd.grad(outputs, learnt[i], upstream[i]) if learnt[i] else outputs

        count = range(len(sets))
        one_way = self.timer.measure([lambda i=i: forward(i) for i in count]) if learnt[0] else None  # type: ignore[misc]
        both_ways = self.timer.measure([lambda i=i: both(i) for i in count])  # type: ignore[misc]
        row["peak_bytes"] = peak_bytes(lambda: both(0), self.device)
        if engine.new_slots is not None and work is not None:
            row["extra_ms"][engine.new_slots] = self._new_slots(case, run, sets[0], upstream[0], work, both_ways)
        fill_figures(row, case.cost(work), one_way, both_ways, ceilings)  # type: ignore[arg-type]

    def _new_slots(
        self, case: Case, run: Run, own: Sequence[Tensor], upstream: Sequence[Tensor], work: Work, usual: Stat
    ) -> dict[str, float | int]:
        """Milliseconds that the first call with a new number of slots takes more than a usual one."""
        seg = self._segments(work)
        padded = torch.cat([seg.cu_seqlens, seg.cu_seqlens[-1:].expand(NEW_SLOTS)])
        seg = segments(padded, work.tokens, work.context)
        first = 1e3 * self.timer.seconds(lambda: values_and_gradients(case, run, own, seg, upstream))
        return Stat(first - usual.median, usual.spread, 1).as_json()

    # ---- recording ---------------------------------------------------------------------------------------

    def _record(self, case: Case, engine: Engine, run: Run, work: Work | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "status": "fails",
            "reason": None,
            "batches": BATCHES,
            "slots": work.slots if work else None,
            "deterministic": engine.ask,
            "identical": None,
            "padding_identical": None,
            "recorded_ms": None,
            "launched_ms": None,
        }
        generator = self.generator()
        every = [self._segments(work, i) for i in range(BATCHES if work else 1)]
        tokens, context = every[0].ids.shape[0], every[0].context
        batches: list[Batch] = [
            (given(case, engine, case.draw(tokens, case.kinds[0], generator)), every[i % len(every)].cu_seqlens)
            for i in range(BATCHES)
        ]
        upstream = draw_upstream(run(batches[0][0], every[0]), None, generator)

        def step(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> Values:
            return values_and_gradients(case, run, inputs, segments(cu_seqlens, tokens, context), upstream)

        try:
            with self._exact(engine)():
                changed = check_padding(step, batches[0], MORE_SLOTS) if engine.repeatable else []
                found["padding_identical"] = not changed if engine.repeatable else None
                differences = check_replay(record_cuda, step, batches)
            found["identical"] = not differences
            found["status"] = "ok" if not differences else "differs"
            if differences:
                found["reason"] = f"not the unrecorded run's bits: {', '.join(differences)}"
            if changed:
                found["reason"] = f"empty segments changed bits of {', '.join(changed)}"
            replay = record_cuda(lambda: step(*batches[0]))
            found["recorded_ms"] = self.timer.measure([replay]).as_json()
            found["launched_ms"] = self.timer.measure([lambda: step(*batches[0])], launching=True).as_json()
        except Exception as error:
            found |= {"status": "fails", "reason": words(error)}
        return found
