"""The whole configuration of a run: the parts' own settings in one typed object, checked together.

The only file that meets Hydra and OmegaConf. The entry points call it; the library never does.
"""

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dwslm.data.mixture import MixtureSettings, Past
from dwslm.data.packing_settings import PackingSettings
from dwslm.data.prepare_settings import SAMPLE_DATA
from dwslm.data.stochastok import StochasTokSettings
from dwslm.evaluate.bits_per_byte import EvalSettings
from dwslm.evaluate.spelling import SpellingSettings
from dwslm.model.lm import ModelSettings
from dwslm.model.rotary import RopeSettings
from dwslm.optim.settings import OptimSettings
from dwslm.runs.queue_pairs import ProxySettings
from dwslm.runs.track import TrackSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.distributed import RankSettings
from dwslm.train.guard import GuardSettings
from dwslm.train.settings import TrainSettings

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

# Settings whose keys are the user's own.
DICTIONARIES = ("data.mixture.weights", "data.mixture.max_epochs", "data.mixture.rephrased")

# What Hydra and OmegaConf raise for a command line that does not fit; `explain` makes one line of it.
CONFIG_ERRORS = (HydraException, OmegaConfBaseException)

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


@dataclass
class DataSettings:
    """Which text is trained on, in what proportions, and how it is packed."""

    path: str = SAMPLE_DATA
    """Folder that `dwslm prepare` made, with train/, valid/ and tokenizer.json."""
    verify: str = "size"
    """What is checked when shards are opened: "size", or "sha256" to read them whole."""
    mixture: MixtureSettings = field(default_factory=MixtureSettings)
    """Shares of the sources, and how they change in the course of the run."""
    packing: PackingSettings = field(default_factory=PackingSettings)
    """How rows are filled."""
    stochastok: StochasTokSettings = field(default_factory=StochasTokSettings)
    """Tokens split at random in training text."""
    allow_held_out_copies: bool = False
    """Train although texts of held-out documents stand in the training text under other ids; a note says how many. Without
    it such data are refused. `dwslm prepare --dedup` leaves them out."""
    past: list[Past] = field(default_factory=list)
    """Mixtures that a branch's beginning was trained with. `branch=` fills this in."""


@dataclass
class RunConfig:
    """One training run."""

    name: str = "run"
    """Name of the run; part of its folder's name."""
    runs_dir: str = "runs"
    """Folder that holds the run folders."""
    resume: str | None = None
    """Run to go on with: its folder, name or id, or "auto" for the newest unfinished one."""
    init_from: str | None = None
    """Checkpoint whose weights alone start a new run: RUN (its newest), RUN@best, RUN@STEP, or a checkpoint's folder."""
    branch: str | None = None
    """Checkpoint of a run to go on from in a new run with another mixture: RUN@75% (pinned there), RUN@STEP. Optimizer,
    position and schedule go on; only `data.mixture`, `name`, `runs_dir`, the place of the same text, and what fits the steps to
    the machine may differ."""
    dry_run: bool = False
    """Build everything, print sizes, routing, rates and memory, run one step, and leave nothing behind."""
    data: DataSettings = field(default_factory=DataSettings)
    """Text."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Network."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """Optimizer, rate and schedule."""
    train: TrainSettings = field(default_factory=TrainSettings)
    """Training loop."""
    ranks: RankSettings = field(default_factory=RankSettings)
    """Several processes that train together."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """Saving."""
    guard: GuardSettings = field(default_factory=GuardSettings)
    """Steps that are left out."""
    evaluate: EvalSettings = field(default_factory=EvalSettings)
    """Scoring."""
    track: TrackSettings = field(default_factory=TrackSettings)
    """Trackers."""
    proxy: ProxySettings = field(default_factory=ProxySettings)
    """Place in a test."""


@dataclass
class ScoreConfig:
    """One scoring of a checkpoint."""

    checkpoint: str | None = None
    """What to score: RUN (its newest checkpoint), RUN@best, RUN@STEP, or a checkpoint's folder."""
    runs_dir: str = "runs"
    """Folder that holds the run folders."""
    data: str | None = None
    """Prepared dataset folder; null for the one that the run trained on."""
    text: str | None = None
    """A text file of your own to score instead of the held-out set."""
    bands: bool = False
    """Score long documents by position as well, with and without YaRN."""
    yarn_factor: float | None = None
    """YaRN's factor for the bands; null for the last band over the trained context."""
    baselines: bool = False
    """Also print what an order-0 byte model and xz -9 need for the same text."""
    spelling: bool = False
    """Score the spelling, counting and arithmetic tests as well."""
    spelling_tests: SpellingSettings = field(default_factory=SpellingSettings)
    """Which questions the spelling tests ask."""
    device: str = "auto"
    """As `train.device`."""
    evaluate: EvalSettings = field(default_factory=EvalSettings)
    """How to score. What is not given is as in the run."""


