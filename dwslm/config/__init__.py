"""The whole configuration of a run: the parts' own settings in one typed object, checked together.

The only part that meets OmegaConf. The entry points call it; the library never does.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dwslm.config.check import check
from dwslm.config.explain import CONFIG_ERRORS, explain
from dwslm.config.schema import DataSettings, RunConfig, ScoreConfig, flatten, unflatten
from dwslm.data.mixture import Past
from dwslm.data.prepare_settings import SAMPLE_DATA
from dwslm.model.rotary import RopeSettings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# What a resume may change; the rest of the stored configuration stands.
RESUMABLE = (
    "runs_dir",
    "data.path",
    "data.verify",
    "data.allow_held_out_copies",
    "train.tokens",
    "train.log_every",
    "train.eval_every_tokens",
    "train.eval_documents",
    "train.prefetch",
    "train.device",
    "train.micro_batch_tokens",
    "train.record",
    "ranks.",
    "checkpoint.",
    "guard.sigma",
    "guard.off_for",
    "guard.max_skips",
    "guard.stretch",
    "guard.max_rollbacks",
    "evaluate.",
    "track.",
)

# What a branch may change: which text comes next, what the new run is called, where the same text lies, and how its steps
# fit the machine.
BRANCHABLE = ("name", "runs_dir", "data.mixture.", "data.path", "data.allow_held_out_copies", "train.device",
              "train.micro_batch_tokens", "train.record", "ranks.")  # fmt: skip

Config = TypeVar("Config", RunConfig, ScoreConfig)


def register() -> None:
    """Makes the typed schemas known to Hydra; called by the entry points before they compose."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    store.store(name="score_schema", node=ScoreConfig)


def to_object(config: DictConfig, kind: type[Config]) -> Config:
    """The typed, checked object of a composed configuration.

    Raises:
        ValueError: one line, for a name or value that the schema or a part's own check refuses.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
        assert isinstance(plain, dict)
        check(plain, kind)
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        cause = error.__cause__ or error
        raise ValueError(explain(cause if isinstance(cause, ValueError) else error)) from error
    assert isinstance(result, kind)
    return result


def to_request(config: DictConfig) -> RunConfig | dict[str, Any]:
    """A composed training configuration: typed and checked for a new run, plain for a resume.

    A resume's own settings are stored with the run; what was composed around the command line is only defaults, and
    checking them against it would blame settings that nobody gave.
    """
    if config.resume is None:
        return to_object(config, RunConfig)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    check(plain, RunConfig, values=False)
    return {str(key): value for key, value in plain.items()}


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON-able data: what run.json and every checkpoint hold."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_plain(plain: dict[str, Any]) -> RunConfig:
    """A stored configuration as an object.

    Raises:
        ValueError: where it holds what this version does not know.
    """
    split = plain.get("data", {}).get("stochastok", {})
    if "proportion" in split and "enabled" not in split:  # before there was a switch, a proportion above 0 was one
        own = {"enabled": bool(split["proportion"]), "proportion": split["proportion"] or None}
        plain = {**plain, "data": {**plain["data"], "stochastok": own}}
    try:
        return to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), plain), RunConfig)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ValueError(f"the stored configuration does not fit this version: {explain(error)}") from error


def config_hash(config: RunConfig) -> str:
    """sha256 of the configuration, without what only says where things lie."""
    plain = {k: v for k, v in to_plain(config).items() if k not in ("runs_dir", "resume", "dry_run", "proxy", "track")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def resume_config(
    stored: dict[str, Any], given: dict[str, Any], overrides: Sequence[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration that a resumed run goes on with: the stored one, with the allowed overrides applied.

    Args:
        stored: configuration out of the checkpoint.
        given: what the command line composed.
        overrides: the command line's overrides; only what they name is compared, since the rest are defaults.

    Returns:
        The configuration, and what was changed in it as {setting: new value}.

    Raises:
        ValueError: for an override that would change anything else, with both values.
    """
    changed, refused = _changes(stored, given, overrides, RESUMABLE)
    if refused:
        raise ValueError(
            f"a resume may not change {'; '.join(refused)}. Leave it out, or start a new run with init_from="
        )
    config = from_plain(unflatten(flatten(stored) | changed))
    before = stored["train"]["tokens"]
    if config.train.tokens < before:
        raise ValueError(
            f"a resume may lengthen the plan, not shorten it: train.tokens is {before}, not {config.train.tokens}"
        )
    return config, changed


def branch_config(
    stored: dict[str, Any], given: dict[str, Any], overrides: Sequence[str], row: int, checkpoint: Path
) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a run that goes on from another's checkpoint with another mixture.

    Args:
        stored, given, overrides: as for `resume_config`.
        row: position of the checkpoint: the stored mixture holds until there, the new one from there on.
        checkpoint: its folder.

    Returns:
        The configuration, and what was changed in it as {setting: new value}.

    Raises:
        ValueError: for an override that would change anything but the mixture and names, with both values.
    """
    changed, refused = _changes(stored, given, overrides, BRANCHABLE)
    if refused:
        allowed = ", ".join(name.rstrip(".") for name in BRANCHABLE)
        raise ValueError(
            f"a branch may change {allowed} alone, but {'; '.join(refused)}. Leave it out, or start a new run with init_from="
        )
    config = from_plain(unflatten(flatten(stored) | changed))
    config.data.past.append(Past(row, from_plain(stored).data.mixture))
    dry_run = bool(given.get("dry_run"))
    return dataclasses.replace(config, branch=str(checkpoint), resume=None, init_from=None, dry_run=dry_run), changed


def _changes(
    stored: dict[str, Any], given: dict[str, Any], overrides: Sequence[str], allowed: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """What the command line would change, as {setting: new value} and, where that is not allowed, as words.

    A setting that is younger than the stored configuration has its default there.
    """
    mine, asked = flatten(to_plain(from_plain(stored))), flatten(given)
    names = [override.split("=", 1)[0].lstrip("+~") for override in overrides]
    grouped = any(name not in asked and not any(key.startswith(f"{name}.") for key in asked) for name in names)
    changed: dict[str, Any] = {}
    refused = []
    for key, value in asked.items():
        named = grouped or any(key == name or key.startswith(f"{name}.") for name in names)
        if key in ("resume", "dry_run", "init_from", "branch") or not named or mine.get(key) == value:
            continue
        if any(key == may or (may.endswith(".") and key.startswith(may)) for may in allowed):
            changed[key] = value
        else:
            refused.append(f"{key} ({mine.get(key)!r} there, {value!r} here)")
    return changed, refused


__all__ = [
    "CONFIGS",
    "CONFIG_ERRORS",
    "SAMPLE_DATA",
    "DataSettings",
    "RopeSettings",
    "RunConfig",
    "ScoreConfig",
    "branch_config",
    "config_hash",
    "explain",
    "flatten",
    "from_plain",
    "register",
    "resume_config",
    "to_object",
    "to_plain",
    "to_request",
    "unflatten",
]
