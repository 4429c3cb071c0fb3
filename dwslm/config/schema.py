"""The settings of a run and of a scoring, each one typed object made of the parts' own settings."""

from dataclasses import dataclass, field
from typing import Any

from dwslm.data.mixture import MixtureSettings, Past
from dwslm.data.packing_settings import PackingSettings
from dwslm.data.prepare_settings import SAMPLE_DATA
from dwslm.data.stochastok import StochasTokSettings
from dwslm.evaluate.bits_per_byte import EvalSettings
from dwslm.evaluate.spelling import SpellingSettings
from dwslm.model.lm import ModelSettings
from dwslm.optim.settings import OptimSettings
from dwslm.runs.queue_pairs import ProxySettings
from dwslm.runs.track import TrackSettings
from dwslm.train.checkpoint import CheckpointSettings
from dwslm.train.distributed import RankSettings
from dwslm.train.guard import GuardSettings
from dwslm.train.settings import TrainSettings

# Settings whose keys are the user's own.
DICTIONARIES = ("data.mixture.weights", "data.mixture.max_epochs", "data.mixture.rephrased")


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

    def __post_init__(self) -> None:
        asked = self.spelling_tests != SpellingSettings()
        if self.text is not None and (
            self.bands or self.yarn_factor is not None or self.baselines or self.spelling or asked
        ):
            raise ValueError(
                "text= scores one file: leave out bands, yarn_factor, baselines, spelling and spelling_tests"
            )
        if self.yarn_factor is not None and not self.bands:
            raise ValueError(f"yarn_factor={self.yarn_factor} is of the bands: give bands=true too")
        if asked and not self.spelling:
            raise ValueError("spelling_tests says which questions to ask: give spelling=true too")


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
