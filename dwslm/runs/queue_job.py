"""A job of the queue: what is to run, and what the log says of it so far."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dwslm.runs.queue_log import Event

DONE, PREEMPTED, LOST = "done", "preempted", "lost"


@dataclass(frozen=True)
class JobSpec:
    """What is to run. Never changes."""

    id: str
    name: str
    program: str
    """"train.py" or "eval.py" of this project, or "" for a command of one's own in `arguments`."""
    arguments: list[str] = field(default_factory=list)
    cwd: str = "."
    runs_dir: str = "runs"
    config: dict[str, Any] | None = None
    """Every setting of a training run, as it was when the job was added."""
    data: str | None = None
    """Fingerprint of the text as it was when the job was added; None where it was not there yet."""
    test: str | None = None
    arm: str | None = None
    seed: int | None = None
    gpus: int = 1
    priority: int = 0
    """Higher goes first, and may make running jobs of lower priority save and wait."""
    after: list[str] = field(default_factory=list)
    """Jobs that must be done before."""

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ValueError(f"gpus={self.gpus} of job {self.name} must be 0 or more")
        if self.program not in ("train.py", "eval.py", ""):
            raise ValueError(f"program {self.program!r} of job {self.name} is not train.py, eval.py or empty")
        if not self.program and not self.arguments:
            raise ValueError(f"job {self.name} has no command")


@dataclass(frozen=True)
class Claim:
    """A worker's hold on a job. `number` is that of its event: no two claims share one."""

    number: int
    worker: str
    host: str
    boot: str
    gpus: list[str]
    time: float


@dataclass
class Job:
    """A job and what the log says of it."""

    spec: JobSpec
    order: int
    added: float
    since: float
    """When it came to stand as it does while nobody has it: added, ended, held, released, dropped; in seconds since 1970."""
    claim: Claim | None = None
    closed: int = 0  # number of the last claim that is over
    starts: int = 0
    hold: dict[str, Any] | None = None
    dropped: str | None = None
    decision: str | None = None
    ended: Event | None = None
    """The last end of a try."""
    over: bool = False  # done, failed or dropped: nobody takes it
    failures: Counter[str] = field(default_factory=Counter)
    not_before: float = 0.0
    saved: int | None = None
    avoid: set[str] = field(default_factory=set)
    preempt_by: str | None = None
    """The job that this one was asked to make room for."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def key(self) -> tuple[int, int]:
        """Place in the order: higher priority first, then as they were added."""
        return -self.spec.priority, self.order


@dataclass(frozen=True)
class Standing:
    """Where a job stands, in a word and with the reason."""

    state: str
    why: str = ""
