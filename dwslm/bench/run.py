"""One call of the benchmark: opens the measuring process, works through the plan, and keeps the JSON file current."""

import datetime
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dwslm.bench.figures import blank_row
from dwslm.bench.plan import Job, again, alone, make_plan, needed
from dwslm.bench.process import Ended, Inline, Process
from dwslm.bench.request import BATCHES, Request
from dwslm.bench.work import describe, describe_documents, make_work
from dwslm.data.shards import Dataset, open_dataset
from dwslm.machine.compiler_cache import Moved
from dwslm.machine.health import HZ, IDLE, Gpu, Sample, Sampler, summarise
from dwslm.runs.durable import sync, to_json, write_synced

FORMAT = 1
OPEN_S = 180.0
"""Seconds that the measuring process may take to start: importing torch from a cold disk."""
CEILINGS_S = 90.0
GATE_S = 20.0
"""Seconds a row may take beside its engine's patience."""
RESERVE_S = 6.0
"""Seconds kept for timing the first engine again at the end."""

Say = Callable[[str], None]
Answer = dict[str, Any]


class Run:
    """A benchmark in progress. `document` is what the file holds; see docs/benchmark.md."""

    def __init__(
        self,
        request: Request,
        out: Path,
        *,
        say: Say,
        about: Mapping[str, Any],
        cache: tuple[list[Path], list[Moved]] = ([], []),
        inline: bool = False,
    ):
        """
        Args:
            out: the JSON file; written anew after every row.
            say: prints a line.
            about: fields of the document that the entry point knows: kind, command, commit, versions, machine.
            cache: compiler-cache folders looked at, and what was moved aside in them.
            inline: measure in this process, which a CPU may.
        """
        self.request, self.out, self.say = request, out, say
        self.worker: Process | Inline = Inline() if inline else Process(out.with_suffix(".log"))
        self.started = time.monotonic()
        self.dataset = open_dataset(request.data)
        self.gates: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.begun: set[tuple[Any, ...]] = set()
        self.without: dict[tuple[Any, ...], str] = {}  # engines that cannot be had, with the status that says so
        self.sampler: Sampler | None = None
        self.gpu: Gpu | None = None
        self.first: tuple[Job, dict[str, Any]] | None = None
        shape = request.shape(self.dataset.vocab_size)
        folders, moved = cache
        self.document: dict[str, Any] = {
            "format": FORMAT,
            **about,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "complete": False,
            "seed": request.seed,
            "budget_seconds": request.budget_s,
            "quick": request.quick,
            "ops": request.ops,
            "data": describe_data(self.dataset, request),
            "shape": {**vars(shape), "local_layers": shape.layers - shape.global_layers},
            "ceilings": None,
            "work": [],
            "rows": [],
            "noise": None,
            "stability": {
                "source": None,
                "reason": None,
                "cache": {
                    "folders": [str(folder) for folder in folders],
                    "moved_aside": [{"from": str(m.source), "to": str(m.target), "empty": m.empty} for m in moved],
                },
            },
            "notes": [],
        }

    def run(self) -> dict[str, Any]:
        """Measures everything that fits the budget. The file is complete after it, or holds what there was when it was stopped.

        Raises:
            ValueError: for data or a device that cannot be used, or where the measuring process does not start.
        """
        with ExitStack() as stack:
            stack.callback(self.worker.close)
            opened = self._open()
            self.document["machine"] = {**self.document.get("machine", {}), **opened["machine"]}
            if self.request.device == "cuda":
                self._watch(opened["machine"]["uuid"], stack)
            self._describe_work()
            self._ceilings()
            jobs = make_plan(self.request, opened["catalogue"])
            if not jobs:
                raise ValueError("nothing to measure: no engine of that name in these operations")
            for i, job in enumerate(jobs):
                self._job(job, f"{i + 1}/{len(jobs)}")
            self._noise()
            self.document["complete"] = True
            self._save()
        return self.document

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.request.budget_s - (time.monotonic() - self.started)

    # ---- steps -------------------------------------------------------------------------------------------

    def _open(self) -> Answer:
        self.say(f"seed {self.request.seed}; opening {self.request.device}")
        try:
            return self._last({"do": "open", "request": self.request.as_json()}, OPEN_S)
        except Ended as error:
            raise ValueError(f"the measuring process did not start: {error}") from None

    def _last(self, message: dict[str, Any], seconds: float) -> Answer:
        return list(self.worker.ask(message, seconds))[-1]

    def _watch(self, uuid: str | None, stack: ExitStack) -> None:
        try:
            self.gpu = Gpu(uuid)
        except ValueError as error:
            self.document["stability"]["reason"] = str(error)
            self.say(str(error))
            return
        facts = self.gpu.facts()
        given = self.document["machine"].get("clock_cap_mhz")
        self.document["machine"] |= facts | ({"clock_cap_mhz": given} if given else {})
        self.energy, self.ecc = self.gpu.energy_j(), self.gpu.ecc_errors()
        self.sampler = stack.enter_context(Sampler(self.gpu.sample, HZ))

    def _describe_work(self) -> None:
        sizes = [(t, c) for t in self.request.tokens for c in sorted(self.request.contexts)]
        if self.request.quick:
            sizes = [(self.request.tokens[0], max(self.request.contexts))]
        for tokens, context in sizes:
            work = describe(make_work(self.dataset, tokens, context, self.request.seed, BATCHES))
            self.document["work"].append(work)
            lengths = work["lengths"]
            self.say(
                f"work: {tokens:,} tokens, context {context:,}: {' / '.join(map(str, work['segments']))} segments in "
                f"{work['slots']} slots; text {lengths['min']:,} to {lengths['max']:,} tokens, median {lengths['median']:,.0f}, "
                f"{lengths['share_of_tokens_at_context']:.0%} of tokens in segments of the whole context"
            )

    def _ceilings(self) -> None:
        try:
            ceilings = self._last({"do": "ceilings"}, min(CEILINGS_S, max(1.0, self.left)))["ceilings"]
        except Ended as error:
            raise ValueError(f"the machine's ceilings could not be measured: {error}") from None
        self.document["ceilings"] = ceilings
        rates = {"bf16": "bf16_tflops", "FP8": "fp8_tflops", "float32": "float32_tflops"}
        told = [f"{name} {ceilings[key]['median']:,.1f} TFLOP/s" for name, key in rates.items() if ceilings[key]]
        self.say(f"ceilings: copy {ceilings['copy_gb_s']['median']:,.0f} GB/s, {', '.join(told)}")
        self._save()

    def _job(self, job: Job, count: str) -> None:
        if self.without.get((job.op, job.case, job.engine)) in ("missing", "refused"):
            return  # said once
        row = blank_row(job.as_json())
        before = self.gates.get(job.key)
        left = self.left - RESERVE_S
        if before is not None and not before["passed"]:
            row |= {"status": "failed", "gate": before, "reason": "its gate failed at another size: not timed"}
        elif left < needed(job, self.begun):
            row |= {
                "status": "skipped",
                "reason": f"the budget of {self.request.budget_s / 60:g} minutes was used up; alone: {alone(job, self.request)}",
            }
        else:
            row = self._measure(job, row, before, min(job.patience + GATE_S, left))
        self._keep(job, row, count)

    def _measure(self, job: Job, row: dict[str, Any], gate: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        self.begun.add(job.key)
        started, broken = time.monotonic(), None
        try:
            if not self.worker.running:
                self._open()
            message = {"do": "row", "job": job.as_json() | {"gate": gate, "ceilings": self.document["ceilings"]}}
            for answer in self.worker.ask(message, seconds):
                row = answer.get("row", row)
                broken = answer.get("broken")
        except Ended as error:
            if row["status"] == "ok":  # timed already: it ended while it was being recorded
                row["record"] = failed_record(str(error))
            else:
                row |= {
                    "status": "skipped" if error.late else "error",
                    "reason": f"{error}; alone: {alone(job, self.request)}",
                }
        if broken:
            self.say(f"the device must be opened again: {broken}")
            self.worker.close()
        row["seconds"] = time.monotonic() - started
        if self.sampler is not None:
            row["sm_mhz"] = working_clock(self.sampler.between(started, time.monotonic()))
        return row

    def _keep(self, job: Job, row: dict[str, Any], count: str) -> None:
        if row["gate"] is not None:
            self.gates[job.key] = row["gate"]
        if row["status"] in ("missing", "refused"):
            self.without[job.op, job.case, job.engine] = row["status"]
        if row["status"] == "ok" and self.first is None:
            self.first = job, row
        self.document["rows"].append(row)
        self._save()
        self.say(f"[{time.monotonic() - self.started:4.0f} s] {count} {line(row)}")

    def _noise(self) -> None:
        if self.first is None:
            return
        job, row = self.first
        second = self._measure(again(job), blank_row(job.as_json()), self.gates[job.key], max(RESERVE_S, self.left))
        one, two = row["forward_backward_ms"], second["forward_backward_ms"]
        noise: dict[str, Any] = {name: row[name] for name in ("op", "case", "engine", "tokens", "context", "heads")}
        noise |= {"first": one, "again": two, "difference_ms": None, "within_spread": None, "reason": second["reason"]}
        if two is not None:
            noise["difference_ms"] = abs(two["median"] - one["median"])
            noise["within_spread"] = noise["difference_ms"] <= max(one["spread"], two["spread"])
            self.say(
                f"noise: {job.engine} again: {one['median']:.4f} and {two['median']:.4f} ms, spreads {one['spread']:.4f} and "
                f"{two['spread']:.4f}: {'within' if noise['within_spread'] else 'BEYOND'} the spread"
            )
        self.document["noise"] = noise

    # ---- the file ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.document["seconds"] = time.monotonic() - self.started
        if self.sampler is not None and self.gpu is not None:
            energy, ecc = self.gpu.energy_j(), self.gpu.ecc_errors()
            self.document["stability"] |= {
                "source": "nvml",
                **summarise(list(self.sampler.samples), self.sampler.hz),
                "ecc_errors": {kind: difference(ecc[kind], self.ecc[kind]) for kind in ecc},
                "energy_j": difference(energy, self.energy),
            }
        write_over(self.out, to_json(self.document))


def working_clock(samples: list[Sample]) -> int | None:
    """Median SM clock in MHz of the samples in which the GPU was not idle, as it is while something compiles."""
    clocks = sorted(s.sm_mhz for s in samples if s.sm_mhz is not None and not (s.reasons or 0) & IDLE)
    return clocks[len(clocks) // 2] if clocks else None


def difference(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else now - then


def failed_record(reason: str) -> dict[str, Any]:
    """What a row says of a recording that took the process with it."""
    empty = ("slots", "identical", "padding_identical", "recorded_ms", "launched_ms")
    return {"status": "fails", "reason": reason, "batches": 0, "deterministic": False} | dict.fromkeys(empty)


def describe_data(dataset: Dataset, request: Request) -> dict[str, Any]:
    """Which text it is."""
    return {
        "path": request.data,
        "fingerprint": dataset.fingerprint,
        "vocab_size": dataset.vocab_size,
        **describe_documents(dataset, request.contexts),
    }


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    parts = [row["op"], row["case"], row["engine"]]
    parts += [f"{row['tokens']:,} tokens"] if row["tokens"] else []
    parts += [f"context {row['context']:,}"] if row["context"] else []
    parts += [f"{row['heads']} heads"] if row["op"] == "delta_rule" else []
    name = ", ".join(parts)
    if row["status"] != "ok":
        return f"{name}: {row['status'].upper()}: {row['reason']}"
    both, share = row["forward_backward_ms"], row["floor_share"]
    told = f"{both['median']:.3f} ms (+-{both['spread']:.3f}), {row['tflops']:,.1f} TFLOP/s, {row['gb_s']:,.0f} GB/s"
    if share is not None:
        told += f", floor / time {share:.0%}"
    if row["record"] is not None:
        told += f"; recorded: {row['record']['status']}"
        if row["record"]["recorded_ms"] is not None:
            told += f", {row['record']['launched_ms']['median']:.3f} -> {row['record']['recorded_ms']['median']:.3f} ms"
    return f"{name}: {told}"


def write_over(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader, or a power cut, sees the old one or the new one.

    Raises:
        OSError: where the disk says no.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    write_synced(temporary, text)
    os.replace(temporary, path)
    sync(path.parent)
