"""What is measured in which order, so that what matters most is there when the time is up."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dwslm.bench.request import BY_CONTEXT, Request

TUNED = ("fla", "fla_gdn", "flashqla")
"""Engines that spend minutes on tuning when their caches are cold: after what is certain."""
SLOW = ("torch",)
"""Plain PyTorch on attention and the delta rule: measured at the first size only, to be seen; no choice hangs on the others."""
STARTED_S = 4.0
"""Seconds that a row needs at least where its engine has already run in this call."""
SHARE_NEEDED = 0.25
"""A row whose engine has not run yet is begun only if so much of its patience is left."""


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    op: str
    case: str
    heads: int | None
    engine: str
    tokens: int | None
    context: int | None
    record: bool
    at_size: bool
    """Whether it is held to the plain form at this size too: once a number of tokens."""
    patience: float
    """Seconds after which it is ended."""

    @property
    def key(self) -> tuple[str, str, int | None, str]:
        """What a gate is passed for."""
        return self.op, self.case, self.heads, self.engine

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(request: Request, catalogue: list[dict[str, Any]]) -> list[Job]:
    """All rows of a request, the most important ones first.

    First every case at the first size and the longest context, recorded; then the other numbers of tokens; the other contexts;
    what is `late` of the first size; the other numbers of heads; contexts and heads at the other numbers of tokens; and what is
    late of the rest.
    """
    first, *more = request.tokens[:1] if request.quick else request.tokens
    longest, *shorter = sorted(request.contexts, reverse=True)
    if request.quick:
        shorter = []
    stages: list[list[Job]] = [
        list(_at(request, catalogue, first, longest, main=True, record=True)),
        [job for tokens in more for job in _at(request, catalogue, tokens, longest, main=True)],
        [job for context in shorter for job in _at(request, catalogue, first, context, main=True)],
        list(_at(request, catalogue, first, longest, main=False, record=True)),
        [job for tokens in more for context in shorter for job in _at(request, catalogue, tokens, context, main=True)],
        [job for tokens in more for job in _at(request, catalogue, tokens, longest, main=False)],
    ]
    quick = [[job for job in stage if not late(job, longest)] for stage in stages]
    tuned = [[job for job in stage if late(job, longest) and job.engine in TUNED] for stage in stages]
    built = [[job for job in stage if late(job, longest) and job.engine not in TUNED] for stage in stages]
    order = [*quick[:3], tuned[0], built[0], *quick[3:], tuned[2], built[2], tuned[1], tuned[3]]
    order += [built[1], built[3], tuned[4], built[4], tuned[5], built[5]]
    return [job for stage in order for job in stage]


def late(job: Job, longest: int) -> bool:
    """Whether a row costs minutes, or compiles anew for a size that few decisions hang on."""
    shape = job.engine == "flex" and job.context != longest
    return job.engine in TUNED or shape or (job.op, job.engine) == ("optimizer", "compiled")


def _at(
    request: Request,
    catalogue: list[dict[str, Any]],
    tokens: int,
    context: int,
    *,
    main: bool,
    record: bool = False,
) -> Iterator[Job]:
    """Jobs of one size: the cases of the first number of heads (`main`) or of the others."""
    first_size = tokens == request.tokens[0] and context == max(request.contexts)
    for case in catalogue:
        heads = case["heads"]
        other_heads = case["op"] == "delta_rule" and heads != request.heads[0]
        if other_heads == main or (not first_size and not case["sized"]):
            continue
        if context != max(request.contexts) and not case["by_context"]:
            continue
        for engine in case["engines"]:
            name = engine["engine"]
            if request.engines is not None and name not in request.engines:
                continue
            if engine["missing"] and not (first_size and main):
                continue  # said once
            if name in SLOW and case["op"] in BY_CONTEXT and not first_size:
                continue
            yield Job(
                op=case["op"],
                case=case["case"],
                heads=heads,
                engine=name,
                tokens=tokens if case["sized"] else None,
                context=context if case["by_context"] else None,
                record=record,
                at_size=context == max(request.contexts),
                patience=engine["patience"],
            )


def needed(job: Job, started: set[tuple[str, str, int | None, str]]) -> float:
    """Seconds that must be left for a row to be begun."""
    return STARTED_S if job.key in started else max(STARTED_S, SHARE_NEEDED * job.patience)


def alone(job: Job, request: Request) -> str:
    """The command that measures one row by itself."""
    parts = ["dwslm bench", job.op, f"--engines {job.engine}"]
    if job.tokens is not None:
        parts.append(f"--tokens {job.tokens}")
    if job.context is not None:
        parts.append(f"--contexts {job.context}")
    if job.op == "delta_rule":
        parts.append(f"--heads {job.heads}")
    return " ".join(parts)


def again(job: Job) -> Job:
    """The same row to be timed once more, and nothing else."""
    return replace(job, record=False, at_size=False)
