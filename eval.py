"""Scores a checkpoint in bits per byte by slice: `python eval.py checkpoint=RUN`."""

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dwslm.cli.errors import one_line_errors, run_hydra
from dwslm.cli.score import score_checkpoint
from dwslm.config import CONFIGS, ScoreConfig, register, to_object

register()


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="score")
def main(config: DictConfig) -> None:
    with one_line_errors():
        score_checkpoint(to_object(config, ScoreConfig), list(HydraConfig.get().overrides.task))


if __name__ == "__main__":
    run_hydra(main, wanted="checkpoint")