Config = TypeVar("Config", RunConfig, ScoreConfig)


def register() -> None:
    """Makes the typed schemas known to Hydra; called by the entry points before they compose."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    store.store(name="score_schema", node=ScoreConfig)


def to_object(config: DictConfig, kind: type[Config]) -> Config:
    """The typed, checked object of a composed configuration.

    Raises:
        ValueError: one line, for a value that the schema or a part's own check refuses.
    """
    try:
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
    return dataclasses.replace(config, branch=str(checkpoint), resume=None, init_from=None), changed


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


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; lists and free-form dictionaries of numbers stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in DICTIONARIES:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def explain(error: BaseException, wanted: str = "experiment") -> str:
    """One line out of an error of Hydra or OmegaConf, with the nearest name where a setting is misspelt.

    `wanted` is the setting that a word without a name may have been meant for.
    """
    word = getattr(error, "override", None)
    if isinstance(error, OverrideParseException) and isinstance(word, str) and "=" not in word:
        return f"{word} is not name=value: did you mean {wanted}={word.lstrip('+~')}?"
    own, others = (list(flatten(dataclasses.asdict(made))) for made in (RunConfig(), ScoreConfig()))
    program = "eval.py"
    if wanted == "checkpoint":
        own, others, program = others, own, "train.py"
    text = str(error)
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in text:
        text = f"{text}\n{cause}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = "; ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type", "To append"))
    )
    for part in lines:
        if part.startswith("Could not override '"):
            name = part.split("'")[1]
            if name in DICTIONARIES:
                return f"{name}: a dictionary is given with a plus, +{name}={{key:value}}"
            if wanted == "checkpoint" and name in ("experiment", "test"):
                return f"{name} is a setting of train.py: eval.py takes checkpoint=RUN"
            if name in others and name not in own:
                return f"{name} is a setting of {program}; see docs/settings.md"
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
            return f"unknown setting {name}" + (f": did you mean {near[0]}?" if near else "; see docs/settings.md")
    line = line.replace("is incompatible with type hint 'Union[int, str]'", "could not be converted to Integer")
    fraction = re.search(r"Value '([^']+)' of type 'float' could not be converted to Integer", line)
    if fraction and float(fraction[1]).is_integer():  # 1e6
        line += f": write {int(float(fraction[1])):_}"
    below = re.match(r"Error merging override \+*([\w.]+)\.(\w+)=(.*)", lines[0]) if lines else None
    if below and below[1] in own and "'dict'" in line:  # a setting below one that is a value
        return f"unknown setting {below[1]}.{below[2]}: did you mean {below[1]}={below[3]}?"
    full_key = next((part.split(":", 1)[1].strip() for part in lines if part.startswith("full_key")), "")
    return f"{full_key}: {line}" if full_key and full_key not in line else line


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
    "from_plain",
    "register",
    "resume_config",
    "to_object",
    "to_plain",
    "to_request",
]
