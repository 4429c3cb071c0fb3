"""A search where a grid would be too large: Optuna proposes settings, the queue runs them, Optuna is told their bits per byte.

By ask and tell, so that Optuna runs nothing itself: a search that is killed goes on where it was, and its jobs are like others.
"""

import argparse
import importlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from dwslm.cli.queue_add import runs_of, score_of, training_job
from dwslm.config import CONFIGS, RunConfig, register, to_object
from dwslm.runs.queue import Queue

POLL_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="WORD", help="settings that all trials share, after --")
    parser.add_argument("--study", required=True, help="name of the search; a known one goes on")
    parser.add_argument("--space", action="append", required=True, metavar="NAME=RANGE",
                        help="LOW:HIGH, log:LOW:HIGH, int:LOW:HIGH or A,B,C; repeatable")  # fmt: skip
    parser.add_argument("--trials", type=int, required=True, metavar="N", help="finished trials to reach in all")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trials in the queue; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the proposals; default %(default)s")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="of the jobs; default %(default)s")


def search(arguments: argparse.Namespace, folder: Path, poll_s: float = POLL_S) -> Any:
    """Runs the search to its number of trials. Returns Optuna's study.

    Raises:
        ValueError: where Optuna is not installed, or a range cannot be read.
    """
    ranges = [space(text) for text in arguments.space]
    optuna = the_optuna()
    queue = Queue(folder)
    (folder / "searches").mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "searches" / f"{arguments.study}.log"))
    study = optuna.create_study(
        study_name=arguments.study,
        storage=optuna.storages.JournalStorage(backend),
        # Moved on by what the queue has seen: a search that goes on must not propose its first settings again.
        sampler=optuna.samplers.TPESampler(seed=arguments.seed + queue.log.last),
        direction="minimize",
        load_if_exists=True,
    )
    states = optuna.trial.TrialState
    while True:
        queue.refresh()
        for trial in study.get_trials(states=(states.RUNNING,)):
            job = queue.jobs.get(trial.user_attrs.get("job", ""))
            if job is None:  # killed between the proposal and its job
                study.tell(trial.number, state=states.FAIL)
            elif job.over and job.claim is None:
                run = runs_of([job.spec]).get(job.id) if queue.done(job.id) else None
                score = score_of(run) if run else None
                study.tell(trial.number, score, state=None if score is not None else states.FAIL)
        done = len(study.get_trials(states=(states.COMPLETE,)))
        running = len(study.get_trials(states=(states.RUNNING,)))
        failed = len(study.get_trials(states=(states.FAIL,)))
        if done >= arguments.trials:
            return study
        if failed > arguments.trials:
            raise ValueError(f"search {arguments.study}: {failed} trials failed, see `dwslm queue ls`")
        for _ in range(min(arguments.at_once - running, arguments.trials - done - running)):
            propose(study, ranges, arguments, queue)
        time.sleep(poll_s)


def propose(
    study: Any, ranges: Sequence[tuple[str, str, list[str]]], arguments: argparse.Namespace, queue: Queue
) -> None:
    """One trial of Optuna's as a job."""
    trial = study.ask()
    words = []
    for name, kind, values in ranges:
        if kind == "one of":
            value = trial.suggest_categorical(name, values)
        elif kind == "int":
            value = trial.suggest_int(name, int(values[0]), int(values[1]))
        else:
            value = trial.suggest_float(name, float(values[0]), float(values[1]), log=kind == "log")
        words.append(f"{name}={value}")
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        config = to_object(compose("config", overrides=[*arguments.words, *words]), RunConfig)
    config = replace(config, name=f"{arguments.study}-{trial.number}")
    spec = training_job(config, "", None, arguments.priority, [])
    trial.set_user_attr("job", spec.id)
    queue.add([spec])


def space(text: str) -> tuple[str, str, list[str]]:
    """`optim.lr=log:0.001:0.03` as its name, its kind and its values.

    Raises:
        ValueError: where it is none of the forms.
    """
    name, _, given = text.partition("=")
    *kind, low, high = given.split(":") if ":" in given else ("", "")
    if name and "," in given and ":" not in given:
        return name, "one of", given.split(",")
    try:
        fits = bool(name) and kind in ([], ["log"], ["int"]) and float(low) < float(high)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"--space {text}: give NAME=LOW:HIGH, NAME=log:LOW:HIGH, NAME=int:LOW:HIGH or NAME=A,B,C")
    return name, kind[0] if kind else "float", [low, high]


def the_optuna() -> Any:
    """The package.

    Raises:
        ValueError: how to get it.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ValueError("a search needs Optuna: pip install 'dwslm[optuna]'") from None
