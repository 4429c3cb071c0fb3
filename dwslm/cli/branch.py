"""`branch=RUN@75%`: a new run that goes on from another's checkpoint with another mixture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dwslm.cli.find import find_checkpoint
from dwslm.config import RunConfig, branch_config, to_plain
from dwslm.train.checkpoint import Checkpoint


@dataclass
class Branch:
    """Where a branch begins."""

    config: RunConfig
    """Of the new run."""
    checkpoint: Checkpoint
    provenance: dict[str, Any]
    """For run.json: run, checkpoint, step, tokens, row, and what was changed."""


def open_branch(given: RunConfig, overrides: Sequence[str]) -> Branch:
    """Finds and verifies the checkpoint, and makes the new run's configuration out of the old one's.

    Raises:
        ValueError: where there is no such checkpoint, or more than the mixture would change.
    """
    if given.init_from is not None:
        raise ValueError(
            "branch= goes on with all of a checkpoint and init_from= takes its weights alone: give one of them"
        )
    which = str(given.branch)
    found, run, passed_over = find_checkpoint(which, given.runs_dir)
    if passed_over:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in passed_over)
        raise ValueError(
            f"branch={which}: the newest checkpoint can't be used ({reasons}); name a step, as in RUN@{found.step}"
        )
    state, path = found.state, found.path.resolve()
    config, changed = branch_config(state["config"], to_plain(given), overrides, state["row"], path)
    if state["step"] * config.train.batch_tokens >= config.train.tokens:
        raise ValueError(f"branch={which}: {path} is the end of its run, nothing is left to train")
    provenance = {
        "run": run.record["id"] if run else None,
        "checkpoint": str(path),
        **{name: state[name] for name in ("step", "tokens", "row")},
        "changed": changed,
    }
    return Branch(config, found, provenance)
