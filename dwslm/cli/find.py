"""Finding what a command line names, checkpoints of runs and datasets, and what it runs with: commit and packages."""

import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dwslm.config import SAMPLE_DATA, DataSettings
from dwslm.data.prepare_settings import DEMO_DATA
from dwslm.data.shards import Dataset, check_tokenizer, open_dataset
from dwslm.runs.folder import RunFolder, open_run
from dwslm.train import checkpoint as checkpoints
from dwslm.train.checkpoint import Checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]


def find_checkpoint(which: str, runs_dir: str) -> tuple[Checkpoint, RunFolder | None, list[tuple[Path, str]]]:
    """The checkpoint meant by RUN (its newest good one), RUN@best, RUN@STEP, RUN@75% (pinned there), or a checkpoint's
    folder.

    Returns:
        The checkpoint, its run if it lies in one, and newer checkpoints that were passed over, with the reasons.

    Raises:
        ValueError: where nothing fits, listing the steps that there are, or where it is damaged.
    """
    if (Path(which) / "manifest.json").is_file() and (Path(which) / "model.safetensors").is_file():
        found = checkpoints.open_checkpoint(which)
        found.verify()
        run = Path(which).resolve().parent.parent
        return found, open_run(run, runs_dir) if (run / "run.json").is_file() else None, []
    name, sign, at = which.partition("@")
    folder = open_run(name, runs_dir)
    if not sign:
        newest, passed_over = checkpoints.newest_good(folder.checkpoints)
        if newest is None:
            raise ValueError(f"run {folder.path} has no checkpoint yet")
        return newest, folder, passed_over
    percent = at.removesuffix("%")
    if at == "best" or percent != at:
        pin = at if at == "best" else f"at-{percent}-percent"
        steps = [step for step, reasons in checkpoints.pins(folder.checkpoints).items() if pin in reasons]
    else:
        steps = [int(at)] if at.isdigit() else []
    here = {found.step: found for found in checkpoints.find(folder.checkpoints)}
    for step in steps:
        if step in here:
            here[step].verify()
            return here[step], folder, []
    raise ValueError(
        f"{which!r}: after @ comes `best`, a step, or the percentage of a pin; run {folder.path.name} has checkpoints of steps "
        f"{', '.join(map(str, sorted(here))) or 'none'}"
    )


def open_split(data: DataSettings, split: str) -> Dataset:
    """The train/ or valid/ dataset of a prepared folder, checked against the tokenizer beside it.

    Raises:
        ValueError: one line that says how to make what is missing.
    """
    folder = Path(data.path)
    if not (folder / split / "manifest.json").is_file():
        made = f"`dwslm prepare --out {folder} --train FILES --valid FILES`"
        if data.path == DEMO_DATA:
            made = f"`dwslm demo` (which also trains) or `dwslm prepare --sample --out {folder} --vocab-size 4096`"
        elif data.path == SAMPLE_DATA:
            made += " or `dwslm prepare --sample`"
        raise ValueError(
            f"{folder / split} is not a prepared dataset (seen from {Path.cwd()}): name the folder where it is with data.path= "
            f"(data= in eval.py), or make it with {made}"
        )
    dataset = open_dataset(folder / split, data.verify)
    check_tokenizer(dataset, folder / "tokenizer.json")
    return dataset


def commit() -> str | None:
    """Commit of the checkout that this code runs from, with "+changes" where it differs; None outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return head and head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of these packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
