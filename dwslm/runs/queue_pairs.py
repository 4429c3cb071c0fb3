"""Arms of one test are paired: for each seed of one arm there is a run of every other with the same data, order and tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dwslm.runs.queue_job import JobSpec

PAIRED = ("data.", "evaluate.", "train.tokens", "train.batch_tokens", "train.eval_documents")
"""Settings, or groups of them, in which runs of one seed must agree across arms: what is read in which order, for how long, and
how it is scored."""
FREE = ("data.verify",)
"""Settings among those that change nothing of it."""
NO_MATTER = ("name", "runs_dir", "resume", "dry_run", "train.seed", "proxy.job")
"""Settings in which runs of one arm may differ."""


@dataclass
class ProxySettings:
    """The run's place in a test that compares arms. Nothing of it changes what is trained."""

    test: str | None = None
    """Name of the test that the run belongs to; null for none."""
    arm: str | None = None
    """What is tried in this run, in a word: its arm of the test."""
    varies: list[str] = field(default_factory=list)
    """Settings of data, length or scoring that the test is about, and in which its arms may therefore differ. A group is
    named with a dot at its end."""
    job: str | None = None
    """The queue's job that started the run; set by the queue."""

    def __post_init__(self) -> None:
        if self.arm is not None and self.test is None:
            raise ValueError(f"proxy.arm={self.arm} needs proxy.test, the test whose arm it is")
        for name in self.varies:
            if not _within(name.removesuffix("."), PAIRED) and not any(group.startswith(name) for group in PAIRED):
                raise ValueError(
                    f"proxy.varies names {name}, in which arms may differ anyhow: only settings of "
                    f"{', '.join(PAIRED)} are held equal"
                )


def check_paired(specs: Sequence[JobSpec], flatten: Any) -> None:
    """Refuses jobs of a test that cannot be compared.

    Args:
        specs: all training jobs of one test, those in the queue and those to be added.
        flatten: makes {"a.b": value} of a job's settings.

    Raises:
        ValueError: with the difference.
    """
    test = specs[0].test if specs else None
    arms: dict[str, dict[int, JobSpec]] = {}
    for spec in specs:
        if spec.arm is None or spec.seed is None or spec.config is None:
            raise ValueError(f"job {spec.name} of test {test} has no arm, seed or settings")
        of_arm = arms.setdefault(spec.arm, {})
        if spec.seed in of_arm:
            raise ValueError(
                f"test {test}: arm {spec.arm} has seed {spec.seed} already, as job {of_arm[spec.seed].id}: "
                "drop that one, or give another train.seed"
            )
        of_arm[spec.seed] = spec
    plain = {spec.id: flatten(spec.config) for spec in specs}
    first_arm, first = next(iter(arms.items()))
    for arm, of_arm in arms.items():
        one = next(iter(of_arm.values()))
        for spec in of_arm.values():
            if told := differences(plain[one.id], plain[spec.id], keep=lambda key: not _within(key, NO_MATTER)):
                raise ValueError(f"test {test}: runs of arm {arm} may differ in the seed alone, and do in {told}")
        if missing := first.keys() ^ of_arm.keys():
            lacking, having = (arm, first_arm) if missing & first.keys() else (first_arm, arm)
            raise ValueError(
                f"test {test}: arm {lacking} has no run of seed {min(missing)}, which arm {having} has: arms are compared "
                "seed by seed"
            )
        for seed, spec in of_arm.items():
            free = [*plain[spec.id].get("proxy.varies", []), *plain[first[seed].id].get("proxy.varies", []), *FREE]

            def must_agree(key: str, free: Sequence[str] = free) -> bool:
                return _within(key, PAIRED) and not _within(key, free)

            told = differences(plain[first[seed].id], plain[spec.id], keep=must_agree)
            anew = None not in (spec.data, first[seed].data) and spec.data != first[seed].data
            if not told and anew and must_agree("data.path"):
                told = f"{spec.config and spec.config['data']['path']} was prepared anew after the first was added"
            if told:
                raise ValueError(
                    f"test {test}, seed {seed}: arms {first_arm} and {arm} are not paired, {told}. Make them equal, or if the "
                    "test is about that, name it in proxy.varies"
                )


def differences(one: Mapping[str, Any], other: Mapping[str, Any], keep: Any) -> str:
    """In what two flat configurations differ, as words; "" for nothing."""
    keys = [key for key in {**one, **other} if keep(key) and one.get(key) != other.get(key)]
    return "; ".join(f"{key} is {one.get(key)!r} in the first and {other.get(key)!r} in the second" for key in keys)


def unpaired_runs(records: Mapping[tuple[str, int], Mapping[str, Any]], varies: Sequence[str] = ()) -> list[str]:
    """What tells that runs of one test did not read the same text, from their run.json: {(arm, seed): record}.

    Settings can agree where datasets do not: a folder may have been prepared anew in between.
    """
    told = []
    firsts: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for (arm, seed), record in records.items():
        first_arm, first = firsts.setdefault(seed, (arm, record))
        facts = {"planned_tokens": (first.get("planned_tokens"), record.get("planned_tokens"))}
        facts["held-out text"] = (_fact(first, "valid"), _fact(record, "valid"))
        if not any(name.startswith("data.") for name in varies):
            facts["training text"] = (_fact(first, "fingerprint"), _fact(record, "fingerprint"))
            facts["order of the data"] = (first.get("stream"), record.get("stream"))
        for name, (one, other) in facts.items():
            if one != other:
                told.append(f"seed {seed}: {name} is {one} in arm {first_arm} and {other} in arm {arm}")
    return told


def _fact(record: Mapping[str, Any], name: str) -> Any:
    return (record.get("dataset") or {}).get(name)


def _within(key: str, groups: Sequence[str]) -> bool:
    return any(key == group or (group.endswith(".") and key.startswith(group)) for group in groups)
