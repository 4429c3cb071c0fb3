"""Adds the jobs of a --multirun to the queue, instead of running them one after the other in this process.

Every start of Hydra imports this file, so it imports nothing of the library until there are jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write


@dataclass
class QueueLauncherConf:
    """Settings of the launcher, given as hydra.launcher.NAME=VALUE."""

    _target_: str = "hydra_plugins.dwslm_queue_launcher.queue_launcher.QueueLauncher"
    folder: str = "queue"
    """Folder of the queue."""
    gpus: int | None = None
    """GPUs of each job; null: one, and none with train.device=cpu."""
    priority: int = 0
    """Higher goes first, and may make running jobs of lower priority save and wait."""
    after: list[str] = field(default_factory=list)
    """Jobs of the queue that must be done before."""
    arms: dict[str, list[str]] = field(default_factory=dict)
    """Arms that are no grid: name -> overrides. Each job of the sweep is made once for each arm."""
    then: list[list[str]] = field(default_factory=list)
    """Scorings of each run once it is done: overrides of eval.py, without checkpoint."""
    wait: bool = False
    """Wait until all jobs are over, and return their bits per byte, for a sweeper that needs them."""


ConfigStore.instance().store(group="hydra/launcher", name="queue", node=QueueLauncherConf, provider="dwslm")


class QueueLauncher(Launcher):
    """See QueueLauncherConf."""

    def __init__(self, **settings: Any):
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from dwslm.cli.queue_add import Composed, enqueue, wait_for

        setup_globals()
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(QueueLauncherConf), self.settings))
        assert isinstance(settings, QueueLauncherConf)
        composed = []
        for words in job_overrides:
            for arm, more in (settings.arms or {"": []}).items():
                config = self.hydra_context.config_loader.load_sweep_config(self.config, [*words, *more])
                with read_write(config), open_dict(config):
                    del config["hydra"]
                composed.append(Composed(config, list(words), arm))
        specs = enqueue(
            composed,
            folder=settings.folder,
            gpus=settings.gpus,
            priority=settings.priority,
            after=settings.after,
            then=settings.then,
        )
        scores = wait_for(settings.folder, specs) if settings.wait else [None] * len(composed)
        returns = []
        for one, score in zip(composed, scores, strict=True):
            done = JobReturn(overrides=one.words, cfg=one.config, status=JobStatus.COMPLETED)
            done.return_value = score
            returns.append(done)
        return returns
